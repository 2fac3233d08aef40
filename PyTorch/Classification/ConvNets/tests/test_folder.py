"""Class folders: what counts as a picture and as a class, and every fault named before training starts (case O13)."""

import os

import numpy as np
import pytest
from PIL import Image

from convnets import data, folder, prepare
from convnets.folder import DataError
from dlx import vision


@pytest.fixture(autouse=True)
def private_home(tmp_path_factory, monkeypatch):
    monkeypatch.setenv("DLX_HOME", str(tmp_path_factory.mktemp("home")))


def smooth(width=60, height=48) -> Image.Image:
    small = np.random.default_rng(0).integers(0, 256, (5, 6, 3), np.uint8)
    return Image.fromarray(small).resize((width, height), Image.Resampling.BICUBIC)


def test_all_faults_at_once(tmp_path):
    for name in ("train/cat", "train/dog", "train/empty", "val/cat", "val/horse"):
        (tmp_path / name).mkdir(parents=True)
    for name in ("train/cat/a.jpg", "train/dog/b.png", "val/cat/c.jpg", "val/horse/d.jpg"):
        smooth().save(tmp_path / name)
    content = (tmp_path / "train/cat/a.jpg").read_bytes()
    (tmp_path / "train/cat/cut.jpg").write_bytes(content[: len(content) // 2])
    (tmp_path / "train/dog/text.png").write_text("hello")
    (tmp_path / "train/dog/nothing.png").touch()
    (tmp_path / "train/dog/gone.png").symlink_to(tmp_path / "nowhere.png")
    with pytest.raises(DataError) as caught:
        data.open_data(tmp_path)
    text = str(caught.value)
    for part in ("8 faults in the data", "train/empty: class without pictures", "train/cat/cut.jpg: unreadable",
                 "train/dog/text.png: ", "train/dog/nothing.png: ", "gone.png: no such picture",
                 "val/horse: class is not in train", "train/dog: class is not in val",
                 "train/empty: class is not in val"):  # fmt: skip
        assert part in text, (part, text)
    with pytest.raises(DataError) as caught:
        data.open_data(tmp_path, tolerant=True)
    assert "4 faults" in str(caught.value) and "cut.jpg" not in str(caught.value)


def test_too_large_is_found_before_training(tmp_path, monkeypatch):
    """By the same limit that decoding has, with any check."""
    monkeypatch.setattr(Image, "MAX_IMAGE_PIXELS", 60 * 48 - 1)
    (tmp_path / "val" / "a").mkdir(parents=True)
    smooth().save(tmp_path / "val" / "a" / "bomb.jpg")
    smooth(20, 20).save(tmp_path / "val" / "a" / "small.jpg")
    with pytest.raises(ValueError) as decoding:
        vision.decode_image(tmp_path / "val" / "a" / "bomb.jpg")
    for check in folder.CHECKS:
        with pytest.raises(DataError, match="1 fault ") as caught:
            data.open_data(tmp_path, check=check)
        assert str(decoding.value) in str(caught.value) and "bomb.jpg: refused, 60x48 are more" in str(caught.value)
    monkeypatch.undo()


def test_names_of_classes_in_either_unicode_form(tmp_path):
    """Some file systems and archivers spell "ü" as "u" and a combining mark; it looks the same."""
    composed, decomposed = "gr\u00fcn", "gru\u0308n"
    for name in (f"train/{composed}", f"val/{decomposed}", "train/gz", "val/gz"):
        (tmp_path / name).mkdir(parents=True)
        smooth().save(tmp_path / name / "x.jpg")
    splits = data.open_data(tmp_path)
    assert splits["train"].classes == splits["val"].classes == [*sorted([composed, "gz"])]
    assert [os.path.isfile(path) for path in splits["val"].paths] == [True, True]
    assert f"/{decomposed}/" in splits["val"].paths[splits["val"].labels.tolist().index(0 if composed < "gz" else 1)]
    (tmp_path / "val" / composed).mkdir()
    smooth().save(tmp_path / "val" / composed / "x.jpg")
    with pytest.raises(DataError, match="two folders of this name"):
        data.open_data(tmp_path)


def test_other_files_are_counted(tmp_path, capsys):
    for name in ("train/a", "train/b"):
        (tmp_path / name).mkdir(parents=True)
        smooth().save(tmp_path / name / "x.jpg")
    for name in ("train/a/1.heic", "train/a/2.HEIC", "train/b/notes.txt", "train/b/README", "train/b/.DS_Store"):
        (tmp_path / name).touch()
    prepare.main(["--data_dir", str(tmp_path)])
    line = "train: 4 other files passed over: 2 of .heic, 1 of .txt, 1 of no suffix (read are .jpg"
    assert line in capsys.readouterr().out
    (tmp_path / "train" / "b" / "x.jpg").unlink()
    with pytest.raises(DataError, match=r"train/b: class without pictures \(but 1 of \.txt, 1 of no suffix\)"):
        data.open_data(tmp_path)


def test_layout_errors(tmp_path):
    with pytest.raises(DataError, match="no such data folder"):
        data.open_data(tmp_path / "gone")
    with pytest.raises(DataError, match="holds neither a folder train nor val"):
        data.open_data(tmp_path)
    (tmp_path / "train").mkdir()
    with pytest.raises(DataError, match="train: holds no class folders"):
        data.open_data(tmp_path)
    with pytest.raises(ValueError, match="check 'all'"):
        data.open_data(tmp_path, check="all")


def test_names_links_and_hidden_files(tmp_path):
    (tmp_path / "elsewhere" / "deep").mkdir(parents=True)
    smooth().save(tmp_path / "elsewhere" / "deep" / "A.PNG")
    (tmp_path / "elsewhere" / ".hidden.jpg").touch()
    (tmp_path / "elsewhere" / "notes.txt").touch()
    (tmp_path / "d" / "validation").mkdir(parents=True)
    (tmp_path / "d" / "validation" / "x").symlink_to(tmp_path / "elsewhere")
    found = data.open_data(tmp_path / "d")
    assert list(found) == ["val"] and found["val"].classes == ["x"] and len(found["val"]) == 1
    assert found["val"].sizes.tolist() == [[60, 48]]
    with pytest.raises(DataError, match="no split 'train', only val"):
        data.build_loader("train", data=found, batch_size=1, image_size=32, train=True)


def test_imagenet_labels():
    labels = folder.imagenet_labels()
    assert (
        len(labels) == 1000
        and labels[0] == "tench"
        and labels[243] == "bull mastiff"
        and labels[999] == "toilet tissue"
    )
