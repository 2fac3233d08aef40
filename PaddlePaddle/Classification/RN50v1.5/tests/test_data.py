"""The data: faults named, order and augmentation as functions of (seed, epoch, sample), loaders that agree."""

from __future__ import annotations

import importlib.util

import numpy as np
import paddle
import pytest
from PIL import Image

from rn50_paddle import data
from rn50_paddle.data import Arrays, Batches, DataError, Order
from rn50_paddle.loader import Loader


def picture(seed, width, height):
    """Smooth, as photographs are: what two resizers make of noise says nothing."""
    coarse = np.random.default_rng(seed).integers(0, 256, (5, 6, 3), np.uint8)
    return Image.fromarray(coarse).resize((width, height), Image.Resampling.BICUBIC)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    root = tmp_path_factory.mktemp("pictures")
    for split, count in (("train", 6), ("val", 3)):
        for label, name in enumerate(("cat", "dog")):
            (root / split / name).mkdir(parents=True)
            for number in range(count):
                size = (120 + 10 * number, 90 + 25 * label)
                picture([label, number, split == "val"], *size).save(root / split / name / f"{number}.jpg", quality=95)
    return root


def batches_of(split, train, batch_size=4, epoch=0, size=64, resize=72, **place):
    return Batches(split, Order(len(split), batch_size, train, 1, **place), size, resize, train, epoch)


def test_a_folder_is_read(folder):
    splits = data.open_data("synthetic", str(folder))
    assert (len(splits["train"]), len(splits["val"])) == (12, 6)
    assert splits["train"].classes == ["cat", "dog"] and splits["val"].labels.tolist() == [0] * 3 + [1] * 3


def test_all_faults_of_a_folder_are_named_together(tmp_path):
    for name in ("train/cat", "train/empty", "val/cat", "val/bird"):
        (tmp_path / name).mkdir(parents=True)
    for name in ("train/cat", "val/cat", "val/bird"):
        picture(0, 20, 20).save(tmp_path / name / "good.png")
    (tmp_path / "train/cat/broken.jpg").write_bytes(b"no picture")
    with pytest.raises(DataError) as caught:
        data.read_folder(tmp_path)
    text = str(caught.value)
    for part in (
        "train/empty: class without pictures",
        "broken.jpg: not a picture",
        "'bird' is in one",
        "'empty' is in",
    ):
        assert part in text
    with pytest.raises(DataError, match="no such data folder"):
        data.read_folder(tmp_path / "nowhere")
    with pytest.raises(ValueError, match="'imagenet' is neither"):
        data.open_data("imagenet")


