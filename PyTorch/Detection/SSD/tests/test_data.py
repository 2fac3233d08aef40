"""Loaders: the same samples from every back end, worker count, world and resumed run; cases O07, O10 to O13."""

from __future__ import annotations

import importlib.util
import itertools
import json
import subprocess
import sys

import numpy as np
import pytest
import torch
from PIL import Image

from dlx import coco, vision
from dlx.loading import DataError, Plan, to_device
from ssd import data, pictures, splits
from ssd.options import DataOptions

HAS_DALI = importlib.util.find_spec("nvidia.dali") is not None if importlib.util.find_spec("nvidia") else False
needs_dali = pytest.mark.skipif(not HAS_DALI, reason="NVIDIA DALI is not installed")
BACKENDS = ["pytorch", pytest.param("dali-cpu", marks=needs_dali)]
IDS = {3: "cup", 17: "cat", 44: "owl"}
SIZE = 96


@pytest.fixture(autouse=True)
def private_home(tmp_path_factory, monkeypatch):
    monkeypatch.setenv("DLX_HOME", str(tmp_path_factory.mktemp("home")))


def soft_picture(generator: np.random.Generator, width: int, height: int) -> Image.Image:
    """Colours that change slowly: what two decoders or filters make of it differs by rounding."""
    coarse = generator.integers(30, 220, (5, 6, 3), dtype=np.uint8)
    return Image.fromarray(coarse).resize((width, height), Image.Resampling.BICUBIC)


def write_data(folder, count: int = 10, suffix: str = "jpg", splits_=("train", "val"), seed: int = 0):
    """COCO's layout with `count` pictures a split; picture i has i % 4 objects, category ids 3, 17, 44."""
    generator = np.random.default_rng(seed)
    for split in splits_:
        (folder / split).mkdir(parents=True)
        images, annotations = [], []
        for number in range(count):
            width, height = (int(side) for side in generator.integers(80, 200, 2))
            name = f"{number}.{suffix}"
            soft_picture(generator, width, height).save(folder / split / name, quality=95)
            images.append({"id": 1000 + number, "file_name": name, "width": width, "height": height})
            for _ in range(number % 4):
                sides = generator.uniform(0.2, 0.6, 2) * (width, height)
                corner = generator.uniform(0, 1, 2) * ((width, height) - sides)
                category = int(generator.choice(list(IDS)))
                annotations.append(
                    {"id": len(annotations) + 1, "image_id": 1000 + number, "category_id": category,
                     "bbox": [*corner.tolist(), *sides.tolist()], "iscrowd": 0}
                )  # fmt: skip
        (folder / "annotations").mkdir(exist_ok=True)
        categories = [{"id": number, "name": name} for number, name in IDS.items()]
        path = folder / "annotations" / f"instances_{split}.json"
        coco.write(path, images=images, annotations=annotations, categories=categories)
    return folder


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return write_data(tmp_path_factory.mktemp("coco"))


def make(source, split: str = "train", **options):
    opened = source if isinstance(source, dict) else data.open_data(source, keep_empty=True)
    defaults = {"batch_size": 2, "image_size": SIZE, "train": split == "train", "seed": 3}
    return data.build_loader(split, data=opened, **{**defaults, **options})


def collect(loader) -> list[torch.Tensor]:
    """Each tensor of the batches, all batches in one; the loader is closed."""
    try:
        batches = list(loader)
    finally:
        loader.close()
    return [torch.cat(tensors) for tensors in zip(*batches, strict=True)]


def equal(first, second) -> bool:
    return all(torch.equal(a, b) for a, b in zip(first, second, strict=True))


