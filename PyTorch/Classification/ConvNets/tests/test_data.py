"""Loaders: every sample once, the same picture from every backend, resume, validation up front (cases O07, O13)."""

import importlib.util
import os
import shutil
import subprocess
import sys

import numpy as np
import pytest
import torch
from PIL import Image

from convnets import data
from convnets.folder import DataError
from dlx import inspection, vision
from dlx.loading import Plan

HAS_DALI = importlib.util.find_spec("nvidia.dali") is not None if importlib.util.find_spec("nvidia") else False
needs_dali = pytest.mark.skipif(not HAS_DALI, reason="NVIDIA DALI is not installed")


@pytest.fixture(autouse=True)
def private_home(tmp_path_factory, monkeypatch):
    monkeypatch.setenv("DLX_HOME", str(tmp_path_factory.mktemp("home")))


def smooth(width=60, height=48, seed=0) -> Image.Image:
    """A soft picture: what two resize filters make of it differs only by rounding."""
    small = np.random.default_rng(seed).integers(0, 256, (5, 6, 3), np.uint8)
    return Image.fromarray(small).resize((width, height), Image.Resampling.BICUBIC)


def odd_pictures(where):
    """One picture of each kind: {file name: what all of them should decode to}."""
    where.mkdir(parents=True)
    picture = smooth()
    grey = picture.convert("L").convert("RGB")
    alpha = picture.convert("RGBA")
    alpha.putalpha(Image.fromarray(np.tile(np.arange(60, dtype=np.uint8) * 4, (48, 1))))
    alpha.save(where / "rgba.png")
    picture.save(where / "rgb.png")
    picture.save(where / "rgb.webp", lossless=True)
    picture.save(where / "rgb.bmp")
    grey.convert("L").save(where / "grey.png")
    grey.convert("LA").save(where / "grey_alpha.png")
    Image.fromarray(np.asarray(grey.convert("L")).astype(np.uint16) * 257).save(where / "grey16.png")
    picture.quantize(32).save(where / "palette.png")
    picture.quantize(32).save(where / "palette_transparent.png", transparency=1)
    picture.convert("CMYK").save(where / "cmyk.jpg", quality=97)
    exif = Image.Exif()
    exif[0x0112] = 6
    picture.transpose(Image.Transpose.ROTATE_90).save(where / "turned.jpg", quality=97, subsampling=0, exif=exif)
    picture.save(where / "plain.jpg", quality=97, subsampling=0)
    palette = picture.quantize(32).convert("RGB")
    same = {"rgba.png": picture, "rgb.png": picture, "rgb.webp": picture, "rgb.bmp": picture, "grey.png": grey,
            "grey_alpha.png": grey, "grey16.png": grey, "palette.png": palette, "palette_transparent.png": palette,
            "cmyk.jpg": picture, "turned.jpg": picture, "plain.jpg": picture}  # fmt: skip
    return same


@pytest.fixture(scope="module")
def odd(tmp_path_factory):
    """A data folder of odd pictures in two classes, and what they should be."""
    root = tmp_path_factory.mktemp("odd")
    same = odd_pictures(root / "train" / "a")
    shutil.copytree(root / "train" / "a", root / "val" / "a")
    for split in ("train", "val"):
        (root / split / "b").mkdir()
        smooth(50, 70, 1).save(root / split / "b" / "x.png")
        smooth(200, 64, 2).save(root / split / "b" / "y.jpg", quality=97, subsampling=0)
    return root, same


def collect(loader):
    batches = [(images.clone(), labels.clone()) for images, labels in loader]
    return torch.cat([images for images, _ in batches]), torch.cat([labels for _, labels in batches])


def make(root, split="train", **options):
    return data.build_loader(
        split, data=root, **({"batch_size": 4, "image_size": 32, "train": split == "train", "seed": 5} | options)
    )


# Which samples


@pytest.mark.parametrize("world", [1, 2, 3, 5])
@pytest.mark.parametrize("count", [1, 7, 8, 30, 31])
def test_evaluation_covers_each_sample_once(world, count):
    plans = [Plan(count, 4, False, 0, rank, world) for rank in range(world)]
    seen = [np.concatenate(list(plan.batches(0))) for plan in plans]
    assert {len(indices) for indices in seen} == {4 * len(plans[0])}
    everything = np.concatenate(seen)
    assert sorted(everything[everything >= 0]) == list(range(count))


