"""Loaders: the pixels and labels of the file, every picture once, epochs that can be made again."""

import io
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from rn50_mxnet import data, recordio

SIZE = {"grey": 28, "colour": 40}


def reference(dataset, split):
    """Pictures N C H W and labels of the file, by Pillow."""
    rows = [recordio.decode_picture(payload) for _, _, payload in recordio.read_records(dataset.path(split))]
    pixels = [np.asarray(Image.open(io.BytesIO(content)), np.float32) for _, _, content in rows]
    stacked = np.stack([p[None] if p.ndim == 2 else p.transpose(2, 0, 1) for p in pixels])
    return stacked, np.array([labels[0] for labels, _, _ in rows])


def collect(loader, epoch=0, start=0):
    batches = [(images.asnumpy(), labels.asnumpy()) for images, labels in loader.epoch(epoch, start)]
    assert len(batches) == len(loader) - start
    return tuple(np.concatenate(parts) for parts in zip(*batches, strict=True))


def build(dataset, split, train=False, **options):
    defaults = {"batch_size": 8, "image_size": 28, "augmentation": "none", "seed": 1, "train": train}
    return data.build_loader(dataset, split, **defaults | options)


def need_dali(backend):
    if backend.startswith("dali"):
        pytest.importorskip("nvidia.dali", reason="needs the package nvidia-dali-cuda130")


@pytest.mark.parametrize("backend", ["mxnet", "dali-cpu"])
@pytest.mark.parametrize("kind", ["grey", "colour"])
def test_evaluation_gives_every_pixel_and_label_once(request, kind, backend):
    need_dali(backend)
    dataset = request.getfixturevalue(kind)
    images, labels = collect(build(dataset, "val", image_size=SIZE[kind], backend=backend))
    pixels, truth = reference(dataset, "val")
    np.testing.assert_array_equal(labels, truth)
    np.testing.assert_array_equal(images, pixels)


@pytest.mark.parametrize("backend", ["mxnet", "dali-cpu"])
def test_resize_and_crop_are_those_of_every_backend(colour, backend):
    """Enlarged 40 -> 64 and cut to 56: bilinear filters that differ in rounding only, against Pillow's."""
    need_dali(backend)
    images, labels = collect(build(colour, "val", image_size=56, resize=64, backend=backend))
    pixels, truth = reference(colour, "val")
    expected = []
    for picture in pixels.transpose(0, 2, 3, 1).astype(np.uint8):
        large = Image.fromarray(picture).resize((64, 64), Image.Resampling.BILINEAR)
        expected.append(np.asarray(large.crop((4, 4, 60, 60)), np.float32).transpose(2, 0, 1))
    np.testing.assert_array_equal(labels, truth)
    assert np.abs(images - np.stack(expected)).max() <= 2


@pytest.mark.parametrize("backend", ["mxnet", "dali-cpu"])
def test_workers_share_the_evaluation(grey, backend):
    need_dali(backend)
    parts = [collect(build(grey, "val", backend=backend, rank=rank, num_workers=3)) for rank in range(3)]
    images = np.concatenate([part[0] for part in parts])
    pixels, truth = reference(grey, "val")
    np.testing.assert_array_equal(np.concatenate([part[1] for part in parts]), truth)
    np.testing.assert_array_equal(images, pixels)


@pytest.mark.parametrize("backend", ["mxnet", "dali-cpu"])
@pytest.mark.parametrize("augmentation", ["none", "standard"])
def test_training_epochs_can_be_made_again_from_any_batch(grey, backend, augmentation):
    need_dali(backend)
    options = {"train": True, "augmentation": augmentation, "backend": backend}
    loader = build(grey, "train", **options)
    first, second = collect(loader, 0), collect(loader, 1)
    assert not np.array_equal(first[1], second[1])
    again = collect(build(grey, "train", **options), 1, start=2)
    for ours, theirs in zip(again, second, strict=True):
        np.testing.assert_array_equal(ours, theirs[16:])
    assert not np.array_equal(collect(build(grey, "train", **options, seed=2), 0)[1], first[1])


def test_training_reads_each_picture_at_most_once_and_shifts_it(grey):
    images, labels = collect(build(grey, "train", train=True))
    pixels, truth = reference(grey, "train")
    places = [int(np.flatnonzero((pixels == image).all((1, 2, 3)))[0]) for image in images]
    assert len(set(places)) == 40
    np.testing.assert_array_equal(labels, truth[places])
    augmented, _ = collect(build(grey, "train", train=True, augmentation="standard"))
    kept = [any(np.array_equal(image, other) for other in pixels) for image in augmented]
    assert sum(kept) < 20
    shifted = [
        np.array_equal(image[:, 4:-4, 4:-4], np.roll(source, (down, right), (1, 2))[:, 4:-4, 4:-4])
        for image in augmented[:1]
        for picture in pixels
        for source in (picture, picture[:, :, ::-1])
        for down in range(-2, 3)
        for right in range(-2, 3)
    ]
    assert any(shifted)


def test_workers_train_on_different_pictures_in_equally_many_batches(grey):
    loaders = [build(grey, "train", train=True, rank=rank, num_workers=3, batch_size=4) for rank in range(3)]
    assert [len(loader) for loader in loaders] == [3, 3, 3]
    seen = [{image.tobytes() for image in collect(loader)[0]} for loader in loaders]
    assert not seen[0] & seen[1] and not seen[1] & seen[2]


def test_synthetic_pictures_have_the_same_form(grey):
    made = data.synthetic(5, 30, 1)
    images, labels = collect(data.build_loader(made, "train", batch_size=8, image_size=28, train=True))
    real, _ = collect(build(grey, "train", train=True, batch_size=8))
    assert images.shape[1:] == real.shape[1:] and images.dtype == real.dtype and len(images) == 24
    assert 0 <= images.min() and images.max() <= 255 and set(labels) == {0, 1, 2, 3, 4}


def test_what_cannot_be_is_refused(grey):
    with pytest.raises(ValueError, match="40 pictures make no batch of 64 for each of 1 workers"):
        build(grey, "train", train=True, batch_size=64)
    with pytest.raises(ValueError, match="no split 'test', only train, val"):
        build(grey, "test")
    with pytest.raises(ValueError, match="backend 'hdf5' is none of"):
        build(grey, "val", backend="hdf5")
    with pytest.raises(ValueError, match="resize 20 is smaller than image_size 28"):
        build(grey, "val", resize=20)


@pytest.mark.skipif(Path("/proc/driver/nvidia").exists(), reason="there is a GPU")
def test_decoding_on_a_gpu_is_refused_where_there_is_none(colour):
    need_dali("dali-gpu")
    with pytest.raises(ValueError, match="dali-gpu: DALI can use no GPU here; use dali-cpu"):
        next(build(colour, "val", backend="dali-gpu", image_size=32).epoch(0))
