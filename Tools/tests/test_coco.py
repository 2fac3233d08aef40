"""Reading and validating COCO JSON: cases O10 to O13, every kind of fault, EXIF, order, size, writing."""

from __future__ import annotations

import json
import time

import numpy as np
import pytest
from PIL import Image

from dlx import coco

NAMES = {3: "cup", 17: "cat", 44: "owl"}


@pytest.fixture(autouse=True)
def own_home(tmp_path, monkeypatch):
    monkeypatch.setenv("DLX_HOME", str(tmp_path / "home"))


def content(count: int = 3, width: int = 64, height: int = 48) -> dict:
    """`count` pictures with 0, 1, 2, 0 ... objects."""
    images, annotations = [], []
    for number in range(count):
        images.append({"id": 100 + number, "file_name": f"{number}.jpg", "width": width, "height": height})
        for row in range(number % 3):
            box = [4.5 + row, 6, 20, 10.25]
            annotations.append(
                {"id": len(annotations) + 1, "image_id": 100 + number, "category_id": [44, 3][row], "bbox": box,
                 "area": 150.5, "iscrowd": row}
            )  # fmt: skip
    categories = [{"id": number, "name": name} for number, name in reversed(NAMES.items())]
    return {"images": images, "annotations": annotations, "categories": categories}


def write(folder, values: dict, pictures: bool = True):
    pictures_folder = folder / "pictures"
    pictures_folder.mkdir(exist_ok=True)
    for image in values["images"] if pictures else ():
        Image.new("RGB", (image["width"], image["height"]), (9, 9, 9)).save(pictures_folder / image["file_name"])
    path = folder / "list.json"
    path.write_text(values if isinstance(values, str) else json.dumps(values))
    return path, pictures_folder


def test_arrays(tmp_path):
    values = content(6)
    values["annotations"].reverse()  # the order of a file says nothing
    read = coco.read(*write(tmp_path, values))
    assert read.classes == ["cup", "cat", "owl"] and read.category_ids == [3, 17, 44]  # O12: ids are kept
    assert read.files == [f"{n}.jpg" for n in range(6)] and read.image_ids.tolist() == list(range(100, 106))
    assert read.starts.tolist() == [0, 0, 1, 3, 3, 4, 6]  # O10: none, one, several
    assert read.boxes.dtype == np.float64 and read.boxes[0].tolist() == [4.5, 6, 24.5, 16.25]
    second = read.rows(2)
    assert sorted(read.labels[second].tolist()) == [1, 3] and sorted(read.iscrowd[second].tolist()) == [False, True]
    assert (read.areas == 150.5).all() and sorted(read.annotation_ids.tolist()) == list(range(1, 7))
    assert read.sizes.tolist() == [[64, 48]] * 6 and read.counts == {} and read.skipped == []
    assert read.decode(1).size == (64, 48)


def test_subset(tmp_path):
    read = coco.read(*write(tmp_path, content(6)))
    part = read.subset([5, 0, 1])
    assert part.files == ["5.jpg", "0.jpg", "1.jpg"] and part.starts.tolist() == [0, 2, 2, 3]
    assert part.annotation_ids.tolist() == [*read.annotation_ids[read.rows(5)], *read.annotation_ids[read.rows(1)]]
    assert len(read.subset([])) == 0