def test_training_batches_are_the_same_for_any_world():
    one = list(Plan(50, 12, True, 3).batches(2))
    two = [list(Plan(50, 6, True, 3, rank, 2).batches(2)) for rank in range(2)]
    assert len(one) == len(Plan(50, 12, True)) == len(two[0]) == 4
    for whole, first, second in zip(one, *two, strict=True):
        np.testing.assert_array_equal(whole, np.concatenate([first, second]))
    assert len(np.unique(np.concatenate(one))) == 48
    np.testing.assert_array_equal(np.stack(list(Plan(50, 12, True, 3).batches(2, start=3))), one[3:])
    assert (np.concatenate(list(Plan(50, 12, True, 3).batches(3))) != np.concatenate(one)).any()


def test_plan_refuses():
    with pytest.raises(DataError, match="7 training samples do not fill one global batch of 8"):
        Plan(7, 4, True, 0, 0, 2)
    for bad in ((0, 4, False), (5, 0, False), (5, 1, False, 0, 2, 2)):
        with pytest.raises(ValueError):
            Plan(*bad)


# Validation


def test_error_of_a_worker_is_one_line(tmp_path):
    (tmp_path / "val" / "a").mkdir(parents=True)
    smooth().save(tmp_path / "val" / "a" / "x.jpg")
    splits = data.open_data(tmp_path)
    (tmp_path / "val" / "a" / "x.jpg").write_bytes(b"spoilt")
    loader = make(splits, "val", workers=1)
    with pytest.raises(DataError) as caught:
        collect(loader)
    assert str(caught.value) == f"{tmp_path / 'val' / 'a' / 'x.jpg'}: not a picture in a known format"
    loader.close()


def test_index_remembers_unchanged_files(odd, monkeypatch):
    root, _ = odd
    first = data.open_data(root)
    looked = []
    monkeypatch.setattr(inspection, "inspect", lambda path, check: looked.append(path) or (1, 1, True, 1))
    again = data.open_data(root)
    assert not looked
    np.testing.assert_array_equal(first["train"].sizes, again["train"].sizes)
    turned = [index for index, path in enumerate(again["train"].paths) if path.endswith("turned.jpg")]
    assert again["train"].sizes[turned].tolist() == [[60, 48]], "sizes are of the upright picture"
    os.utime(first["train"].paths[0], (1, 1))
    data.open_data(root)
    assert [str(path) for path in looked] == [first["train"].paths[0]]


@pytest.mark.parametrize("backend", ["pytorch", pytest.param("dali-cpu", marks=needs_dali)])
@pytest.mark.parametrize("when", ["before", "after"])
def test_truncated_and_missing_among_eight(tmp_path, backend, when):
    (tmp_path / "train" / "a").mkdir(parents=True)
    for number in range(8):
        smooth(seed=number).save(tmp_path / "train" / "a" / f"{number}.jpg")
    whole = data.open_data(tmp_path)

    def spoil():
        path = tmp_path / "train" / "a" / "3.jpg"
        path.write_bytes(path.read_bytes()[:-300])
        (tmp_path / "train" / "a" / "5.jpg").unlink()
        if when == "before":
            (tmp_path / "train" / "a" / "5.jpg").symlink_to("nowhere")

    spoil()
    options = {"train": False, "batch_size": 3, "backend": backend}
    if when == "before":
        with pytest.raises(DataError, match=r"(?s)3.jpg: unreadable.*5.jpg: no such picture"):
            make(tmp_path, **options)
        loader = make(tmp_path, tolerant=True, **options)
    else:
        with pytest.raises(DataError, match=r"3.jpg: unreadable|5.jpg: no such picture"):
            collect(make(whole, **options))
        if backend == "dali-cpu":
            return  # DALI cannot pass over a file that broke after the start
        loader = make(whole, tolerant=True, **options)
    for _ in range(2):
        images, labels = collect(loader)
        assert (labels >= 0).sum() == 6 and len(loader.skipped) == 2
        assert sorted(path[-5:] for path, _ in loader.skipped) == ["3.jpg", "5.jpg"]
    if backend == "pytorch":
        loader = make(tmp_path if when == "before" else whole, tolerant=True, batch_size=2)
        _, labels = collect(loader)
        assert (labels == 0).all() and len(labels) == (6 if when == "before" else 8)