@pytest.mark.parametrize("world", [1, 2, 3])
def test_training_batches_are_the_same_samples_on_any_number_of_processes(world):
    tables = [Order(50, 12 // world, True, 7, rank, world).table(3) for rank in range(world)]
    together = np.concatenate(tables, axis=1)
    single = Order(50, 12, True, 7).table(3)
    np.testing.assert_array_equal(np.sort(together, 1), np.sort(single, 1))
    assert len(np.unique(single)) == single.size == 48
    assert not np.array_equal(single, Order(50, 12, True, 7).table(4))


@pytest.mark.parametrize("world", [1, 2, 3])
def test_evaluation_takes_every_sample_once(world):
    tables = [Order(37, 5, False, 0, rank, world).table(0) for rank in range(world)]
    assert len({table.shape for table in tables}) == 1
    everything = np.concatenate([table.ravel() for table in tables])
    assert sorted(everything[everything >= 0]) == list(range(37))


def test_too_few_samples_are_refused():
    with pytest.raises(DataError, match="7 samples do not fill one batch of 8"):
        Order(7, 4, True, world_size=2)


def test_shift_and_mirror_by_brute_force():
    images = np.random.default_rng(0).integers(1, 256, (9, 28, 28, 1), np.uint8)
    split = Arrays("train", ["a", "b"], images, np.zeros(9, np.int64))
    found = split.batch(2, np.arange(9), 28, 28, 5, True)[:, 0]
    seen = set()
    for original, augmented in zip(images[..., 0], found, strict=True):
        padded = np.pad(original, 2)
        windows = {(y, x, m): padded[y : y + 28, x : x + 28][:, :: -1 if m else 1]
                   for y in range(5) for x in range(5) for m in (0, 1)}  # fmt: skip
        matches = [key for key, window in windows.items() if np.array_equal(window, augmented)]
        assert len(matches) == 1
        seen.add(matches[0])
    assert len(seen) > 4
    np.testing.assert_array_equal(split.batch(2, np.arange(9), 28, 28, 5, False)[:, 0], images[..., 0])


def test_crop_windows_lie_inside_and_cover_the_area_range(folder):
    split = data.read_folder(folder)["train"]
    shares, mirrored = [], 0
    for epoch in range(200):
        left, top, width, height, mirror = split.window(epoch, 6, 1)  # nearly square, so that most of it can be taken
        full_width, full_height = split.sizes[6]
        assert 0 <= left <= full_width - width and 0 <= top <= full_height - height and min(width, height) > 0
        shares.append(width * height / (full_width * full_height))
        mirrored += mirror
    assert min(shares) < 0.15 and max(shares) > 0.85 and 70 < mirrored < 130


def test_worker_processes_change_nothing_and_an_epoch_can_begin_anywhere(folder):
    split = data.read_folder(folder)["train"]
    taken = {}
    for workers in (0, 2):
        loader = Loader(split, Order(12, 4, True, 1), size=64, resize=72, augment=True, workers=workers)
        loader.set_epoch(1)
        taken[workers] = [(images.numpy(), labels.numpy()) for images, labels in loader]
    assert len(taken[0]) == 3
    for first, second in zip(taken[0], taken[2], strict=True):
        np.testing.assert_array_equal(first[0], second[0])
        np.testing.assert_array_equal(first[1], second[1])
    loader.set_epoch(1, start=2)
    (last,) = list(loader)
    np.testing.assert_array_equal(last[0].numpy(), taken[0][2][0])
    loader.set_epoch(2)
    assert not np.array_equal(next(iter(loader))[0].numpy(), taken[0][0][0])


@pytest.mark.parametrize("train", [True, False])
def test_dali_gives_the_same_pictures(folder, train):
    if importlib.util.find_spec("nvidia") is None or importlib.util.find_spec("nvidia.dali") is None:
        pytest.skip("NVIDIA DALI is not installed")
    from rn50_paddle import dali

    split = data.read_folder(folder)["train" if train else "val"]
    ours = list(batches_of(split, train, epoch=1))
    theirs = list(dali.batches(batches_of(split, train, epoch=1), gpu=False, threads=1))
    assert len(ours) == len(theirs) == (3 if train else 2)
    for (first, labels), (second, same) in zip(ours, theirs, strict=True):
        np.testing.assert_array_equal(labels, same)
        difference = np.abs(first.astype(int) - second.astype(int))
        assert difference.mean() < 1.5, f"mean {difference.mean():.2f}, max {difference.max()}"
        other = np.abs(first.astype(int) - second[:, :, :, ::-1].astype(int))
        assert other.mean() > 4 * difference.mean()  # the pictures are not alike by themselves


def test_dali_refuses_what_it_would_decode_otherwise(folder):
    from rn50_paddle import dali

    split = data.read_folder(folder)["val"]
    split.plain[2] = False
    with pytest.raises(DataError, match="2.jpg"):
        next(dali.batches(batches_of(split, False), gpu=False, threads=1))
    if not paddle.is_compiled_with_cuda():
        with pytest.raises(ValueError, match="dali-gpu needs a GPU, this runs on cpu"):
            Loader(split, Order(6, 3, True), size=8, resize=8, augment=False, backend="dali-gpu")
    with pytest.raises(ValueError, match="reads picture files"):
        Loader(data.Synthetic("train", ["a", "b"], 9), Order(9, 3, True), size=8, resize=8, augment=False,
               backend="dali-cpu")  # fmt: skip


def test_synthetic_pictures_depend_on_class_and_sample():
    split = data.Synthetic("train", ["a", "b"], 8)
    images = split.batch(0, np.arange(8), 16, 16, 1, False).astype(float)
    same = np.abs(np.corrcoef(images.reshape(8, -1)))[0, [2, 4]]
    assert (same > 0.99).all() and not np.array_equal(images[0], images[2])
    assert abs(np.corrcoef(images.reshape(8, -1))[0, 1]) < 0.9