def breakages() -> dict:
    """Kind of fault: (words of its line, how it comes about, pictures and boxes that are left of 3 and 3)."""
    nan, inf = float("nan"), float("inf")

    def box(*values):
        return lambda v: v["annotations"][1].update(bbox=list(values))

    return {
        "box not finite": ("annotation 2: box .* NaN", box(nan, 1, 5, 5), (3, 2)),
        "box not finite ": ("annotation 2: box", box(1, 1, inf, 5), (3, 2)),
        "empty box": (r"annotation 2: empty box \[1, 1, 0, 5\]", box(1, 1, 0, 5), (3, 2)),
        "inverted box": ("annotation 2: inverted box", box(20, 1, -5, 5), (3, 2)),
        "box outside the picture": ("annotation 2: .*reaches 16.0 pixels out of 2.jpg", box(60, 1, 20, 5), (3, 3)),
        "box outside the picture ": ("annotation 2: .*lies outside 2.jpg", box(70, 1, 20, 5), (3, 2)),
        "wrong type": ("annotation 2: 'bbox' must be 4 numbers", box(1, 1, "5", 5), (3, 2)),
        "wrong type ": ("annotation 2: 'bbox' must be 4 numbers", box(1, 1, 5), (3, 2)),
        "wrong type  ": ("annotations\\[1\\]: needs", lambda v: v["annotations"].__setitem__(1, [1]), (3, 2)),
        "wrong type   ": ("images\\[2\\]: image 102.*'width'", lambda v: v["images"][2].update(width="64"), (2, 1)),
        "wrong type    ": ("images\\[2\\]: needs", lambda v: v["images"][2].update(id=True), (2, 1)),
        "wrong type     ": ("'iscrowd' 0 or 1", lambda v: v["annotations"][1].update(iscrowd="no"), (3, 2)),
        "unknown category": ("annotation 2: category 5 ", lambda v: v["annotations"][1].update(category_id=5), (3, 2)),
        "unknown image": ("annotation 2: image 7 ", lambda v: v["annotations"][1].update(image_id=7), (3, 2)),
        "duplicate annotation id": ("annotation 1: the id", lambda v: v["annotations"][1].update(id=1), (3, 2)),
        "duplicate image id": ("image id 101 is there twice", lambda v: v["images"][0].update(id=101), (1, 2)),
        "duplicate image id ": ("id 101 is there", lambda v: v["images"].append(dict(v["images"][1])), (3, 3)),
        "duplicate file": ("the file 1.jpg is there twice", lambda v: v["images"][0].update(file_name="1.jpg"), (2, 2)),
        "duplicate category id": ("id 17 is", lambda v: v["categories"].append({"id": 17, "name": "x"}), (3, 3)),
        "duplicate category name": ("'cat' is", lambda v: v["categories"].append({"id": 18, "name": "cat"}), (3, 3)),
        "missing file": ("102: .*x.jpg: no such picture", lambda v: v["images"][2].update(file_name="x.jpg"), (2, 1)),
        "unsafe name": ("leads out", lambda v: v["images"][2].update(file_name="../2.jpg"), (2, 1)),
        "wrong size": ("JSON says 65x48, the file is 64x48", lambda v: v["images"][2].update(width=65), (2, 1)),
    }  # fmt: skip


@pytest.mark.parametrize("kind", breakages())
def test_every_fault_is_named_or_left_out(tmp_path, kind):
    words, damage, (pictures, boxes) = breakages()[kind]
    values = content()
    path, folder = write(tmp_path, values)
    damage(values)
    path.write_text(json.dumps(values))
    kind = kind.strip()
    with pytest.raises(ValueError, match=words) as caught:
        coco.read(path, folder)
    assert f"1 x {kind}" in str(caught.value) and str(path) in str(caught.value)
    read = coco.read(path, folder, tolerant=True)
    assert read.counts[kind] == 1
    assert (len(read), len(read.boxes)) == (pictures, boxes)
    assert np.isfinite(read.boxes).all() and (read.boxes[:, 2:] > read.boxes[:, :2]).all()
    assert (read.boxes <= np.repeat([[64, 48]], 2, 0).ravel()[[0, 1, 0, 1]]).all()


def test_one_report_of_everything_first_twenty_shown(tmp_path):
    values = content(60)
    path, folder = write(tmp_path, values)
    for annotation in values["annotations"][:30]:
        annotation["bbox"][2] = 0
    (folder / "4.jpg").unlink()
    path.write_text(json.dumps(values))
    with pytest.raises(ValueError) as caught:
        coco.read(path, folder)
    text = str(caught.value)
    assert "31 faults (30 x empty box, 1 x missing file)" in text and "... and 11 more" in text
    assert "4.jpg" in text and text.count("\n") < 25


