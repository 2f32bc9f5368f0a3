"""A pipe between two processes: messages over a socket pair, large arrays through shared memory.

Neither the socket nor the memory has a name in the file system, so nothing can be left behind, whoever dies.
"""

from __future__ import annotations

import mmap
import os
import socket
import struct
import tempfile
import threading
from collections import deque
from typing import Any

import numpy as np

from shoal.core import wire
from shoal.core.errors import DeadlineExceeded, ServiceLost

KEPT = 128  # in the byte of counts: the block belongs to this message alone
LARGE = 256 << 10  # bytes from which mapping memory is cheaper than copying into it
NEWEST = 2  # messages that are kept for others to ask for
CHUNK = 1 << 16  # one read takes a whole small message
DESCRIPTORS = socket.CMSG_SPACE(4 * 64)  # room for those of one read


def anonymous_file(size: int, name: str = "shoal") -> int:
    """A file descriptor of shared memory that no directory lists; the name is shown where a process is inspected."""
    if hasattr(os, "memfd_create"):
        descriptor = os.memfd_create(name)
    else:
        with tempfile.TemporaryFile() as file:
            descriptor = os.dup(file.fileno())
    os.ftruncate(descriptor, size)
    return descriptor


class SharedMessage:
    """A message in shared memory, to be sent to many."""

    def __init__(self, source: Any, value: Any) -> None:
        """Write its large arrays once; the source identifies it."""
        self.source = source
        size = wire.shared_size(value)
        self.descriptor = anonymous_file(size)
        with mmap.mmap(self.descriptor, size) as memory, memoryview(memory) as block:
            self.message = b"".join(wire.encode(value, block))

    def __del__(self) -> None:
        """Release it here; it stays where it was mapped."""
        os.close(self.descriptor)


class MessageCache:
    """The newest of those messages, by what they were made from."""

    def __init__(self) -> None:
        """Begin empty."""
        self._turn = threading.Lock()
        self._kept: deque[SharedMessage] = deque(maxlen=NEWEST)

    def keep(self, value: Any, message: Any) -> SharedMessage:
        """The message in shared memory; the same one for the same value."""
        with self._turn:
            for kept in self._kept:
                if kept.source is value:
                    return kept
            self._kept.append(SharedMessage(value, message))
            return self._kept[-1]


