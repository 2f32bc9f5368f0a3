"""Films: what is added is what can be seen, and nothing half-made is left."""

from __future__ import annotations

import sys

import av
import numpy as np
import pytest

from shoal.core.errors import ShoalError
from shoal.display.video import Video


def frames(path):
    """The pictures of a film, with its codec, pixel format and frames per second."""
    with av.open(str(path)) as file:
        stream = file.streams.video[0]
        pictures = [frame.to_ndarray(format="rgb24") for frame in file.decode(video=0)]
        return pictures, (stream.codec_context.name, stream.pix_fmt, stream.average_rate)


def film(path, pictures, fps=5):
    with Video(path, fps) as video:
        for picture in pictures:
            video.add(picture)


def plain(colour, high=240, wide=320):
    return np.full((high, wide, 3), colour, np.uint8)


def test_pictures_come_back(tmp_path):
    path = tmp_path / "new" / "film.mp4"
    colours = [(200, 30, 30), (30, 200, 30), (30, 30, 200)]
    with Video(path, fps=7.5) as video:
        for colour in colours:
            video.add(plain(colour))
        assert not path.exists()  # not before it is whole
    pictures, told = frames(path)
    assert told == ("h264", "yuv420p", 7.5)
    assert [picture.shape for picture in pictures] == [(240, 320, 3)] * 3
    for picture, colour in zip(pictures, colours, strict=True):
        np.testing.assert_allclose(picture.mean(axis=(0, 1)), colour, atol=6)
    assert [file.name for file in path.parent.iterdir()] == ["film.mp4"]


def test_small_pictures_are_enlarged_by_a_whole_number(tmp_path):
    board = np.zeros((70, 50, 3), np.uint8)
    board[:35, :25] = 255
    film(tmp_path / "film.mp4", [board])
    (picture,), _ = frames(tmp_path / "film.mp4")
    assert picture.shape == (280, 200, 3)  # four times
    expected = board.repeat(4, axis=0).repeat(4, axis=1)
    assert np.abs(picture.astype(int) - expected).mean() < 3


def test_odd_sides_are_padded_by_their_last_line(tmp_path):
    film(tmp_path / "film.mp4", [plain(180, 241, 301)])
    (picture,), _ = frames(tmp_path / "film.mp4")
    assert picture.shape == (242, 302, 3)
    np.testing.assert_allclose(picture, 180, atol=3)


def test_an_old_film_is_replaced_only_by_a_whole_one(tmp_path):
    path = tmp_path / "film.mp4"
    path.write_text("old")

    def broken():
        yield from [plain(0)] * 99  # the encoder keeps the first ones to itself
        raise KeyError

    with pytest.raises(KeyError):
        film(path, broken())
    assert path.read_text() == "old"
    assert [file.name for file in tmp_path.iterdir()] == ["film.mp4"]
    film(path, [plain(0)])
    assert len(frames(path)[0]) == 1


def test_a_file_that_cannot_be_finished_leaves_nothing(tmp_path):
    class Full:
        def encode(self, frame):
            raise OSError("disk full")

    video = Video(tmp_path / "film.mp4", 5)
    video.add(plain(0))
    video._stream = Full()
    with pytest.raises(OSError, match="disk full"), video:
        pass
    assert [*tmp_path.iterdir()] == []


def test_a_film_needs_frames(tmp_path):
    with pytest.raises(ShoalError, match="no frame"):
        film(tmp_path / "film.mp4", [])
    assert [*tmp_path.iterdir()] == []


@pytest.mark.parametrize(
    ("frame", "words"),
    [
        (plain(0, 242), r"must have the same size: the first was \(240, 320, 3\), this one is \(242, 320, 3\)"),
        (np.zeros((240, 320), np.uint8), r"must be uint8 \[H, W, 3\], not uint8 \[240, 320\]"),
        (np.zeros((240, 320, 4), np.uint8), r"not uint8 \[240, 320, 4\]"),
        (np.zeros((240, 320, 3)), "not float64"),
        (np.zeros((0, 320, 3), np.uint8), r"not uint8 \[0, 320, 3\]"),
    ],
)
def test_other_frames_are_refused(frame, words, tmp_path):
    with pytest.raises(ShoalError, match=words):
        film(tmp_path / "film.mp4", [plain(0), frame])
    assert [*tmp_path.iterdir()] == []


@pytest.mark.parametrize("fps", [0, -1, float("nan"), float("inf")])
def test_other_speeds_are_refused(fps, tmp_path):
    with pytest.raises(ShoalError, match="positive number of frames per second"):
        Video(tmp_path / "film.mp4", fps)


def test_a_missing_package_names_the_extra(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "av", None)
    with pytest.raises(ShoalError, match=r"pip install 'shoal\[video\]'"):
        Video(tmp_path / "film.mp4", 5)