def test_bad_files_o13(tmp_path):
    """One truncated JPEG and one missing file among eight."""
    values = content(8)
    path, folder = write(tmp_path, values)
    noise = np.random.default_rng(0).integers(0, 256, (48, 64, 3), dtype=np.uint8)
    Image.fromarray(noise).save(folder / "2.jpg")
    (folder / "2.jpg").write_bytes((folder / "2.jpg").read_bytes()[:-900])
    (folder / "5.jpg").unlink()
    with pytest.raises(ValueError) as caught:
        coco.read(path, folder)
    assert str(folder / "2.jpg") in str(caught.value) and str(folder / "5.jpg") in str(caught.value)
    read = coco.read(path, folder, tolerant=True)
    assert len(read) == 6 and [name.rsplit("/", 1)[1] for name, _ in read.skipped] == ["2.jpg", "5.jpg"]
    assert read.counts == {"unreadable picture": 1, "missing file": 1}
    assert 105 not in read.image_ids and len(read.boxes) == 7 - 2 - 2


def test_a_box_just_over_the_edge_is_cut(tmp_path):
    """O11: (0.92, 0.38, 1.0016, 0.58) of 640 x 480."""
    values = content(2, 640, 480)
    values["annotations"][0]["bbox"] = [0.92 * 640, 0.38 * 480, (1.0016 - 0.92) * 640, 0.2 * 480]
    read = coco.read(*write(tmp_path, values))
    assert read.boxes[0, 2] / 640 == 1.0 and read.counts == {"box cut at the edge": 1}
    assert read.boxes[0, 0] == pytest.approx(0.92 * 640)


@pytest.mark.parametrize(
    "text, words",
    [
        ("{", "not JSON"),
        ("[]", "holds a list"),
        ("{}", "'images' must be a list, found nothing"),
        ('{"images": {}, "annotations": [], "categories": []}', "'images' must be a list, found dict"),
        ('{"images": [], "annotations": [], "categories": []}', "no valid category"),
        ('{"images": [], "annotations": [], "categories": [{"id": 1, "name": "a"}]}', "holds no pictures"),
        ("\xff\xfe", "not JSON|cannot be read"),
        ("[" * 100000, "cannot be read|not JSON"),
    ],
)
def test_other_files_are_refused(tmp_path, text, words):
    (tmp_path / "list.json").write_bytes(text.encode("latin-1"))
    with pytest.raises(ValueError, match=words) as caught:
        coco.read(tmp_path / "list.json", tmp_path, tolerant=True)
    assert "list.json" in str(caught.value)


def test_missing_paths(tmp_path):
    with pytest.raises(ValueError, match="no such annotation file"):
        coco.read(tmp_path / "x.json", tmp_path)
    path, _ = write(tmp_path, content())
    with pytest.raises(ValueError, match="no such folder"):
        coco.read(path, tmp_path / "nowhere")
    with pytest.raises(ValueError, match="its categories are cup, cat, owl, not cat, cup"):
        coco.read(path, tmp_path / "pictures", classes=["cat", "cup"])


def turned(folder, orientation: int, size: tuple[int, int] = (64, 48)) -> None:
    """A stored picture whose left edge is white, with an EXIF orientation."""
    pixels = np.zeros((size[1], size[0], 3), np.uint8)
    pixels[:, :8] = 255
    exif = Image.Exif()
    exif[0x0112] = orientation
    Image.fromarray(pixels).save(folder / "0.jpg", exif=exif, quality=95)


