"""A guard over the frames of one session: none can be altered, cut, repeated, dropped or put in another order.

A frame is the payload and a trailer, `counter u64 | tag 16 B`: the payload begins where the frame does, so that arrays
in it stay aligned. The tag is GMAC, AES-256-GCM over data that is not encrypted (NIST SP 800-38D), and the counter its
nonce: processors have instructions for it, and it takes a tenth of the time of HMAC-SHA256.
"""

from __future__ import annotations

import struct

from shoal.core.errors import Refused, WireError
from shoal.core.wire import Buffer
from shoal.transport.certificates import cluster_extra

COUNTER = struct.Struct("<Q")
NONCE = struct.Struct("<IQ")
TAG = 16
TRAILER = COUNTER.size + TAG
GREATEST = (1 << 31) - 1  # that the library signs in one piece
LIMIT = 1 << 30


class Guard:
    """Seals what is sent and opens what is received; each direction is used by one thread at a time."""

    def __init__(self, sending: bytes, receiving: bytes, limit: int = LIMIT) -> None:
        """Take a key of 32 bytes per direction, never used before, and the greatest payload in bytes."""
        with cluster_extra():
            from cryptography.exceptions import InvalidTag
            from cryptography.hazmat.primitives.ciphers.aead import AESGCM

        if sending == receiving:
            raise ValueError("each direction needs a key of its own")
        if not 0 < limit <= GREATEST:
            raise ValueError(f"the limit of a payload must be between 1 and {GREATEST} B, got {limit}")
        self.limit, self._invalid = limit, InvalidTag
        self._sign, self._verify = AESGCM(sending), AESGCM(receiving)
        self._sent = self._received = 0
        self._broken = False

    def seal(self, *parts: Buffer) -> bytearray:
        """The frame that carries the parts as one payload."""
        frame = bytearray().join((*parts, bytes(TRAILER)))
        if (size := len(frame) - TRAILER) > self.limit:
            raise WireError(f"message too large: {size} B, the limit is {self.limit} B")
        counter, self._sent = self._sent, self._sent + 1
        with memoryview(frame)[:size] as payload:
            tag = self._sign.encrypt(NONCE.pack(0, counter), b"", payload)
        frame[size:] = COUNTER.pack(counter) + tag
        return frame

    def open(self, frame: Buffer) -> memoryview:
        """The payload of the frame that was due, without a copy; after any other, nothing is opened any more."""
        if self._broken:
            raise Refused("the session ended with a frame that was refused")
        self._broken = True  # until the frame has proved good
        view = memoryview(frame)
        size = len(view) - TRAILER
        if size < 0:
            raise Refused(f"frame of {len(view)} B is shorter than its trailer of {TRAILER} B")
        if size > self.limit:
            raise Refused(f"frame too large: {size} B, the limit is {self.limit} B")
        (counter,) = COUNTER.unpack_from(view, size)
        payload = view[:size]
        try:
            self._verify.decrypt(NONCE.pack(0, counter), view[-TAG:], payload)
        except self._invalid:
            raise Refused("frame was altered, or is not of this session") from None
        if counter != self._received:
            how = "came again" if counter < self._received else "came too early"
            raise Refused(f"frame {counter} {how}: {self._received} was due")
        self._received += 1
        self._broken = False
        return payload


class Unguarded:
    """Stands in for a guard on a link by which anyone can run code: sealing its frames would protect nothing."""

    def seal(self, *parts: Buffer) -> bytearray:
        """The parts as one frame."""
        frame = bytearray().join(parts)
        if len(frame) > LIMIT:
            raise WireError(f"message too large: {len(frame)} B, the limit is {LIMIT} B")
        return frame

    def open(self, frame: Buffer) -> memoryview:
        """The frame as it came."""
        return memoryview(frame)
