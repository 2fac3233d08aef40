"""Pictures of every kind through inference (case O07), and models from every source they may come from."""

from __future__ import annotations

import importlib.util
import json
import os
import shutil
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image

from convnets import evaluate, infer, options, pretrained, registry, train
from dlx.vision import Preprocessing

specification = importlib.util.spec_from_file_location("small_run", Path(__file__).parent / "small_run.py")
small_run = importlib.util.module_from_spec(specification)
specification.loader.exec_module(small_run)
CLASSES = small_run.CLASSES


@pytest.fixture(autouse=True, scope="module")
def one_thread():
    """The models are tiny: on a busy machine threads would only wait for each other."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


@pytest.fixture(scope="module")
def trained(tmp_path_factory) -> Path:
    """The run of a small ResNet that knows the four patterns of small_run."""
    folder = tmp_path_factory.mktemp("trained")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(options, "open_data", lambda *args, **kwargs: small_run.make_splits())
        train.main(
            "--arch resnet8_small --epochs 8 --batch_size 8 --lr 0.05 --lr_batch_size null --warmup_epochs 1"
            f" --workers 0 --augmentation none --ema_decay 0.5 --device cpu --output_dir {folder}".split()
        )
    return folder


@pytest.fixture(scope="module")
def found(trained) -> pretrained.Classifier:
    return pretrained.load(trained)


def pattern(label: int, size: tuple[int, int] = (56, 42)) -> Image.Image:
    """A picture of a class, without noise, `size` = (width, height)."""
    coarse = torch.rand(4, 4, 4, 3, generator=torch.Generator().manual_seed(1))[label]
    values = ((coarse * 160) + 47).to(torch.uint8).numpy()
    return Image.fromarray(values).resize(size, Image.Resampling.BICUBIC)


def run(found_at: Path | str, image: Path, output: Path, *more: str) -> dict:
    arguments = ["--checkpoint", str(found_at), "--image", str(image), "--output_dir", str(output), "--device", "cpu"]
    return infer.main([*arguments, *more])


def probabilities(top: list[dict]) -> dict[str, float]:
    return {entry["class"]: entry["probability"] for entry in top}


# --------------------------------------------------------------------------------------------- kinds of files


def write_grey(picture: Image.Image, path: Path) -> Image.Image:
    picture.convert("L").save(path)
    return picture.convert("L").convert("RGB")


def write_grey_alpha(picture: Image.Image, path: Path) -> Image.Image:
    picture.convert("LA").save(path)
    return picture.convert("L").convert("RGB")


def write_grey16(picture: Image.Image, path: Path) -> Image.Image:
    grey = np.asarray(picture.convert("L"))
    Image.fromarray(grey.astype(np.uint16) * 257).save(path)
    return Image.fromarray(np.stack([grey] * 3, 2))


def write_rgba(picture: Image.Image, path: Path) -> Image.Image:
    with_alpha = picture.convert("RGBA")
    ramp = np.linspace(0, 255, picture.width).astype(np.uint8)
    with_alpha.putalpha(Image.fromarray(np.tile(ramp, (picture.height, 1))))
    with_alpha.save(path)
    return picture


def write_palette(picture: Image.Image, path: Path) -> Image.Image:
    palette = picture.quantize(64)
    palette.save(path, transparency=3)
    colours = np.array(palette.getpalette()[: 64 * 3], np.uint8).reshape(-1, 3)
    return Image.fromarray(colours[np.asarray(palette)])


def write_cmyk(picture: Image.Image, path: Path) -> Image.Image:
    picture.convert("CMYK").save(path, quality=95)
    with Image.open(path) as image:
        assert image.mode == "CMYK"
        cmyk = np.asarray(image).astype(int)
    return Image.fromarray(np.rint((255 - cmyk[..., :3]) * (255 - cmyk[..., 3:]) / 255).astype(np.uint8))


def write_turned(picture: Image.Image, path: Path) -> Image.Image:
    """Lying on its side, with the EXIF entry that says so."""
    exif = Image.Exif()
    exif[0x0112] = 6  # "rotate by 90 degrees clockwise to show"
    picture.transpose(Image.Transpose.ROTATE_90).save(path, quality=95, exif=exif)
    with Image.open(path) as image:
        assert image.size == (picture.height, picture.width)
        return Image.fromarray(np.ascontiguousarray(np.rot90(np.asarray(image), -1)))


KINDS = {
    "grey.png": write_grey, "grey_alpha.png": write_grey_alpha, "grey16.png": write_grey16, "rgba.png": write_rgba,
    "palette.png": write_palette, "cmyk.jpg": write_cmyk, "turned.jpg": write_turned,
}  # fmt: skip


@pytest.mark.parametrize("label", range(4))
def test_every_kind_of_picture_equals_its_rgb_copy(trained, tmp_path, label):
    """User case O07; one call for all, from one folder."""
    folder = tmp_path / "pictures"
    for name, write in KINDS.items():
        (folder / "copies").mkdir(parents=True, exist_ok=True)
        write(pattern(label), folder / name).save(folder / "copies" / f"{Path(name).stem}.png")
    content = run(trained, folder, tmp_path / "out", "--topk", "4")
    tops = {Path(entry["image"]).relative_to(folder): entry["top"] for entry in content["predictions"]}
    assert len(tops) == 2 * len(KINDS) and not content["skipped"]
    for name in KINDS:
        ours = probabilities(tops[Path(name)])
        copy = probabilities(tops[Path("copies") / f"{Path(name).stem}.png"])
        assert ours == pytest.approx(copy, abs=1e-2 if name == "cmyk.jpg" else 1e-6), name  # rounding of the inks
        if not name.startswith("grey"):
            assert tops[Path(name)][0]["class"] == CLASSES[label], name


def test_sources_of_classify_agree(found, tmp_path):
    """A path, bytes, a picture and an array are one picture; a batch is its members one by one."""
    picture = pattern(2)
    picture.save(tmp_path / "a.png")
    sources = [tmp_path / "a.png", (tmp_path / "a.png").read_bytes(), picture, np.asarray(picture)]
    rows = infer.classify(found, sources, topk=2)
    for row in rows[1:]:
        assert dict(row) == pytest.approx(dict(rows[0]), abs=1e-6)
    alone = [infer.classify(found, [source], topk=2)[0] for source in (picture, pattern(0, (90, 30)))]
    together = infer.classify(found, [picture, pattern(0, (90, 30))], topk=2)
    for one, both in zip(alone, together, strict=True):
        assert [name for name, _ in one] == [name for name, _ in both]
        assert [p for _, p in one] == pytest.approx([p for _, p in both], abs=1e-6)


# --------------------------------------------------------------------------------------------------- the verb


def test_one_picture(trained, tmp_path, capsys):
    pattern(1).save(tmp_path / "photo.jpg", quality=95)
    run(trained, tmp_path / "photo.jpg", tmp_path / "out", "--topk", "3")
    content = json.loads((tmp_path / "out" / "predictions.json").read_text())
    (prediction,) = content["predictions"]
    assert prediction["image"] == str(tmp_path / "photo.jpg") and content["arch"] == "resnet8_small"
    assert str(trained) in content["checkpoint"] and content["skipped"] == []
    values = [entry["probability"] for entry in prediction["top"]]
    assert len(values) == 3 and values == sorted(values, reverse=True) and 0 < sum(values) <= 1 + 1e-6
    assert prediction["top"][0]["class"] == CLASSES[1]
    printed = capsys.readouterr().out
    assert "photo.jpg" in printed and CLASSES[1] in printed and f"{values[0]:.1%}" in printed
    assert sorted(os.listdir(tmp_path / "out")) == ["photo.png", "predictions.json"]
    with Image.open(prediction["annotated"]) as annotated:
        assert annotated.width == 5 * 56 and annotated.height > 5 * 42 + 3 * 14  # enlarged, caption below
        caption = np.asarray(annotated.convert("L"))[5 * 42 :]
    rows = (caption < 128).any(1)
    assert rows.sum() >= 3 * 8  # three lines of letters at least eight pixels high


def test_folder_with_sub_folders(trained, tmp_path):
    for name in ("a.png", "deep/er/a.png", "deep/a.jpg", "deep/a.png", ".hidden/a.png"):
        (tmp_path / "in" / name).parent.mkdir(parents=True, exist_ok=True)
        pattern(0).save(tmp_path / "in" / name)
    (tmp_path / "in" / "notes.txt").write_text("not a picture")
    content = run(trained, tmp_path / "in", tmp_path / "out", "--batch_size", "3")
    names = [str(Path(entry["image"]).relative_to(tmp_path / "in")) for entry in content["predictions"]]
    assert names == ["a.png", "deep/a.jpg", "deep/a.png", "deep/er/a.png"]
    annotated = [entry["annotated"] for entry in content["predictions"]]
    assert len(set(annotated)) == 4 and all(Path(path).is_file() for path in annotated)
    assert Path(annotated[3]) == tmp_path / "out" / "deep" / "er" / "a.png"


def test_pictures_are_never_overwritten(trained, tmp_path):
    pattern(0).save(tmp_path / "a.png")
    before = (tmp_path / "a.png").read_bytes()
    with pytest.raises(ValueError, match=r"overwrite .*a\.png; choose another output_dir"):
        run(trained, tmp_path, tmp_path)
    assert (tmp_path / "a.png").read_bytes() == before and os.listdir(tmp_path) == ["a.png"]


def test_unreadable_pictures(trained, tmp_path, capsys):
    folder = tmp_path / "in"
    folder.mkdir()
    pattern(0).save(folder / "a.png")
    (folder / "b.jpg").write_bytes(b"no picture at all")
    pattern(1).save(folder / "c.jpg")
    (folder / "c.jpg").write_bytes((folder / "c.jpg").read_bytes()[:500])
    pattern(3).save(folder / "d.png")
    (folder / "e.png").touch()
    with pytest.raises(ValueError, match=r"in/b\.jpg: not a picture"):
        run(trained, folder, tmp_path / "strict")
    assert not (tmp_path / "strict" / "predictions.json").exists()
    capsys.readouterr()
    content = run(trained, folder, tmp_path / "out", "--tolerant", "--batch_size", "2")
    assert [Path(entry["image"]).name for entry in content["predictions"]] == ["a.png", "d.png"]
    stored = json.loads((tmp_path / "out" / "predictions.json").read_text())
    assert [Path(path).name for path, _ in stored["skipped"]] == ["b.jpg", "c.jpg", "e.png"]
    captured = capsys.readouterr()
    assert "2 classified, 3 skipped" in captured.out and captured.err.count("skipped ") == 3
    assert captured.err.count("b.jpg") == captured.err.count("c.jpg") == 1
    for name in ("a.png", "d.png"):
        (folder / name).write_bytes(b"spoilt")
    with pytest.raises(ValueError, match=r"^none of 5 pictures could be read; .*a\.png: not a picture"):
        run(trained, folder, tmp_path / "none", "--tolerant")
    assert len(json.loads((tmp_path / "none" / "predictions.json").read_text())["skipped"]) == 5


@pytest.mark.parametrize("name", ["nowhere.jpg", "empty"])
def test_nothing_to_classify_is_named(trained, tmp_path, name):
    (tmp_path / "empty").mkdir()
    with pytest.raises(ValueError, match=name):
        run(trained, tmp_path / name, tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_topk_beyond_the_classes(trained, tmp_path):
    pattern(0).save(tmp_path / "a.png")
    (prediction,) = run(trained, tmp_path / "a.png", tmp_path / "out", "--topk", "50")["predictions"]
    assert sorted(entry["class"] for entry in prediction["top"]) == sorted(CLASSES)
    assert sum(entry["probability"] for entry in prediction["top"]) == pytest.approx(1.0)


@pytest.mark.parametrize("precision", ["bf16", "fp16"])
def test_low_precision_agrees(trained, tmp_path, precision):
    for label in range(4):
        (tmp_path / "in").mkdir(exist_ok=True)
        pattern(label).save(tmp_path / "in" / f"{label}.png")
    content = run(trained, tmp_path / "in", tmp_path / "out", "--precision", precision)
    assert [entry["top"][0]["class"] for entry in content["predictions"]] == CLASSES


def test_bad_option_is_one_line(tmp_path, capsys):
    for arguments, word in ((["--image", "a.png"], "checkpoint"), (["--checkpoint", "x", "--imge", "a"], "image")):
        with pytest.raises(SystemExit) as stopped:
            infer.main(arguments)
        error = capsys.readouterr().err
        assert stopped.value.code == 2 and error.count("\n") == 1 and word in error


# ---------------------------------------------------------------------------------------- where models come from


def test_run_folder_checkpoint_and_averaged_weights(trained, found):
    best = trained / "checkpoints" / (trained / "checkpoints" / "best").read_text().strip()
    assert found.source == str(best) and found.classes == CLASSES and not found.model.training
    assert found.preprocessing == Preprocessing(resize=28, crop=28)
    plain = pretrained.load(best, averaged=False)
    again = pretrained.load(trained / "checkpoints", arch="resnet8_small")
    key = "fc.weight"
    assert torch.equal(again.model.state_dict()[key], found.model.state_dict()[key])
    assert not torch.equal(plain.model.state_dict()[key], found.model.state_dict()[key])
    with pytest.raises(ValueError, match="holds a resnet8_small, not a resnet50"):
        pretrained.load(trained, arch="resnet50")


def test_bare_file_needs_its_architecture(trained, found, tmp_path):
    best = Path(found.source)
    with pytest.raises(ValueError, match=r"ema\.safetensors.*give --arch"):
        pretrained.load(best / "ema.safetensors")
    bare = pretrained.load(best / "ema.safetensors", arch="resnet8_small")
    assert bare.classes == [f"class_{index}" for index in range(4)]
    pictures = [pattern(label) for label in range(4)]
    ours, theirs = infer.classify(bare, pictures, topk=1), infer.classify(found, pictures, topk=1)
    assert [row[0][1] for row in ours] == pytest.approx([row[0][1] for row in theirs], abs=1e-6)
    with pytest.raises(ValueError, match="classifier weight|do not fit"):
        pretrained.load(best / "ema.safetensors", arch="mobilenet_v2")
    torch.save({"mean": torch.zeros(3)}, tmp_path / "other.pth")
    with pytest.raises(ValueError, match=r"other\.pth.*no classifier weight.*1 tensors"):
        pretrained.load(tmp_path / "other.pth", arch="resnet8_small")


def test_bare_file_of_a_grey_model(tmp_path):
    model = registry.build("resnet8_small", 10, in_channels=1)
    torch.save(model.state_dict(), tmp_path / "grey.pth")
    grey = pretrained.load(tmp_path / "grey.pth", arch="resnet8_small")
    assert grey.preprocessing.channels == 1 and len(grey.preprocessing.mean) == 1
    assert len(infer.classify(grey, [pattern(0)], topk=3)[0]) == 3


def test_published_weights_by_name():
    card = pretrained.load("mobilenet_v2.imagenet")
    assert card.arch == "mobilenet_v2" and len(card.classes) == 1000 and card.preprocessing.crop == 224
    assert card.extra["licence"] and card.describe()["preprocessing"]["resize"] == 256
    with pytest.raises(ValueError, match="holds a mobilenet_v2, not a resnet50"):
        pretrained.load("mobilenet_v2.imagenet", arch="resnet50")


def test_unknown_source_lists_what_is_known(tmp_path):
    with pytest.raises(ValueError, match=r"mobilenet_v3.*known: .*mobilenet_v2\.imagenet"):
        pretrained.load("mobilenet_v3")
    with pytest.raises(ValueError, match="no checkpoint in this folder"):
        pretrained.load(tmp_path)


def test_damaged_checkpoint_is_refused(trained, tmp_path):
    shutil.copytree(trained, tmp_path / "copy")
    best = tmp_path / "copy" / "checkpoints" / (trained / "checkpoints" / "best").read_text().strip()
    weights = bytearray((best / "ema.safetensors").read_bytes())
    weights[len(weights) // 2] ^= 1
    (best / "ema.safetensors").write_bytes(weights)
    with pytest.raises(ValueError, match=r"ema\.safetensors.*SHA-256"):
        pretrained.load(tmp_path / "copy")


# ------------------------------------------------------------------------------------------------- evaluation


def evaluated(trained: Path, output: Path, *more: str) -> dict:
    return evaluate.main(
        ["--checkpoint", str(trained), "--workers", "0", "--device", "cpu", "--output_dir", str(output), *more]
    )


def test_evaluation_equals_a_loop(trained, found, tmp_path, monkeypatch):
    """Batches of 8 leave a ragged tail of 5; top-5 of four classes is everything."""
    splits = small_run.make_splits()
    monkeypatch.setattr(options, "open_data", lambda *args, **kwargs: splits)
    result = evaluated(trained, tmp_path, "--batch_size", "8")
    hits, losses, matrix = 0, [], np.zeros((4, 4), int)
    for image, label in zip(splits["val"].images, splits["val"].labels.tolist(), strict=True):
        row = dict(infer.classify(found, [image.numpy()], topk=4)[0])
        best = max(row, key=row.get)
        hits += best == CLASSES[label]
        losses.append(-np.log(row[CLASSES[label]]))
        matrix[label, CLASSES.index(best)] += 1
    assert result["samples"] == 37 and result["top1"] == pytest.approx(100 * hits / 37) and result["top5"] == 100
    assert result["loss"] == pytest.approx(np.mean(losses), rel=1e-4) and result["confusion"] == matrix.tolist()
    trained_on = evaluated(trained, tmp_path / "train", "--split", "train", "--batch_size", "24")
    assert trained_on["samples"] == 24 and trained_on["top1"] > 80


def test_another_image_size(trained, tmp_path, monkeypatch):
    monkeypatch.setattr(options, "open_data", lambda *args, **kwargs: small_run.make_splits())
    assert evaluated(trained, tmp_path, "--image_size", "32")["samples"] == 37


@pytest.mark.parametrize(
    ("classes", "message"),
    [
        (["elk", "fox"], "knows 4 classes, the data has 2"),
        (["ant", "bee", "cow", "dog"], "calls class 2 'cat', the data 'cow'"),
        (["bee", "ant", "cat", "dog"], "calls class 0 'ant', the data 'bee'"),
    ],
)
def test_data_of_other_classes_is_refused(trained, tmp_path, monkeypatch, classes, message):
    monkeypatch.setattr(options, "open_data", lambda *args, **kwargs: small_run.make_splits(classes))
    with pytest.raises(ValueError, match=message):
        evaluated(trained, tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_nameless_classes_fit_any_names_of_their_number(found):
    nameless = pretrained.Classifier(found.model, found.arch, found.preprocessing, ["class_0", "class_1"], "bare")
    evaluate.check_classes(nameless, ["yes", "no"], "bare")
    with pytest.raises(ValueError, match="bare knows 2 classes, the data has 3"):
        evaluate.check_classes(nameless, ["yes", "no", "perhaps"], "bare")
    evaluate.check_classes(found, CLASSES, "run")