@pytest.mark.parametrize("orientation", range(1, 9))
@pytest.mark.parametrize("exif", coco.EXIF)
def test_exif_orientation(tmp_path, orientation, exif):
    """The JSON's size tells which frame boxes refer to; where it cannot, the reader must be told."""
    path, folder = write(tmp_path, content(1))
    turned(folder, orientation)
    quarter = orientation >= 5
    stored, upright = content(1), content(1, 48, 64) if quarter else content(1)
    for frame, values in {"stored": stored, "upright": upright}.items():
        path.write_text(json.dumps(values))
        ambiguous = exif == "auto" and orientation in (2, 3, 4)
        contradicts = quarter and exif not in ("auto", frame)
        if ambiguous or contradicts:
            with pytest.raises(ValueError, match="ambiguous orientation" if ambiguous else "wrong size"):
                coco.read(path, folder, exif=exif)
            continue
        read = coco.read(path, folder, exif=exif)
        pixels = np.asarray(read.decode(0).convert("L")).astype(int)
        assert pixels.shape == (values["images"][0]["height"], values["images"][0]["width"])
        as_stored = exif == "stored" or (exif == "auto" and frame == "stored")
        edges = [pixels[:, 2].mean(), pixels[:, -3].mean(), pixels[2].mean(), pixels[-3].mean()]
        side = 0 if as_stored else {1: 0, 2: 1, 3: 1, 4: 0, 5: 2, 6: 2, 7: 3, 8: 3}[orientation]
        assert int(np.argmax(edges)) == side
        assert read.turned[0] == (orientation != 1 and not as_stored)


def test_a_square_turned_picture_is_ambiguous(tmp_path):
    path, folder = write(tmp_path, content(1, 64, 64))
    turned(folder, 6, (64, 64))
    with pytest.raises(ValueError, match="exif 'upright' or 'stored'"):
        coco.read(path, folder)
    assert coco.read(path, folder, exif="stored").orientations.tolist() == [6]


def test_find_splits(tmp_path):
    (tmp_path / "annotations").mkdir()
    with pytest.raises(ValueError, match="holds no annotations"):
        coco.find_splits(tmp_path)
    (tmp_path / "annotations" / "instances_train2017.json").touch()
    with pytest.raises(ValueError, match="folder of pictures is missing"):
        coco.find_splits(tmp_path)
    (tmp_path / "train2017").mkdir()
    (tmp_path / "annotations" / "instances_val.json").touch()
    (tmp_path / "images" / "val").mkdir(parents=True)
    found = coco.find_splits(tmp_path)
    assert found["train"][1] == tmp_path / "train2017" and found["val"][1] == tmp_path / "images" / "val"
    (tmp_path / "annotations" / "instances_val2017.json").touch()
    with pytest.raises(ValueError, match="several files for val"):
        coco.find_splits(tmp_path)


def test_write_then_read(tmp_path):
    values = content(4)
    path, folder = write(tmp_path, values)
    before = coco.read(path, folder)
    coco.write(tmp_path / "again.json", **values)
    after = coco.read(tmp_path / "again.json", folder)
    assert np.array_equal(before.boxes, after.boxes) and np.array_equal(before.labels, after.labels)
    values["annotations"][0]["bbox"][0] = float("nan")
    with pytest.raises(ValueError, match="again.json: not written"):
        coco.write(tmp_path / "again.json", **values)
    assert len(coco.read(tmp_path / "again.json", folder).boxes) == len(before.boxes)


def test_large_files_are_read_in_seconds(tmp_path, monkeypatch):
    """200,000 boxes of 20,000 pictures; headers apart, well under a tenth of a second for each thousand pictures."""
    count = 20000
    images = [{"id": n, "file_name": f"{n}.jpg", "width": 640, "height": 480} for n in range(count)]
    annotations = [
        {"id": n, "image_id": n // 10, "category_id": 17, "bbox": [n % 100, 5.5, 30, 40]} for n in range(count * 10)
    ]
    path, folder = write(tmp_path, content() | {"images": images, "annotations": annotations}, pictures=False)
    looks = np.tile(np.array([[640, 480, 1, 1]], np.int32), (count, 1))
    monkeypatch.setattr(coco, "inspect_all", lambda *args: (looks, [""] * count))
    started = time.perf_counter()
    read = coco.read(path, folder)
    assert time.perf_counter() - started < 20
    assert len(read.boxes) == count * 10 and read.starts[-1] == count * 10
    assert read.boxes.nbytes + read.labels.nbytes + read.areas.nbytes < 10e6
