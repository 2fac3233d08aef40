"""Scenes by cut and paste: masks, boxes and visibility are true, sets are reproducible, resumable and disjoint."""

from __future__ import annotations

import json
import os
import pickle
import signal
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest
from PIL import Image, ImageDraw

from dlx import coco, rle, scene_sets, scenes
from dlx.scenes import Item, SceneOptions

SMALL = {"train": 7, "val": 4, "min_side": 90, "max_side": 120}


@pytest.fixture(autouse=True)
def own_home(tmp_path, monkeypatch):
    monkeypatch.setenv("DLX_HOME", str(tmp_path / "home"))


class Squares:
    """Squares of one flat colour a class on grey: what is visible of an object can be counted in the picture."""

    name, identity, classes = "squares", "1", ["red", "green", "blue"]
    colours = np.array([[250, 0, 0], [0, 250, 0], [0, 0, 250]])

    def background(self, split, width, height, generator):
        return np.full((height, width, 3), 128, np.uint8)

    def item(self, split, generator):
        label = int(generator.integers(3))
        pixels = np.full((40, 40, 4), 255, np.uint8)
        pixels[..., :3] = self.colours[label]
        return Item(label, split, pixels)


def test_what_is_written_about_objects_is_what_the_picture_shows():
    options = SceneOptions(min_side=100, max_side=200, min_objects=2, max_scale=0.7)
    objects = hidden = outside = 0
    for number in range(60):
        scene, placed = scenes.compose(Squares(), "train", options, scenes.scene_generator(0, "train", number))
        height, width = scene.shape[:2]
        assert 100 <= height <= 200 and 100 <= width <= 200
        owner = np.sum([o.mask for o in placed], axis=0) if placed else np.zeros((height, width))
        assert owner.max(initial=0) <= 1  # no pixel is two objects'
        for one in placed:
            assert one.mask.sum() >= scenes.MIN_PIXELS and 0.25 <= one.visibility <= 1
            colour = scene[one.mask].astype(int)
            strongest = colour.argmax(1)
            assert (strongest == one.label).mean() > 0.97  # but for edges that are half transparent
            objects += 1
            hidden += one.visibility < 0.999
            x, y, w, h = scenes.bounding_box(one.mask)
            outside += x == 0 or y == 0 or x + w == width or y + h == height
        coloured = np.ptp(scene.astype(int), axis=-1) > 180
        assert not (coloured & (owner == 0)).any()  # nothing is shown that is not annotated
    assert objects > 150 and hidden > 20 and outside > 10