class Pipe:
    """One end; each direction is used by one thread at a time."""

    def __init__(self, connection: socket.socket) -> None:
        """Take over a connected socket."""
        self.socket = connection
        self._outgoing: mmap.mmap | None = None  # written here, read by the other end
        self._incoming: mmap.mmap | None = None
        self._rest = b""
        self._descriptors: list[int] = []

    @staticmethod
    def pair() -> tuple[Pipe, socket.socket]:
        """A pipe, and the socket of its other end."""
        here, there = socket.socketpair(socket.AF_UNIX, socket.SOCK_STREAM)
        return Pipe(here), there

    def set_deadline(self, seconds: float) -> None:
        """Limit every wait for the other end; done by the kernel, which saves a system call per message."""
        limit = struct.pack("ll", int(seconds), int(seconds % 1 * 1e6))
        for option in (socket.SO_RCVTIMEO, socket.SO_SNDTIMEO):
            self.socket.setsockopt(socket.SOL_SOCKET, option, limit)

    def send(self, value: Any, descriptors: tuple[int, ...] = ()) -> None:
        """Send a value, with file descriptors for the other process if there are any."""
        new: tuple[int, ...] = ()
        if (message := wire.plain(value)) is not None:
            if not descriptors:  # most messages
                self._write(b"\0" + message)
                return
            buffers: list[wire.Buffer] = [message]
        else:
            need = wire.shared_size(value)
            if need > (len(self._outgoing) if self._outgoing is not None else 0):
                new = (self._grow(need),)
            buffers = wire.encode(value, memoryview(self._outgoing) if self._outgoing is not None else None)
        # The first byte counts the descriptors, and whether the first of them is the new shared block.
        data = b"".join([bytes([len(new) + 2 * len(descriptors)]), *buffers])
        try:
            self._write(data, [*new, *descriptors])
        finally:
            for descriptor in new:
                os.close(descriptor)

    def send_kept(self, kept: SharedMessage) -> None:
        """Send a message that is in shared memory already, which the other process maps and need not copy."""
        self._write(bytes([KEPT | 1]) + kept.message, [kept.descriptor])

    def _write(self, data: bytes, descriptors: list[int] | None = None) -> None:
        try:
            if descriptors:
                sent = socket.send_fds(self.socket, [data], descriptors)
                data = data[sent:]
            if data:
                self.socket.sendall(data)
        except (TimeoutError, BlockingIOError) as error:
            raise DeadlineExceeded("the other process does not take the message") from error
        except ConnectionError as error:
            raise ServiceLost("the other process has ended") from error

    def _grow(self, need: int) -> int:
        size = max(1 << 20, 1 << (need - 1).bit_length())
        descriptor = anonymous_file(size)
        self._outgoing = mmap.mmap(descriptor, size)
        return descriptor

    def receive(self, copy: bool = True) -> tuple[Any, list[int]]:
        """Wait for a value and its descriptors; without `copy`, large arrays are valid until the next message."""
        try:
            message, header, counts = self._read()
        except (TimeoutError, BlockingIOError) as error:
            raise DeadlineExceeded("no answer in time") from error
        except ConnectionError as error:
            raise ServiceLost("the other process has ended") from error
        descriptors: list[int] = []
        if counts:
            kept = counts & KEPT
            if counts & 1:
                block = self._descriptors.pop(0)
                # A kept message belongs to many: whoever writes to it has a copy from then on.
                memory = mmap.mmap(
                    block, os.fstat(block).st_size, access=mmap.ACCESS_COPY if kept else mmap.ACCESS_WRITE
                )
                os.close(block)
                if kept:
                    return wire.parse(message, header, memoryview(memory)), []
                self._incoming = memory
            descriptors, self._descriptors = self._descriptors[: counts >> 1], self._descriptors[counts >> 1 :]
        if self._incoming is None:
            return wire.parse(message, header), descriptors
        value = wire.parse(message, header, memoryview(self._incoming))
        return (_owned(value) if copy else value), descriptors

    @property
    def pending(self) -> bool:
        """Whether more has been read already, which no selector will report."""
        return bool(self._rest)

    def _read(self) -> tuple[memoryview, int, int]:
        """The next message, the length of its header and its byte of counts; what follows it is kept."""
        data, self._rest = self._rest or self._more(), b""
        while len(data) < 1 + wire.PREFIX.size:
            data += self._more()
        header, body = wire.sizes(data, 1)
        total = 1 + wire.PREFIX.size + header + body
        if len(data) > total:
            data, self._rest = data[:total], data[total:]
        if len(data) == total and not body:
            return memoryview(data)[1:], header, data[0]
        message = bytearray(total)  # arrays in it can be written to, as those in shared memory can
        message[: len(data)] = data
        view = memoryview(message)[len(data) :]
        while view:
            count = self.socket.recv_into(view)
            if not count:
                raise ServiceLost("the other process ended in the middle of a message")
            view = view[count:]
        return memoryview(message)[1:], header, data[0]

    def _more(self) -> bytes:
        data, control, _, _ = self.socket.recvmsg(CHUNK, DESCRIPTORS)
        if not data:
            raise ServiceLost("the other process has ended")
        for _, _, payload in control:
            self._descriptors += np.frombuffer(payload, np.int32).tolist()
        return data

    def close(self) -> None:
        """Close the socket; the memory goes when the last view of it goes."""
        self.socket.close()
        self._outgoing = self._incoming = None


def _owned(value: Any) -> Any:
    """Copy large arrays out of shared memory; small ones are part of the message itself."""
    if isinstance(value, np.ndarray):
        return value.copy() if value.nbytes >= wire.THRESHOLD else value
    if isinstance(value, dict):
        return {key: _owned(item) for key, item in value.items()}
    return [_owned(item) for item in value] if isinstance(value, list) else value
