"""Data sets that are in memory: tensors, Fashion-MNIST, synthetic pictures."""

import json
import struct

import numpy as np
import pytest
import torch

from convnets import data
from convnets.memory import Tensors


@pytest.fixture(autouse=True)
def private_home(tmp_path_factory, monkeypatch):
    monkeypatch.setenv("DLX_HOME", str(tmp_path_factory.mktemp("home")))


def collect(loader):
    batches = [(images.clone(), labels.clone()) for images, labels in loader]
    return torch.cat([images for images, _ in batches]), torch.cat([labels for _, labels in batches])


def make(source, split="train", **options):
    return data.build_loader(
        split, data=source, **({"batch_size": 4, "image_size": 32, "train": split == "train", "seed": 5} | options)
    )


def tensors(count=40, size=28, channels=1):
    values = np.random.default_rng(0).integers(0, 256, (count, size, size, channels), np.uint8)
    labels = torch.arange(count) % 10
    return {
        name: Tensors(name, [str(n) for n in range(10)], torch.from_numpy(values), labels) for name in ("train", "val")
    }


def test_tensors_for_evaluation():
    splits = tensors()
    pictures = splits["val"].images.permute(0, 3, 1, 2)
    images, labels = collect(make(splits, "val", image_size=28, batch_size=16))
    assert torch.equal(images[:40], pictures) and labels[40:].tolist() == [-1] * 8
    padded, _ = collect(make(splits, "val", image_size=32, batch_size=40, channels=3))
    assert padded.shape == (40, 3, 32, 32) and padded.is_contiguous(memory_format=torch.channels_last)
    assert torch.equal(padded[:, 1:2, 2:30, 2:30], pictures) and padded[:, :, :2].max() == 0
    larger, _ = collect(make(splits, "val", image_size=56, batch_size=40))
    assert larger.shape == (40, 1, 56, 56) and larger.dtype == torch.uint8
    assert abs(larger.float().mean() - pictures.float().mean()) < 1
    with pytest.raises(ValueError, match="cannot make 2 channels of 1"):
        make(splits, "val", channels=2)
    with pytest.raises(ValueError, match="works on picture files"):
        make(splits, augmentation="autoaugment")
    with pytest.raises(ValueError, match="'dali-cpu' reads picture files"):
        make(splits, backend="dali-cpu")


@pytest.mark.parametrize("augmentation", ["standard", "erase"])
@pytest.mark.parametrize("channels", [1, 3])
def test_tensors_for_training(augmentation, channels):
    splits = tensors(channels=channels)
    loader = make(splits, image_size=28, batch_size=8, augmentation=augmentation)
    images, labels = collect(loader)
    assert images.shape == (40, channels, 28, 28) and sorted(labels.tolist()) == sorted(splits["train"].labels.tolist())
    order = np.concatenate(list(loader.plan.batches(0)))
    padded = torch.nn.functional.pad(splits["train"].images.permute(0, 3, 1, 2), [2] * 4)
    flipped = erased = 0
    for row, index in enumerate(order):
        fits = []
        for y in range(5):
            for x in range(5):
                window = padded[index][:, y : y + 28, x : x + 28]
                for mirrored, candidate in ((False, window), (True, window.flip(2))):
                    same = (images[row] == candidate) | (images[row] == 0)
                    if same.all() and (images[row] > 0).any():
                        fits.append((mirrored, bool((images[row] != candidate).any())))
        assert len(fits) == 1, "one shift and flip explains the picture"
        flipped += fits[0][0]
        erased += fits[0][1]
    assert 8 < flipped < 32
    assert erased == 0 if augmentation == "standard" else 8 < erased < 32
    assert torch.equal(collect(loader)[0], images)
    loader.set_epoch(0, 2)
    assert torch.equal(collect(loader)[0], images[16:])
    loader.set_epoch(1)
    assert not torch.equal(collect(loader)[0], images)


def test_fashion_mnist(monkeypatch, tmp_path):
    """Read from a prepared folder; what is in the real one is checked by its hashes."""
    where = tmp_path / "data" / "fashion-mnist-1"
    where.mkdir(parents=True)
    files = {}
    for prefix, count in (("train", 12), ("t10k", 5)):
        images = struct.pack(">HBBIII", 0, 8, 3, count, 28, 28) + bytes(count * 784)
        labels = struct.pack(">HBBI", 0, 8, 1, count) + bytes(range(count))
        for name, content in ((f"{prefix}-images-idx3-ubyte.gz", images), (f"{prefix}-labels-idx1-ubyte.gz", labels)):
            (where / name).write_bytes(content)
            files[name] = {"size": len(content), "sha256": "0" * 64, "mtime_ns": (where / name).stat().st_mtime_ns}
    (where / ".dlx-complete.json").write_text(json.dumps({"files": files}))
    splits = data.open_data("fashion-mnist", home=tmp_path)
    assert len(splits["train"]) == 12 and splits["val"].labels.tolist() == [0, 1, 2, 3, 4]
    assert splits["train"].images.shape == (12, 28, 28, 1) and splits["val"].classes[9] == "Ankle boot"


def test_synthetic():
    splits = data.open_data("synthetic", num_classes=10, num_samples=21)
    loader = make(splits, batch_size=4, image_size=24)
    assert len(loader) == 5 and len(loader.classes) == 10
    images, labels = collect(loader)
    assert images.shape == (20, 3, 24, 24) and images.dtype == torch.uint8 and 0 <= labels.min() and labels.max() < 10
    assert images.float().std() > 30
    _, labels = collect(make(splits, "val", batch_size=4))
    assert (labels >= 0).sum() == 21
    parts = [next(iter(make(splits, batch_size=4, world_rank=rank, world_size=2)))[0] for rank in (0, 1)]
    assert not torch.equal(*parts)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_gpu_tensors_equal_cpu_tensors():
    for split in ("train", "val"):
        options = {"image_size": 28, "batch_size": 8, "augmentation": "erase"}
        ours, theirs = make(tensors(), split, **options), make(tensors(), split, device="cuda", **options)
        for (a, b), (c, d) in zip(ours, theirs, strict=True):
            assert torch.equal(a, c.cpu()) and torch.equal(b, d.cpu())
