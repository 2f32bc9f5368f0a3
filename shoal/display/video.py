"""Images, one after another, as an H.264 video."""

from __future__ import annotations

from contextlib import suppress
from fractions import Fraction
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import numpy as np

from shoal.core.errors import ShoalError
from shoal.core.types import Array

LOWEST = 240  # pixels; smaller images are enlarged, since players blur them
QUALITY = {"crf": "18", "preset": "fast"}  # x264's scale: 0 loses nothing, 18 nothing that can be seen


class Video:
    """An mp4 that appears, whole, when the block that fills it ends without an error."""

    def __init__(self, path: str | Path, fps: float) -> None:
        """Write to `path`, at `fps` frames a second."""
        try:
            import av
        except ImportError as error:
            raise ShoalError("a video needs PyAV: pip install 'shoal[video]'") from error
        if not 0 < fps < float("inf"):
            raise ShoalError(f"a video needs a positive number of frames per second, not {fps}")
        self.path = Path(path)
        self.fps = fps
        self._draft = self.path.with_name(f".draft-{self.path.name}")
        self._av: Any = av
        self._file: Any = None
        self._stream: Any = None
        self._shape: tuple[int, ...] = ()

    def __enter__(self) -> Self:
        """Begin."""
        return self

    def add(self, frame: Array) -> None:
        """Append an image, uint8 [H, W, 3]; all must have the same size."""
        if frame.dtype != np.uint8 or frame.ndim != 3 or frame.shape[2] != 3 or not frame.size:
            raise ShoalError(f"a frame must be uint8 [H, W, 3], not {frame.dtype} {list(frame.shape)}")
        if self._shape and frame.shape != self._shape:
            raise ShoalError(f"frames must have the same size: the first was {self._shape}, this one is {frame.shape}")
        picture = _fit(frame)
        if self._file is None:
            self._open(picture)
            self._shape = frame.shape
        self._file.mux(self._stream.encode(self._av.VideoFrame.from_ndarray(picture, format="rgb24")))

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Finish the file and give it its name; after an error leave nothing."""
        try:
            if kind is None and self._file is None:
                raise ShoalError(f"{self.path} would have no frames")
            if kind is None:
                self._file.mux(self._stream.encode(None))
                self._file.close()
                self._draft.replace(self.path)
        finally:
            with suppress(Exception):  # the earlier error matters more
                if self._file is not None:
                    self._file.close()
            self._draft.unlink(missing_ok=True)

    def _open(self, picture: Array) -> None:
        self.path.parent.mkdir(parents=True, exist_ok=True)
        self._file = self._av.open(str(self._draft), "w", format="mp4")
        rate = Fraction(self.fps).limit_denominator(1000)
        self._stream = self._file.add_stream("libx264", rate=rate, options=QUALITY)
        self._stream.height, self._stream.width = picture.shape[:2]
        self._stream.pix_fmt = "yuv420p"  # the one that every player knows


def _fit(frame: Array) -> Array:
    """Enlarge a small image by a whole factor, and make odd sides even, as H.264 requires."""
    times = -(-LOWEST // frame.shape[0])
    if times > 1:
        frame = frame.repeat(times, axis=0).repeat(times, axis=1)
    high, wide = frame.shape[:2]
    return np.pad(frame, ((0, high % 2), (0, wide % 2), (0, 0)), mode="edge")