# The same picture everywhere


def test_training_inference_and_loader_decode_alike(odd):
    root, same = odd
    splits = data.open_data(root)
    prepare = vision.Preprocessing(resize=40, crop=32)
    images, labels = collect(make(splits, "val", resize=40))
    assert images.dtype == torch.uint8 and labels.dtype == torch.int64
    assert images.is_contiguous(memory_format=torch.channels_last)
    for image, label, path in zip(images, labels, splits["val"].paths, strict=False):
        crop = np.asarray(prepare.crop_image(path))
        np.testing.assert_array_equal(image.permute(1, 2, 0).numpy(), crop)
        name = os.path.basename(path)
        if name in same:
            assert label == 0
            expected = np.asarray(prepare.crop_image(same[name])).astype(int)
            assert np.abs(crop - expected).mean() <= (2.5 if name.endswith(".jpg") else 0), name
    assert (labels[len(splits["val"]) :] == -1).all() and (labels >= 0).sum() == len(splits["val"])


@needs_dali
@pytest.mark.parametrize("interpolation", ["bilinear", "bicubic"])
@pytest.mark.parametrize(("split", "augmentation"), [("val", "standard"), ("train", "standard"), ("train", "erase")])
def test_dali_gives_what_pillow_gives(odd, split, augmentation, interpolation):
    splits = data.open_data(odd[0])
    options = {"augmentation": augmentation, "interpolation": interpolation, "batch_size": 5, "resize": 40}
    ours, theirs = make(splits, split, **options), make(splits, split, backend="dali-cpu", workers=2, **options)
    for epoch in range(2):
        for loader in (ours, theirs):
            loader.set_epoch(epoch)
        (a, labels), (b, other) = collect(ours), collect(theirs)
        assert torch.equal(labels, other) and b.is_contiguous(memory_format=torch.channels_last)
        difference = (a[labels >= 0].int() - b[labels >= 0].int()).abs()
        # Both round, Pillow also between its two passes; the rim of a box cut out of a JPEG may differ more.
        assert difference.float().mean() < 0.5
        assert (difference > 2).float().mean() < 0.002 and difference.max() <= 24


@needs_dali
def test_dali_auto_augments_like_pillow(odd):
    splits = data.open_data(odd[0])
    options = {"augmentation": "autoaugment", "batch_size": 14}
    ours, theirs = make(splits, **options), make(splits, backend="dali-cpu", **options)
    close, changed = [], []
    for epoch in range(6):
        for loader in (ours, theirs):
            loader.set_epoch(epoch)
        (a, labels), (b, other) = collect(ours), collect(theirs)
        assert torch.equal(labels, other) and b.is_contiguous(memory_format=torch.channels_last)
        close.append(((a.int() - b.int()).abs() <= 8).float().mean((1, 2, 3)))
        changed.append(
            (b != collect(make(splits, backend="dali-cpu", batch_size=14, epoch=epoch))[0]).flatten(1).any(1)
        )
    # Where a level of difference crosses a threshold (solarize) or is stretched (equalize), it grows.
    assert torch.cat(close).mean() > 0.9 and torch.cat(changed).float().mean() > 0.5


@needs_dali
def test_dali_decoding_whole_pictures(odd):
    splits = data.open_data(odd[0])
    loader = make(splits, backend="dali-cpu")
    loader.decode_box = False
    images, labels = collect(loader)
    ours, _ = collect(make(splits))
    assert (images.int() - ours.int()).abs().max() <= 4 and torch.equal(labels, collect(make(splits))[1])