def test_batches(folder):
    """O10: pictures with no, one and three objects in one batch; O12: labels 1 to 3 for ids 3, 17, 44."""
    opened = data.open_data(folder, keep_empty=True)
    train = opened["train"]
    assert train.classes == ["cup", "cat", "owl"] and train.category_ids == [3, 17, 44]
    assert train.object_counts.tolist() == [0, 1, 2, 3, 0, 1, 2, 3, 0, 1] and train.most == 3
    loader = make(opened, batch_size=5)
    for images, boxes, labels in loader:
        assert images.shape == (5, 3, SIZE, SIZE) and images.dtype == torch.uint8
        assert images.is_contiguous(memory_format=torch.channels_last)
        assert boxes.shape == (5, 3, 4) and boxes.dtype == torch.float32
        assert labels.shape == (5, 3) and labels.dtype == torch.int64
        used = labels > 0
        assert (labels <= 3).all() and (boxes[~used] == 0).all()
        assert (boxes[used][:, 2:] > boxes[used][:, :2]).all() and boxes.min() >= 0 and boxes.max() <= 1
        assert (used.int().diff(dim=1) <= 0).all()  # objects first
    assert len(loader) == 2


def test_pictures_without_objects_are_left_out_and_counted(folder):
    opened = data.open_data(folder)
    assert len(opened["train"]) == 7 and opened["train"].empty == 3
    assert len(opened["val"]) == 10 and opened["val"].empty == 0  # an evaluation counts false alarms there, too


def test_no_object_anywhere(tmp_path):
    write_data(tmp_path, count=1)
    with pytest.raises(DataError, match="not one picture holds an object"):
        data.open_data(tmp_path)
    _, boxes, labels = collect(make(tmp_path, batch_size=1))
    assert boxes.shape == (1, 1, 4) and labels.tolist() == [[0]]


def test_crowds_are_for_the_evaluation_only(tmp_path):
    write_data(tmp_path, count=4)
    path = tmp_path / "annotations" / "instances_train.json"
    content = json.loads(path.read_text())
    for annotation in content["annotations"][-2:]:
        annotation["iscrowd"] = 1
    path.write_text(json.dumps(content))
    train = data.open_data(tmp_path, keep_empty=True)["train"]
    assert train.object_counts.tolist() == [0, 1, 2, 1] and train.annotations.iscrowd.sum() == 2
    boxes, labels = train.objects(np.array([3, 1]))
    assert boxes.shape == (2, 1, 4) and labels[0, 0] == train.annotations.labels[train.annotations.rows(3)][0]


# Order


@pytest.mark.parametrize("backend", BACKENDS)
def test_evaluation_sees_every_picture_once(folder, backend):
    for world in (1, 2, 3):
        loaders = [
            make(folder, "val", backend=backend, world_rank=rank, world_size=world, batch_size=3)
            for rank in range(world)
        ]
        assert len({len(loader) for loader in loaders}) == 1
        index = torch.cat([collect(loader)[1] for loader in loaders])
        assert sorted(index[index >= 0].tolist()) == list(range(10))


def test_evaluation_shows_the_whole_picture(folder):
    opened = data.open_data(folder)
    images, index = collect(make(opened, "val", batch_size=4))
    for image, row in zip(images[:10], index[:10].tolist(), strict=True):
        expected = vision.decode_image(opened["val"].annotations.picture_path(row)).resize((SIZE, SIZE), 2)
        assert (image.permute(1, 2, 0).numpy() == np.asarray(expected)).all()
    assert index[10:].tolist() == [-1, -1]


@pytest.mark.parametrize("backend", BACKENDS)
def test_workers_and_world_do_not_change_samples(folder, backend):
    alone = collect(make(folder, batch_size=4, backend=backend))
    assert equal(alone, collect(make(folder, batch_size=4, backend=backend, workers=2)))
    ranks = [collect(make(folder, backend=backend, world_rank=rank, world_size=2)) for rank in (0, 1)]
    for whole, *parts in zip(alone, *ranks, strict=True):
        for batch in range(2):
            both = torch.cat([part[2 * batch : 2 * batch + 2] for part in parts])
            assert torch.equal(both, whole[4 * batch : 4 * batch + 4])


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("workers", [0, 2])
def test_resume_in_the_middle_of_an_epoch(folder, backend, workers):
    loader = make(folder, backend=backend, workers=workers)
    epochs = []
    for epoch in range(2):
        loader.set_epoch(epoch)
        epochs.append([torch.cat(tensors) for tensors in zip(*loader, strict=True)])
    assert not equal(*epochs)
    again = make(folder, backend=backend, epoch=1, start_batch=3)
    assert equal(collect(again), [tensor[6:] for tensor in epochs[1]])
    for epoch, start in ((0, 2), (1, 4), (0, 0)):  # jumps, also after reading ahead
        loader.set_epoch(epoch, start)
        rest = [torch.cat(tensors) for tensors in zip(*loader, strict=True)]
        assert equal(rest, [tensor[2 * start :] for tensor in epochs[epoch]])
    loader.set_epoch(1)
    list(itertools.islice(iter(loader), 2))  # left in the middle
    loader.set_epoch(0)
    assert equal(collect(loader), epochs[0])


