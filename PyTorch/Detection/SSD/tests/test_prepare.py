"""The verb prepare: sets are made, own data is validated, the sheets show boxes where the objects are."""

from __future__ import annotations

import json

import numpy as np
import pytest
from PIL import Image

from dlx import coco, scene_sets
from dlx.scenes import Item
from ssd import prepare, splits

PINK = (255, 0, 200)


class Squares:
    """Stands in for the packages: pink squares on green."""

    name, identity, classes = "fashion-scenes", "test", ["square", "other"]

    def background(self, split, width, height, generator):
        return np.full((height, width, 3), (30, 120, 60), np.uint8)

    def item(self, split, generator):
        return Item(0, "square", np.full((30, 30, 4), (*PINK, 255), np.uint8))


@pytest.fixture(autouse=True)
def own_home(tmp_path, monkeypatch):
    monkeypatch.setenv("DLX_HOME", str(tmp_path / "home"))
    monkeypatch.setattr(scene_sets.FashionSource, "open", classmethod(lambda cls, home=None: Squares()))


def test_a_set_is_made_and_shown(tmp_path, capsys):
    arguments = ["--train_scenes", "6", "--val_scenes", "3", "--processes", "1"]
    done = prepare.main([*arguments, "--preview", "4", "--preview_dir", str(tmp_path / "sheets")])
    assert done["splits"] == {"train": 6, "val": 3} and str(tmp_path / "home" / "scenes") in done["where"]
    printed = capsys.readouterr().out
    assert "train: 6 pictures" in printed and "square" in printed and f"ready: {done['where']}" in printed
    assert len(done["sheets"]) == 2
    for sheet in done["sheets"]:
        with Image.open(sheet) as image:
            assert image.width > 2 * prepare.CELL and image.height > prepare.CELL
            assert (np.asarray(image) == 255).all(-1).mean() < 0.5  # not an empty sheet
    opened = splits.open_data("fashion-scenes", train_scenes=6, val_scenes=3)  # the same set, not made again
    assert str(opened["train"].annotations.folder) == str(tmp_path / "home") + done["where"].split("home")[1] + "/train"
    other = prepare.main([*arguments, "--output_dir", str(tmp_path / "mine")])
    assert other["where"] == str(tmp_path / "mine") and (tmp_path / "mine" / "annotations").is_dir()


def test_boxes_are_drawn_around_objects(tmp_path):
    image = Image.new("RGB", (500, 400), (0, 0, 0))
    image.paste((90, 90, 90), (100, 150, 300, 350))
    made = np.asarray(prepare.drawn(image, np.array([[100.0, 150, 300, 350]]), np.array([1]), ["thing"]))
    assert made.shape == (400, 500, 3)
    changed = (made != np.asarray(image)).any(-1)
    rows, columns = np.flatnonzero(changed[:, 200]), np.flatnonzero(changed[250])
    assert columns.min() == pytest.approx(100, abs=3) and columns.max() == pytest.approx(299, abs=3)
    assert rows.max() == pytest.approx(349, abs=3)


def test_own_data_is_validated(tmp_path, capsys):
    (tmp_path / "annotations").mkdir()
    (tmp_path / "train").mkdir()
    Image.new("RGB", (40, 30)).save(tmp_path / "train" / "a.png")
    path = tmp_path / "annotations" / "instances_train.json"
    boxes = [[1, 1, 10, 10], [5, 5, 0, 3]]
    coco.write(
        path,
        images=[{"id": 1, "file_name": "a.png", "width": 40, "height": 30}],
        annotations=[{"id": n, "image_id": 1, "category_id": 7, "bbox": box} for n, box in enumerate(boxes, 1)],
        categories=[{"id": 7, "name": "dot"}],
    )
    with pytest.raises(ValueError, match=r"annotation 2: empty box \[5, 5, 0, 3\]"):
        prepare.main(["--data_dir", str(tmp_path)])
    done = prepare.main(["--data_dir", str(tmp_path), "--tolerant", "true", "--check", "full"])
    assert done["splits"] == {"train": 1}
    assert "1 x empty box" in capsys.readouterr().out
    own = ["--train_json", str(path), "--train_images", str(tmp_path / "train"), "--tolerant", "true"]
    sheets = prepare.main([*own, "--preview", "3", "--preview_dir", str(tmp_path)])["sheets"]
    assert len(sheets) == 2 and all(Image.open(sheet).width > 100 for sheet in sheets)
    assert json.loads(path.read_text())["categories"][0]["id"] == 7