@needs_dali
def test_dali_resumes_and_restarts(odd):
    loader = make(odd[0], backend="dali-cpu", batch_size=2)
    epochs = {}
    for epoch in range(2):
        loader.set_epoch(epoch)
        epochs[epoch] = collect(loader)
    assert not torch.equal(epochs[0][0], epochs[1][0])
    iterator = iter(loader)  # given up in the middle
    next(iterator)
    iterator.close()
    for epoch, start in ((0, 2), (1, 0), (1, 0), (0, 7), (0, 0)):
        loader.set_epoch(epoch, start)
        if start == len(loader):
            assert list(loader) == []
            continue
        images, labels = collect(loader)
        assert torch.equal(images, epochs[epoch][0][2 * start :]) and torch.equal(labels, epochs[epoch][1][2 * start :])
    evaluation = make(odd[0], "val", backend="dali-cpu", batch_size=4)
    first = collect(evaluation)
    evaluation.set_epoch(7)
    for a, b in zip(collect(evaluation), first, strict=True):
        assert torch.equal(a, b)


def test_dali_is_optional():
    code = (
        "import sys; sys.modules['nvidia.dali'] = None\n"
        "from convnets import data, folder\n"
        "import numpy as np\n"
        "s = folder.Samples('train', ['a'], ['x.jpg'], np.zeros(1, int), np.ones((1, 2), int))\n"
        "loader = data.build_loader('train', data={'train': s}, batch_size=1, image_size=8, train=False,\n"
        "                           backend='dali-cpu')\n"
        "try:\n    list(loader)\nexcept ImportError as error:\n    print(error)\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert "need NVIDIA DALI: pip install nvidia-dali" in done.stdout


@needs_dali
def test_dali_refuses_what_it_cannot_do(odd, tmp_path):
    splits = data.open_data(odd[0])
    with pytest.raises(ValueError, match="'dali-gpu' needs a CUDA device, not 'cpu'"):
        make(splits, backend="dali-gpu")
    with pytest.raises(ValueError, match="'lanczos'"):
        make(splits, backend="dali-cpu", interpolation="lanczos")


def save_special(name, path):
    """Pictures that DALI decodes to other values than Pillow, or not at all."""
    grey = np.asarray(smooth().convert("L"))
    exif = Image.Exif()
    exif[0x0112] = 6
    if name == "TIFF, mode F":
        Image.fromarray(grey.astype(np.float32)).save(path, "TIFF")
    elif name == "WEBP, mode RGB":
        smooth().save(path, "WEBP", exif=exif)
    elif name == "GIF, mode P":
        smooth().save(path, "GIF")
    else:
        smooth().convert(name.split()[-1]).save(path, "TIFF")


@needs_dali
@pytest.mark.parametrize(
    "name", ["TIFF, mode F", "TIFF, mode LAB", "TIFF, mode LA", "TIFF, mode 1", "GIF, mode P", "WEBP, mode RGB"]
)
def test_dali_refuses_what_it_would_decode_otherwise(tmp_path, name):
    """By content, not by suffix; also where the index answers."""
    (tmp_path / "val" / "a").mkdir(parents=True)
    smooth().save(tmp_path / "val" / "a" / "a.jpg")
    save_special(name, tmp_path / "val" / "a" / "x.png")
    for _ in range(2):
        with pytest.raises(DataError, match=rf"^1 picture that .*a/x\.png \({name}\); use --data_backend pytorch"):
            make(tmp_path, "val", backend="dali-cpu")
    assert (collect(make(tmp_path, "val"))[1] >= 0).sum() == 2


@needs_dali
@pytest.mark.parametrize("interpolation", ["bilinear", "bicubic"])
def test_long_pictures_are_the_same_everywhere(tmp_path, interpolation):
    """Evaluation computes only a part of them: by memory, a line of 20000 pixels is an ordinary picture."""
    (tmp_path / "val" / "a").mkdir(parents=True)
    for number, size in enumerate([(1300, 20), (20, 1301), (20000, 1), (1, 20000), (600, 40)]):
        smooth(*size).save(tmp_path / "val" / "a" / f"{number}.png")
    splits = data.open_data(tmp_path)
    options = {"interpolation": interpolation, "resize": 40, "batch_size": 5}
    ours, theirs = (collect(make(splits, "val", backend=kind, **options))[0] for kind in ("pytorch", "dali-cpu"))
    assert (ours.int() - theirs.int()).abs().max() <= 2
    prepare = vision.Preprocessing(resize=40, crop=32, interpolation=interpolation)
    for image, path in zip(ours, splits["val"].paths, strict=True):
        np.testing.assert_array_equal(image.permute(1, 2, 0).numpy(), np.asarray(prepare.crop_image(path)))


# Reproducible


@pytest.mark.parametrize("augmentation", ["none", "standard", "autoaugment", "erase"])
def test_workers_and_ranks_do_not_matter(odd, augmentation):
    splits = data.open_data(odd[0])
    reference = collect(make(splits, augmentation=augmentation, batch_size=4))
    if augmentation in ("standard", "autoaugment"):
        with_workers = make(splits, augmentation=augmentation, batch_size=4, workers=2)
        images, labels = collect(with_workers)
        assert torch.equal(images, reference[0]) and torch.equal(labels, reference[1])
        with_workers.set_epoch(1)
        assert not torch.equal(collect(with_workers)[0], reference[0])
        with_workers.set_epoch(0, 1)
        assert torch.equal(collect(with_workers)[0], reference[0][4:])
        with_workers.close()
    parts = [collect(make(splits, augmentation=augmentation, batch_size=2, world_rank=r, world_size=2)) for r in (0, 1)]
    merged = torch.cat([part[0].unflatten(0, (-1, 2)) for part in parts], 1).flatten(0, 1)
    assert torch.equal(merged, reference[0])


def test_loaders_leave_the_global_generators_alone(odd):
    splits = data.open_data(odd[0])
    torch.manual_seed(1)
    np.random.seed(1)
    before, numpy_before = torch.get_rng_state(), np.random.get_state()[1].copy()
    collect(make(splits))
    collect(make("synthetic"))
    assert torch.equal(torch.get_rng_state(), before) and (np.random.get_state()[1] == numpy_before).all()


def test_set_epoch_checks(odd):
    loader = make(odd[0])
    assert len(loader) == 3 and loader.num_samples == 14 and loader.classes == ["a", "b"]
    loader.set_epoch(0, 3)
    assert list(loader) == []
    with pytest.raises(ValueError, match="start_batch 4 is not within the epoch's 3 batches"):
        loader.set_epoch(0, 4)


# Refused


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"backend": "dali"}, "data backend 'dali' is none of"),
        ({"augmentation": "randaugment"}, "augmentation 'randaugment' is none of"),
        ({"interpolation": "area"}, "interpolation 'area' is none of"),
        ({"resize": 16}, "resize 16 is smaller than image_size 32"),
        ({"channels": 1}, "picture files give 3 channels, not 1"),
    ],
)
def test_options_are_checked(odd, options, message):
    with pytest.raises(ValueError, match=message):
        make(odd[0], **options)