# Back ends


@needs_dali
@pytest.mark.parametrize("suffix", ["png", "jpg"])
@pytest.mark.parametrize("augmentation", ["none", "flip", "crop", "ssd"])
def test_pillow_and_dali_agree(tmp_path, suffix, augmentation):
    """Equal boxes; pixels within the rounding of the resize, which a contrast of up to 1.7 stretches."""
    write_data(tmp_path, count=12, suffix=suffix)
    options = {"augmentation": augmentation, "batch_size": 4}
    for epoch in range(2):
        one = collect(make(tmp_path, epoch=epoch, **options))
        two = collect(make(tmp_path, epoch=epoch, backend="dali-cpu", **options))
        assert torch.equal(one[1], two[1]) and torch.equal(one[2], two[2])
        difference = (one[0].int() - two[0].int()).abs()
        assert difference.float().mean() < 0.6
        if suffix == "png":
            assert difference.max() <= 3
        else:  # the rim of a part cut out of a JPEG with subsampled colours may differ more
            assert (difference > 4).float().mean() < 0.01
    one, two = (collect(make(tmp_path, "val", backend=b, batch_size=4)) for b in ("pytorch", "dali-cpu"))
    assert torch.equal(one[1], two[1]) and (one[0].int() - two[0].int())[:12].abs().max() <= 2


@needs_dali
def test_cutting_before_or_after_decoding(folder):
    from ssd import dali

    loader = make(folder, backend="dali-cpu")
    before = collect(loader)
    loader = make(folder, backend="dali-cpu")
    loader.decode_box = False
    after = collect(loader)
    assert isinstance(loader, dali.DaliLoader) and equal(before[1:], after[1:])
    assert ((before[0].int() - after[0].int()).abs() > 4).float().mean() < 0.01


def match_brute_force(boxes: np.ndarray, labels: np.ndarray, anchors: np.ndarray):
    """Offsets and labels of every anchor, one pair after another in float64."""
    offsets, targets = np.zeros((len(anchors), 4)), np.zeros(len(anchors), np.int64)
    if not len(boxes):
        return offsets, targets
    overlap = np.zeros((len(boxes), len(anchors)))
    for i, (a, b, c, d) in enumerate(boxes.tolist()):
        for j, (e, f, g, h) in enumerate(anchors.tolist()):
            common = max(0, min(c, g) - max(a, e)) * max(0, min(d, h) - max(b, f))
            overlap[i, j] = common / ((c - a) * (d - b) + (g - e) * (h - f) - common)
    best = overlap.argmax(1)
    for j, (e, f, g, h) in enumerate(anchors.tolist()):
        own = [i for i in range(len(boxes)) if best[i] == j]
        chosen = own[-1] if own else int(overlap[:, j].argmax())
        if own or overlap[chosen, j] > 0.5:
            a, b, c, d = boxes[chosen].tolist()
            targets[j] = labels[chosen]
            offsets[j] = [
                ((a + c) - (e + g)) / 2 / (g - e) / 0.1, ((b + d) - (f + h)) / 2 / (h - f) / 0.1,
                np.log((c - a) / (g - e)) / 0.2, np.log((d - b) / (h - f)) / 0.2,
            ]  # fmt: skip
    return offsets, targets


def grid_anchors() -> np.ndarray:
    steps, sides = np.linspace(0.1, 0.9, 7), ((0.2, 0.2), (0.45, 0.3), (0.3, 0.6), (0.8, 0.8))
    made = [(x - w / 2, y - h / 2, x + w / 2, y + h / 2) for x in steps for y in steps for w, h in sides]
    return np.clip(np.array(made, np.float32), 0, 1)