def test_sizes_turns_and_mirrors():
    generator = np.random.default_rng(0)
    wedge = np.zeros((60, 100, 4), np.uint8)
    wedge[..., :3] = 200
    for row in range(60):
        wedge[row, : 100 - row, 3] = 255  # the left half is heavier
    made = [scenes.transform(wedge, 200, SceneOptions(rotation=0), generator) for _ in range(300)]
    longer = np.array([max(pixels.shape[:2]) for pixels in made]) / 200
    assert 0.11 < longer.min() < 0.14 and 0.53 < longer.max() < 0.61
    assert np.median(longer) == pytest.approx((0.12 * 0.6) ** 0.5, rel=0.12)  # log-uniform
    heavier = [p[:, : p.shape[1] // 2, 3].sum() > p[:, p.shape[1] // 2 :, 3].sum() for p in made]
    assert 0.4 < np.mean(heavier) < 0.6
    turned = [scenes.transform(wedge, 200, SceneOptions(rotation=40, flip=False), generator) for _ in range(50)]
    shapes = {round(p.shape[0] / p.shape[1], 1) for p in turned}
    assert len(shapes) > 3
    means = np.array([p[p[..., 3] == 255][:, :3].mean(0) for p in made])
    assert np.ptp(means) > 40 and np.ptp(means, axis=1).max() > 8  # brightness and tint vary


def test_options_are_checked():
    for wrong in ({"train": 0}, {"min_side": 400}, {"min_scale": 0}, {"min_visible": 0}, {"quality": 100}):
        with pytest.raises(ValueError, match="got"):
            SceneOptions(**wrong)
    with pytest.raises(ValueError, match="unknown set of scenes 'cats'; known are fashion-scenes, stamp-scenes"):
        scene_sets.options_of("cats")


# Sets from stamps


def make_parts(root: Path, count: int = 6) -> tuple[Path, Path]:
    """Folders like those of the packages: `count` shapes a class, 6 wallpapers, some in two sizes."""
    generator = np.random.default_rng(0)
    for number, (places, _) in enumerate(scene_sets.STAMP_CLASSES.values()):
        folder = root / "stamps" / places[0]
        folder.mkdir(parents=True, exist_ok=True)
        for index in range(count):
            image = Image.new("RGBA", (130, 110), (0, 0, 0, 0))
            colour = (*generator.integers(60, 255, 3).tolist(), 255)
            ImageDraw.Draw(image).regular_polygon((65, 55, 45), 3 + number % 7, rotation=7 * index, fill=colour)
            image.save(folder / f"{'abcdefgh'[index]}thing.png")
    for index in range(6):
        folder = root / "wallpapers" / f"Wall{index}" / "contents" / "images"
        folder.mkdir(parents=True)
        noise = Image.fromarray(generator.integers(0, 256, (9, 16, 3), dtype=np.uint8))
        for width in (1600, 1920)[: 1 + index % 2]:
            noise.resize((width, width * 9 // 16)).save(folder / f"{width}x{width * 9 // 16}.jpg")
        noise.resize((720, 1440)).save(folder / "720x1440.jpg")
    return root / "stamps", root / "wallpapers"


@pytest.fixture(scope="module")
def source(tmp_path_factory) -> scene_sets.StampSource:
    root = tmp_path_factory.mktemp("parts")
    return scene_sets.StampSource.reduce(*make_parts(root), root / "reduced", "test")


def test_splits_share_neither_stamps_nor_wallpapers(source):
    for train, val in zip(source.stamps["train"], source.stamps["val"], strict=True):
        assert len(train) == 5 and len(val) == 1 and not set(train) & set(val)
    walls = source.wallpapers
    assert len(walls["train"]) == 5 and len(walls["val"]) == 1 and not set(walls["train"]) & set(walls["val"])
    assert len(source.classes) == 13


def test_parts_are_reduced_once(source, tmp_path):
    stamps, wallpapers = make_parts(tmp_path)
    first = scene_sets.StampSource.reduce(stamps, wallpapers, tmp_path / "reduced", "one")
    assert first.stamps == source.stamps
    before = (tmp_path / "reduced" / first.wallpapers["val"][0]).stat().st_mtime_ns
    scene_sets.StampSource.reduce(stamps, wallpapers, tmp_path / "reduced", "one")
    assert (tmp_path / "reduced" / first.wallpapers["val"][0]).stat().st_mtime_ns == before
    time.sleep(0.01)
    other = scene_sets.StampSource.reduce(stamps, wallpapers, tmp_path / "reduced", "two")
    assert other.identity != first.identity
    assert (tmp_path / "reduced" / first.wallpapers["val"][0]).stat().st_mtime_ns != before


def test_stamps_without_mask_or_too_small_are_left_out(tmp_path):
    stamps, wallpapers = make_parts(tmp_path, 7)
    folder = stamps / "plants" / "flowers"
    Image.new("RGB", (100, 100)).save(folder / "athing.png")
    tiny = Image.new("RGBA", (100, 100), (0, 0, 0, 0))
    tiny.paste((9, 9, 9, 255), (0, 0, 50, 50))
    tiny.save(folder / "bthing.png")
    made = scene_sets.StampSource.reduce(stamps, wallpapers, tmp_path / "reduced", "x")
    label = made.classes.index("flower")
    names = " ".join(made.stamps["train"][label] + made.stamps["val"][label])
    assert "athing" not in names and "bthing" not in names and "cthing" in names
    for path in folder.iterdir():
        path.unlink()
    with pytest.raises(ValueError, match="no stamps for class 'flower'"):
        scene_sets.StampSource.reduce(stamps, wallpapers, tmp_path / "reduced", "y")


def test_one_thing_is_on_one_side():
    group = scene_sets.stamp_group
    assert group("m/bovines/cow.png") == group("m/bovines/cow_white.png") != group("m/bovines/gnu-stand.png")
    assert group("m/cats/lion.png") == group("m/cats/lion-2.png") and group("c/t_sock.png") != group("c/t_shirt.png")
    assert group("f/flower1.png") != group("f/flower10.png") and group("e/001.png") != group("e/010.png")
    assert group("s/dumper.png") == group("s/dumper_mirror.png") and group("s/0_sun.png") != group("s/1_mercury.png")
    groups = {f"{word}{number}": word for word in "abcdefghij" for number in range(3)}
    split = scene_sets.split_groups(groups, [1, 2])
    assert len(split["val"]) == 6 and sorted(split["train"] + split["val"]) == sorted(groups)
    assert not {name[0] for name in split["train"]} & {name[0] for name in split["val"]}
    assert scene_sets.split_groups(dict(reversed(groups.items())), [1, 2]) == split
    assert scene_sets.split_groups(groups, [1, 3]) != split


def everything(folder: Path) -> dict[str, bytes]:
    return {p.relative_to(folder).as_posix(): p.read_bytes() for p in sorted(folder.rglob("*")) if p.is_file()}


def test_sets_do_not_depend_on_processes_and_read_as_coco(source, tmp_path, monkeypatch):
    options = SceneOptions(**{**SMALL, "train": 210})  # three parts
    one = scenes.generate(tmp_path / "one", source, options, processes=1)
    two = scenes.generate(tmp_path / "two", source, options, processes=2)
    assert everything(one) == everything(two)
    assert not list(tmp_path.glob("*.partial")) and scenes.identity(one) == scenes.identity(two)
    other = scenes.generate(tmp_path / "other", source, SceneOptions(**SMALL, seed=1), processes=1)
    assert scenes.identity(other) != scenes.identity(one)
    names = {}
    for split, (path, pictures) in coco.find_splits(one).items():
        read = coco.read(path, pictures)
        assert len(read) == getattr(options, split) and read.counts == {} and read.classes == source.classes
        content = json.loads(path.read_text())
        names[split] = {annotation["item"] for annotation in content["annotations"]}
        sizes = {image["id"]: (image["height"], image["width"]) for image in content["images"]}
        for annotation in content["annotations"]:
            mask = rle.decode(annotation["segmentation"])
            assert mask.shape == sizes[annotation["image_id"]] and mask.sum() == annotation["area"]
            assert scenes.bounding_box(mask) == annotation["bbox"] and annotation["visibility"] >= 0.25
    assert not names["train"] & names["val"] and len(names["train"]) > 30


def test_an_interrupted_set_goes_on(source, tmp_path, monkeypatch):
    monkeypatch.setattr(scenes, "PART", 3)
    options = SceneOptions(**SMALL)
    whole = scenes.generate(tmp_path / "whole", source, options, processes=1)
    original, made = scenes._make_part, []

    def stop_at_the_third(folder, source, options, job):
        if len(made) == 2:
            raise KeyboardInterrupt
        made.append(job)
        return original(folder, source, options, job)

    monkeypatch.setattr(scenes, "_make_part", stop_at_the_third)
    with pytest.raises(KeyboardInterrupt):
        scenes.generate(tmp_path / "set", source, options, processes=1)
    assert not (tmp_path / "set").exists() and made == [("train", 0, 3), ("train", 3, 3)]
    done = []
    monkeypatch.setattr(scenes, "_make_part", lambda *args: done.append(args[-1]) or original(*args))
    again = scenes.generate(tmp_path / "set", source, options, processes=1)
    assert done == [("train", 6, 1), ("val", 0, 3), ("val", 3, 1)]
    assert everything(again) == everything(whole)
    assert scenes.generate(tmp_path / "set", source, options) == again and len(done) == 3
    with pytest.raises(ValueError, match="holds something else than the stamp-scenes asked for"):
        scenes.generate(tmp_path / "set", source, SceneOptions(**SMALL, seed=5))
    with pytest.raises(ValueError, match="not a generated set"):
        scenes.identity(tmp_path)


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_ends_all_processes_and_keeps_what_is_done(source, tmp_path, number):
    """As a terminal does, the signal goes to the whole group."""
    (tmp_path / "source.pickle").write_bytes(pickle.dumps(source))
    code = (
        "import pickle, sys, dlx.scenes as scenes\n"
        "source = pickle.loads(open(sys.argv[1] + '/source.pickle', 'rb').read())\n"
        "options = scenes.SceneOptions(train=100000, val=1, min_side=60, max_side=60)\n"
        "scenes.generate(sys.argv[1] + '/set', source, options, processes=2)\n"
    )
    process = subprocess.Popen(
        [sys.executable, "-c", code, str(tmp_path)], start_new_session=True, stderr=subprocess.DEVNULL
    )
    parts, deadline = tmp_path / "set.partial" / "parts", time.monotonic() + 60
    while time.monotonic() < deadline and len(list(parts.glob("*.json"))) < 2:
        time.sleep(0.05)
    os.killpg(process.pid, number)
    assert process.wait(timeout=30) != 0
    assert len(list(parts.glob("*.json"))) >= 2 and not (tmp_path / "set").exists()
    deadline = time.monotonic() + 15
    while time.monotonic() < deadline:
        try:
            os.killpg(process.pid, 0)
        except ProcessLookupError:
            return
        time.sleep(0.1)
    pytest.fail("a worker process is left")


# Fashion items


def test_fill_holes():
    generator = np.random.default_rng(0)
    for _ in range(20):
        mask = generator.random((12, 9)) < 0.55
        filled = scene_sets.fill_holes(mask)
        framed = np.pad(~mask, 1, constant_values=True)
        seen, todo = np.zeros_like(framed), [(0, 0)]
        while todo:
            row, column = todo.pop()
            if 0 <= row < 14 and 0 <= column < 11 and framed[row, column] and not seen[row, column]:
                seen[row, column] = True
                todo += [(row + 1, column), (row - 1, column), (row, column + 1), (row, column - 1)]
        np.testing.assert_array_equal(filled, ~seen[1:-1, 1:-1])


def test_fashion_items_and_textures(monkeypatch, tmp_path):
    grey = np.zeros((2, 28, 28), np.uint8)
    grey[:, 6:20, 4:25] = 200
    grey[:, 10:12, 10:14] = 0  # a dark patch inside is still the item
    grey[1, 6:20, 24] = 30  # a dark rim
    monkeypatch.setattr(scene_sets, "_fashion", lambda folder, split: (grey, np.array([3, 3])))
    source = scene_sets.FashionSource(tmp_path, "x")
    seen = [source.item("train", np.random.default_rng(seed)) for seed in range(30)]
    assert {item.name for item in seen} == {"train/0", "train/1"} and {item.label for item in seen} == {3}
    for item in seen:
        assert item.pixels.shape == (14, 21, 4) and (item.pixels[1:-1, 1:-2, 3] == 255).all()
        assert (item.pixels[1:-1, -1, 3] < 255).all() == (item.name == "train/1")
    bright = np.array([item.pixels[2, 2, :3] for item in seen if item.name == "train/0"])
    assert np.ptp(bright, axis=0).min() > 60  # tinted
    first = source.background("train", 70, 50, np.random.default_rng(4))
    assert first.shape == (50, 70, 3) and first.dtype == np.uint8 and first.std() > 4
    np.testing.assert_array_equal(first, source.background("train", 70, 50, np.random.default_rng(4)))
    assert (first != source.background("train", 70, 50, np.random.default_rng(5))).mean() > 0.5


@pytest.mark.slow
def test_the_real_stamps(monkeypatch, tmp_path):
    """Fetches 250 MB where the cache has not got them."""
    monkeypatch.delenv("DLX_HOME")
    source = scene_sets.StampSource.open()
    for name, train, val in zip(source.classes, source.stamps["train"], source.stamps["val"], strict=True):
        assert len(train) >= 10 and len(val) >= 2 and not set(train) & set(val), name
    assert len(source.wallpapers["train"]) >= 18 and len(source.wallpapers["val"]) >= 4
    folder = scenes.generate(tmp_path / "set", source, SceneOptions(train=20, val=20), processes=1)
    for path, pictures in coco.find_splits(folder).values():
        assert len(coco.read(path, pictures)) == 20
