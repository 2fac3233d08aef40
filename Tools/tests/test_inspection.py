"""What headers tell: sizes, orientation, damage; the index of what was seen."""

from __future__ import annotations

import os

import numpy as np
import pytest
from PIL import Image

from dlx import inspection


@pytest.fixture
def folder(tmp_path, monkeypatch):
    monkeypatch.setenv("DLX_HOME", str(tmp_path / "home"))
    (tmp_path / "pictures").mkdir()
    return tmp_path / "pictures"


@pytest.mark.parametrize("orientation", range(0, 10))
def test_sizes_are_of_the_upright_picture(folder, orientation):
    exif = Image.Exif()
    exif[inspection.ORIENTATION_TAG] = orientation
    for name in ("a.jpg", "a.png", "a.tif"):
        Image.new("RGB", (30, 20)).save(folder / name, exif=exif)
        for check in inspection.CHECKS:
            look = inspection.inspect(folder / name, check)
            turned = 5 <= orientation <= 8
            assert look[:2] == ((20, 30) if turned else (30, 20)) and look.stored_size == (30, 20)
            assert look.orientation == (orientation if 2 <= orientation <= 8 else 1) and look.plain


def test_damage_and_index(folder, monkeypatch):
    noise = np.random.default_rng(0).integers(0, 256, (40, 60, 3), dtype=np.uint8)
    for name in ("good.jpg", "cut.jpg", "late.jpg"):
        Image.fromarray(noise).save(folder / name)
    (folder / "cut.jpg").write_bytes((folder / "cut.jpg").read_bytes()[:-800])
    (folder / "text.jpg").write_text("no picture")
    names = ["good.jpg", "cut.jpg", "text.jpg", "none.jpg", "late.jpg"]
    looks, reasons = inspection.inspect_all(folder, names)
    assert looks[0].tolist() == [60, 40, 1, 1] and [bool(reason) for reason in reasons] == [
        False,
        True,
        True,
        True,
        False,
    ]
    for name, reason in zip(names, reasons, strict=True):
        assert not reason or str(folder / name) in reason
    seen = []
    original = inspection.inspect
    monkeypatch.setattr(inspection, "inspect", lambda path, check: seen.append(path.name) or original(path, check))
    os.utime(folder / "late.jpg", (1, 1))
    again, _ = inspection.inspect_all(folder, names)
    assert sorted(seen) == ["cut.jpg", "late.jpg", "none.jpg", "text.jpg"]  # good.jpg is known
    np.testing.assert_array_equal(again[[0, 4]], looks[[0, 4]])
    with pytest.raises(ValueError, match="check 'all' is none of headers, full"):
        inspection.inspect_all(folder, names, "all")