def check_encoded(backend: str, folder, device: str) -> None:
    anchors = grid_anchors()
    loader = make(folder, backend=backend, batch_size=5, anchors=anchors, device=device)
    batches = [type(batch)(*(tensor.cpu() for tensor in batch)) for batch in loader]
    loader.close()
    plain = collect(make(folder, batch_size=5))
    positives = 0
    for number, batch in enumerate(batches):
        rows = slice(5 * number, 5 * number + 5)
        assert torch.equal(batch.boxes, plain[1][rows]) and torch.equal(batch.labels, plain[2][rows])
        assert batch.offsets.shape == (5, len(anchors), 4) and batch.targets.dtype == torch.int64
        for boxes, labels, offsets, targets in zip(*(tensor.numpy() for tensor in batch[1:]), strict=True):
            used = labels > 0
            expected, expected_targets = match_brute_force(boxes[used], labels[used], anchors)
            # Where two boxes want one anchor, or overlap it as much, either answer is right.
            clear = expected_targets == targets
            assert clear.mean() > 0.99 and (targets > 0).sum() >= min(1, used.sum())
            chosen = clear & (targets > 0)
            close = np.isclose(offsets[chosen], expected[chosen], atol=2e-3).all(1)
            assert close.mean() > 0.9 if len(close) else True
            positives += chosen.sum()
    assert positives > 20


@needs_dali
def test_dali_encodes_like_a_brute_force_match(folder):
    check_encoded("dali-cpu", folder, "cpu")


@pytest.mark.gpu
@needs_dali
def test_dali_gpu(folder, tmp_path):
    """nvJPEG decodes a little differently; boxes are equal, order and resume as on the CPU."""
    check_encoded("dali-gpu", folder, "cuda")
    write_data(tmp_path, count=12)
    for split, augmentation in (("train", "ssd"), ("train", "crop"), ("val", "ssd")):
        options = {"augmentation": augmentation, "batch_size": 4}
        one = collect(make(tmp_path, split, **options))
        two = collect(make(tmp_path, split, backend="dali-gpu", device="cuda", **options))
        assert all(tensor.is_cuda for tensor in two)
        for a, b in zip(one[1:], two[1:], strict=True):
            assert torch.equal(a, b.cpu())
        difference = (one[0].int() - two[0].cpu().int())[:12].abs().float()
        assert difference.mean() < 2 and (difference > 12).float().mean() < 0.01
    loader = make(folder, backend="dali-gpu", device="cuda")
    whole = [torch.cat(tensors) for tensors in zip(*loader, strict=True)]
    loader.set_epoch(0, 3)
    assert equal([tensor[6:] for tensor in whole], collect(loader))


@needs_dali
def test_dali_says_what_it_cannot_do(tmp_path):
    write_data(tmp_path, count=3)
    opened = data.open_data(tmp_path, keep_empty=True)
    with pytest.raises(ValueError, match="'dali-gpu' needs a CUDA device, not 'cpu'"):
        make(opened, backend="dali-gpu")
    with pytest.raises(ValueError, match="anchors are for training with a DALI back end"):
        make(opened, anchors=grid_anchors())
    annotations = opened["train"].annotations
    annotations.orientations[0], annotations.turned[1] = 6, True
    with pytest.raises(DataError, match="DALI treats all pictures alike"):
        make(opened, backend="dali-cpu")
    annotations.plain[2] = False
    with pytest.raises(DataError, match="1 picture that DALI would not decode like Pillow.*2.jpg"):
        make(opened, backend="dali-cpu")


