"""Which pictures a verb takes, in which order, and where its results go; names with advice."""

from __future__ import annotations

from pathlib import Path

import pytest
from PIL import Image

from dlx.names import lookup
from dlx.picture_files import PictureFiles, natural_key


def make(folder: Path, *names: str) -> None:
    for name in names:
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        Image.new("RGB", (8, 6)).save(folder / name)


def test_frames_come_in_the_order_of_their_numbers(tmp_path):
    make(tmp_path / "in", "f10.png", "f9.png", "f2.png", "b/f1.png")
    files = PictureFiles(tmp_path / "in", tmp_path / "out")
    names = [str(path.relative_to(tmp_path / "in")) for path in files.paths]
    assert names == ["b/f1.png", "f2.png", "f9.png", "f10.png"]
    assert files.targets[files.paths[0]] == tmp_path / "out" / "b" / "f1.png"
    ordered = [Path(name) for name in ("9", "10", "a", "a2", "a10")]
    assert sorted(reversed(ordered), key=natural_key) == ordered


def test_results_never_overwrite_pictures(tmp_path):
    make(tmp_path, "a.jpg", "a.png", "c.png")
    files = PictureFiles(tmp_path, tmp_path / "out")
    assert [path.name for path in files.targets.values()] == ["a.jpg.png", "a.png.png", "c.png"]
    with pytest.raises(ValueError, match=r"c\.png is a picture itself"):
        PictureFiles(tmp_path, tmp_path)


def test_batches_strict_and_tolerant(tmp_path):
    make(tmp_path / "in", *(f"{number}.png" for number in range(5)))
    (tmp_path / "in" / "2.png").write_bytes(b"no picture")
    with pytest.raises(ValueError, match=r"2\.png: not a picture"):
        list(PictureFiles(tmp_path / "in", tmp_path / "out").batches(2))
    files = PictureFiles(tmp_path / "in", tmp_path / "out", tolerant=True)
    batches = [([path.name for path in paths], len(images)) for paths, images in files.batches(3)]
    assert batches == [(["0.png", "1.png", "3.png"], 3), (["4.png"], 1)]
    assert [Path(path).name for path, _ in files.skipped] == ["2.png"]
    files.require_some()
    lost = PictureFiles(tmp_path / "in" / "2.png", tmp_path / "out", tolerant=True)
    assert list(lost.batches(3)) == []
    with pytest.raises(ValueError, match="not one of 1 pictures could be read; .*2.png"):
        lost.require_some()


def test_nothing_there(tmp_path):
    with pytest.raises(ValueError, match="this folder holds no picture"):
        PictureFiles(tmp_path, tmp_path / "out")
    with pytest.raises(ValueError, match="nowhere: there is no such picture or folder"):
        PictureFiles(tmp_path / "nowhere", tmp_path / "out")


def test_lookup_advises():
    known = {"ssd300": 1, "ssd512": 2, "other": 3}
    assert lookup(known, "ssd512", "model") == 2
    with pytest.raises(ValueError, match="unknown model 'ssd30'; did you mean ssd300"):
        lookup(known, "ssd30", "model")
    with pytest.raises(ValueError, match="unknown model 'zzz'; there are ssd300, ssd512, other"):
        lookup(known, "zzz", "model")
    with pytest.raises(ValueError, match="there are none"):
        lookup({}, "a", "thing")