# On a GPU


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("backend", ["pytorch", "dali-cpu", "dali-gpu"])
@pytest.mark.parametrize("split", ["train", "val"])
def test_gpu_loaders_give_what_the_cpu_gives(odd, backend, split):
    if backend != "pytorch" and not HAS_DALI:
        pytest.skip("NVIDIA DALI is not installed")
    splits = data.open_data(odd[0])
    images, labels = collect(make(splits, split))
    loader = make(splits, split, backend=backend, device="cuda", workers=2)
    for epoch in (1, 0):
        loader.set_epoch(epoch)
        found, other = collect(loader)
    assert found.is_cuda and other.is_cuda and found.is_contiguous(memory_format=torch.channels_last)
    assert torch.equal(other.cpu(), labels)
    difference = (found.cpu().int() - images.int()).abs()[labels >= 0]
    assert difference.float().mean() < (0.01 if backend == "pytorch" else 1.5)


@pytest.mark.parametrize("ends_early", [False, True], ids=["closed", "not closed"])
def test_workers_do_not_keep_the_program_from_ending(tmp_path, ends_early):
    """They ignore SIGTERM, which Python sends them when it ends: the loader must have asked them to leave before."""
    for split in ("train", "val"):
        for name in ("a", "b"):
            (tmp_path / split / name).mkdir(parents=True)
            Image.new("RGB", (40, 40), "red").save(tmp_path / split / name / "1.png")
    program = f"""
from convnets.data import build_loader
loader = build_loader("val", data={str(tmp_path)!r}, batch_size=1, image_size=16, train=False, workers=1)
batches = iter(loader)
next(batches)
if {ends_early}:
    raise SystemExit(0)
loader.close()
"""
    done = subprocess.run([sys.executable, "-c", program], timeout=60, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