def test_dali_is_optional(folder):
    code = (
        "import sys; sys.modules['nvidia.dali'] = None\n"
        "from ssd import data\n"
        f"splits = data.open_data({str(folder)!r})\n"
        "loader = data.build_loader('train', data=splits, batch_size=1, train=True, backend='dali-cpu')\n"
        "try:\n    list(loader)\nexcept ImportError as error:\n    print(error)\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert "need NVIDIA DALI: pip install nvidia-dali" in done.stdout


# Odd and bad files


def odd_pictures() -> dict[str, Image.Image]:
    """O07: 40 x 80, the left half white."""
    grey = Image.new("L", (80, 40), 0)
    grey.paste(255, (0, 0, 40, 40))
    deep = Image.fromarray((np.asarray(grey).astype(np.uint16)) * 257)
    rgba = grey.convert("RGBA")
    rgba.putalpha(Image.new("L", (80, 40), 90))
    return {"grey.png": grey, "deep.png": deep, "rgba.png": rgba, "palette.png": grey.convert("P"),
            "rgb.png": grey.convert("RGB"), "cmyk.jpg": grey.convert("CMYK")}  # fmt: skip


@pytest.mark.parametrize("backend", BACKENDS)
def test_odd_pictures_o07(tmp_path, backend):
    made = odd_pictures()
    (tmp_path / "annotations").mkdir()
    (tmp_path / "val").mkdir()
    images = []
    for number, (name, image) in enumerate(made.items()):
        image.save(tmp_path / "val" / name)
        images.append({"id": number, "file_name": name, "width": 80, "height": 40})
    coco.write(
        tmp_path / "annotations" / "instances_val.json", images=images, annotations=[],
        categories=[{"id": 1, "name": "half"}],
    )  # fmt: skip
    loaded, index = collect(make(tmp_path, "val", backend=backend, image_size=300, batch_size=6))
    assert loaded.shape == (6, 3, 300, 300) and index.tolist() == list(range(6))
    assert (loaded[..., :145] > 250).all() and (loaded[..., 155:] < 5).all()
    assert torch.equal(loaded[0], loaded[4])  # grey equals its RGB copy


@pytest.mark.parametrize("backend", BACKENDS)
def test_pictures_turned_by_exif(tmp_path, backend):
    """Boxes follow the upright picture where the JSON has its size, and the stored one where it has that."""
    for frame, size in {"upright": (60, 90), "stored": (90, 60)}.items():
        root = tmp_path / frame
        (root / "annotations").mkdir(parents=True)
        (root / "val").mkdir()
        exif = Image.Exif()
        exif[0x0112] = 6
        soft_picture(np.random.default_rng(4), 90, 60).save(root / "val" / "0.jpg", exif=exif, quality=95)
        coco.write(
            root / "annotations" / "instances_val.json", annotations=[], categories=[{"id": 1, "name": "a"}],
            images=[{"id": 1, "file_name": "0.jpg", "width": size[0], "height": size[1]}],
        )  # fmt: skip
        loaded, _ = collect(make(root, "val", backend=backend, batch_size=1))
        pixels = Image.open(root / "val" / "0.jpg").convert("RGB")
        pixels = pixels.transpose(Image.Transpose.ROTATE_270) if frame == "upright" else pixels
        expected = np.asarray(pixels.resize((SIZE, SIZE), 2)).astype(int)
        assert np.abs(loaded[0].permute(1, 2, 0).numpy() - expected).max() <= 2


def damage(folder) -> None:
    """One truncated JPEG and one missing file."""
    path = folder / "train" / "2.jpg"
    path.write_bytes(path.read_bytes()[:-600])
    (folder / "train" / "5.jpg").unlink()


def test_bad_files_before_the_start_o13(tmp_path):
    write_data(tmp_path, count=8, splits_=("train",))
    damage(tmp_path)
    with pytest.raises(ValueError, match="2 faults") as caught:
        data.open_data(tmp_path)
    assert "train/2.jpg" in str(caught.value) and "train/5.jpg" in str(caught.value)
    opened = data.open_data(tmp_path, tolerant=True, keep_empty=True)
    loader = make(opened, batch_size=1, tolerant=True)
    assert len(loader) == 6 and len(loader.skipped) == 2
    assert len(collect(loader)[0]) == 6


@pytest.mark.parametrize("workers", [0, 2])
def test_bad_files_that_turn_up_later_o13(tmp_path, workers):
    write_data(tmp_path, count=8, splits_=("train",))
    opened = data.open_data(tmp_path, keep_empty=True)
    damage(tmp_path)
    with pytest.raises(DataError, match="train/[25].jpg"):
        collect(make(opened, batch_size=4, workers=workers))
    loader = make(opened, batch_size=4, tolerant=True, workers=workers)
    assert len(collect(loader)[0]) == 8
    assert sorted(path.rsplit("/", 1)[1] for path, _ in loader.skipped) == ["2.jpg", "5.jpg"]
    evaluation = make({"val": splits.Split("val", opened["train"].annotations)}, "val", batch_size=4, tolerant=True)
    index = collect(evaluation)[1]
    assert sorted(index.tolist()) == [-1, -1, 0, 1, 3, 4, 6, 7] and len(evaluation.skipped) == 2
    for path in (tmp_path / "train").iterdir():
        path.unlink()
    with pytest.raises(DataError, match="not one of the 8 pictures can be read"):
        collect(make(opened, batch_size=4, tolerant=True, workers=workers))


@needs_dali
def test_dali_names_the_bad_file(tmp_path):
    write_data(tmp_path, count=8, splits_=("train",))
    opened = data.open_data(tmp_path, keep_empty=True)
    (tmp_path / "train" / "5.jpg").write_bytes(b"\xff\xd8\xff\xe0 not a picture")
    with pytest.raises(DataError, match="train/5.jpg"):
        collect(make(opened, backend="dali-cpu"))


def test_a_picture_that_changed_its_size(tmp_path):
    write_data(tmp_path, count=4, splits_=("train",))
    opened = data.open_data(tmp_path, keep_empty=True)
    Image.new("RGB", (31, 17)).save(tmp_path / "train" / "1.jpg")
    with pytest.raises(DataError, match="1.jpg: 31x17 pixels, its annotations are for"):
        collect(make(opened, batch_size=4))


# Options


def test_options(folder, tmp_path):
    options = DataOptions(data_dir=str(folder), augmentation="crop", image_size=64, batch_size=3)
    opened = options.open()

    class World:
        rank, size, device = 0, 1, torch.device("cpu")

    loader = options.loader("train", opened, True, World)
    images, boxes, labels = next(iter(loader))
    loader.close()
    assert images.shape == (3, 3, 64, 64) and options.data == str(folder)
    found = options.identity(opened)
    assert list(found) == [f"{folder} train", f"{folder} val"] and all(len(value) == 64 for value in found.values())
    own = DataOptions(
        val_json=str(folder / "annotations" / "instances_val.json"), val_images=str(folder / "val"), device="cpu"
    )
    assert list(own.open()) == ["val"]
    with pytest.raises(ValueError, match="train_json and train_images go together"):
        DataOptions(train_json="x.json")
    with pytest.raises(ValueError, match="no such data folder"):
        DataOptions(data_dir=str(tmp_path / "nowhere")).open()
    with pytest.raises(DataError, match="no split 'test', only train, val"):
        make(opened, "test", train=False)


def test_validation_must_have_the_classes_of_training(tmp_path):
    write_data(tmp_path, count=3)
    path = tmp_path / "annotations" / "instances_val.json"
    path.write_text(path.read_text().replace('"owl"', '"hen"'))
    with pytest.raises(ValueError, match="its categories are cup, cat, hen, not cup, cat, owl"):
        data.open_data(tmp_path)


def test_synthetic():
    opened = data.open_data("synthetic", num_classes=5, num_samples=20)
    images, boxes, labels = next(iter(make(opened, batch_size=8)))
    assert images.shape == (8, 3, SIZE, SIZE) and boxes.shape == (8, 8, 4) and opened["train"].category_ids[-1] == 5
    assert labels.min() >= 1 and labels.max() <= 5
    assert (boxes[..., 2:] > boxes[..., :2]).all() and boxes.min() >= 0 and boxes.max() <= 1
    evaluation = make(opened, "val", batch_size=8, backend="synthetic")
    assert torch.cat([batch.index for batch in evaluation]).tolist() == [*range(20), *[-1] * 4]


def test_batches_keep_their_kind_on_the_way_to_the_device(folder):
    batch = next(iter(make(folder)))
    assert isinstance(batch, pictures.Batch)
    assert isinstance(next(to_device(iter([batch]), torch.device("cpu"))), pictures.Batch)
    assert isinstance(next(iter(make(folder, "val"))), pictures.EvalBatch)
    assert len(Plan(10, 4, False)) == 3
