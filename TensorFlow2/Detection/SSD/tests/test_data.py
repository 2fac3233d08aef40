"""TFRecords and the tf.data pipeline, on a small COCO set with pictures of every kind."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
import tensorflow as tf
from PIL import Image

from dlx import coco
from tf_ssd import data, tfrecord

SIZES = [(60, 40), (40, 60), (50, 50), (64, 48), (48, 64), (33, 47), (80, 40)]


def make_coco(folder: Path) -> coco.Annotations:
    """7 pictures: JPEG and PNG, grey, one turned upright by its EXIF, one in CMYK; objects are in their own colour."""
    pictures, images, annotations = folder / "val", [], []
    pictures.mkdir(parents=True)
    generator = np.random.default_rng(0)
    for number, (width, height) in enumerate(SIZES):
        image = np.full((height, width, 3), 20 * number + 20, np.uint8)
        for _ in range((2, 1, 0, 3, 1, 1, 2)[number]):
            left, top = generator.integers(0, width - 20), generator.integers(0, height - 20)
            image[top : top + 15, left : left + 10] = 230
            annotations.append(
                {
                    "id": len(annotations) + 1, "image_id": number + 100, "category_id": 7 if number % 2 else 3,
                    "bbox": [int(left), int(top), 10, 15], "area": 150.0, "iscrowd": int(number == 6),
                }
            )  # fmt: skip
        name = f"{number}.{'png' if number == 3 else 'jpg'}"
        content = Image.fromarray(image)
        if number == 1:
            content = content.convert("L")
        if number == 5:
            content = content.convert("CMYK")
        options = {} if number == 3 else {"quality": 98}
        if number == 4:  # stored lying on its side, with a note to turn it clockwise
            exif = Image.Exif()
            exif[0x0112] = 6
            content, options = content.transpose(Image.Transpose.ROTATE_90), options | {"exif": exif}
        content.save(pictures / name, **options)
        images.append({"id": number + 100, "file_name": name, "width": width, "height": height})
    categories = [{"id": 3, "name": "cup"}, {"id": 7, "name": "fork"}]
    coco.write(folder / "val.json", images=images, annotations=annotations, categories=categories)
    return coco.read(folder / "val.json", pictures)


@pytest.fixture(scope="module")
def annotations(tmp_path_factory) -> coco.Annotations:
    return make_coco(tmp_path_factory.mktemp("coco"))


@pytest.fixture(scope="module")
def records(annotations, tmp_path_factory) -> tfrecord.Records:
    return tfrecord.write(annotations, tmp_path_factory.mktemp("records") / "val", shards=3)


def batches(source: data.Source, **options) -> list[dict[str, np.ndarray]]:
    options = {"batch_size": 2, "train": True, "image_size": 64, "max_objects": 4} | options
    return [{name: value.numpy() for name, value in batch.items()} for batch in data.make_dataset(source, **options)]


# TFRecords


def test_what_was_written_is_what_was_annotated(annotations, records):
    found = records.annotations()
    assert found.files == annotations.files and found.classes == ["cup", "fork"] and found.category_ids == [3, 7]
    for name in ("image_ids", "sizes", "starts", "labels", "areas", "iscrowd", "annotation_ids"):
        np.testing.assert_array_equal(getattr(found, name), getattr(annotations, name), err_msg=name)
    np.testing.assert_allclose(found.boxes, annotations.boxes, atol=1e-4)
    assert len(records.shards) == 3 and records.manifest["objects"] == len(annotations.boxes)


def test_pictures_are_decoded_in_the_frame_of_their_boxes(annotations, records):
    source = data.Source(records)
    dataset = tf.data.Dataset.range(len(records)).map(source.example)
    for number, found in enumerate(dataset):
        expected = np.asarray(annotations.decode(number), np.int64)
        assert np.abs(found["image"].numpy() - expected).max() <= 3, annotations.files[number]
        height, width = expected.shape[:2]
        for box in found["boxes"].numpy():
            top, left, bottom, right = np.round(box * [height, width, height, width]).astype(int)
            assert found["image"].numpy()[top + 4 : bottom - 4, left + 3 : right - 3].min() > 200


def test_files_of_common_kinds_are_kept_as_they_are(annotations, records):
    read = tfrecord.Reader(records)
    kinds = []
    for number in range(len(records)):
        encoded = tfrecord.parse(tf.constant(read(number)))["encoded"].numpy()
        kinds.append(encoded == Path(annotations.picture_path(number)).read_bytes())
    assert kinds == [True, True, True, True, False, False, True]


def test_other_programs_can_read_the_records(records):
    names = []
    for path in records.shards:
        for content in tf.data.TFRecordDataset(path):
            example = tf.train.Example.FromString(content.numpy())
            names.append(example.features.feature["image/filename"].bytes_list.value[0].decode())
            text = example.features.feature["image/object/class/text"].bytes_list.value
            assert set(text) <= {b"cup", b"fork"}
    assert names == records.annotations().files


def test_pictures_without_objects_can_be_left_out(annotations, tmp_path):
    found = tfrecord.write(annotations, tmp_path / "train", keep_empty=False)
    assert found.annotations().files == [annotations.files[row] for row in (0, 1, 3, 4, 5)]


def copy(records: tfrecord.Records, folder: Path) -> Path:
    folder.mkdir()
    for path in records.folder.iterdir():
        (folder / path.name).write_bytes(path.read_bytes())
    return folder


@pytest.mark.parametrize(
    "harm, message",
    [
        (lambda folder: (folder / "manifest.json").unlink(), "no folder of TFRecords"),
        (lambda folder: (folder / "manifest.json").write_text("{}"), "not a manifest"),
        (lambda folder: next(folder.glob("data-00001*")).unlink(), "is missing"),
        (lambda folder: next(folder.glob("data-00002*")).write_bytes(b"short"), "5 bytes, not"),
        (lambda folder: np.save(folder / "index.npy", np.zeros((7, 3), np.int64)), "does not fit data-00000"),
        (lambda folder: np.save(folder / "index.npy", np.zeros((6, 3), np.int64)), "7 examples, index of"),
    ],
)
def test_folders_that_are_not_whole(records, tmp_path, harm, message):
    folder = copy(records, tmp_path / "copy")
    tfrecord.Records.open(folder)
    harm(folder)
    with pytest.raises(ValueError, match=message):
        tfrecord.Records.open(folder)


def test_damage_is_found(records, tmp_path):
    folder = copy(records, tmp_path / "copy")
    path = folder / "data-00001-of-00003.tfrecord"
    content = bytearray(path.read_bytes())
    content[200] ^= 1
    path.write_bytes(content)
    with pytest.raises(ValueError, match="data-00001.*damaged at example 3"):
        tfrecord.Records.open(folder).verify()


def test_writing_is_refused_or_whole(annotations, records, tmp_path):
    with pytest.raises(ValueError, match="is there already"):
        tfrecord.write(annotations, records.folder)
    with pytest.raises(ValueError, match="got 8"):
        tfrecord.write(annotations, tmp_path / "many", shards=8)
    folder = tmp_path / "coco"
    broken = make_coco(folder)
    (folder / "val" / "2.jpg").write_bytes((folder / "val" / "2.jpg").read_bytes()[:200])
    with pytest.raises(ValueError, match="2.jpg"):
        tfrecord.write(broken, tmp_path / "broken")
    assert not (tmp_path / "broken").exists() and not (tmp_path / "many").exists()


# tf.data


def test_an_epoch_without_steps_holds_every_object(annotations, records):
    source = data.Source(records)
    seen = {}
    for batch in batches(source, steps=(), batch_size=1):
        assert batch["image"].shape == (1, 64, 64, 3) and batch["labels"].dtype == np.int32
        seen[int(batch["number"][0])] = batch
    assert sorted(seen) == list(range(7))
    for number, batch in seen.items():
        rows = annotations.rows(number)
        real = annotations.iscrowd[rows] == 0
        width, height = annotations.sizes[number]
        expected = annotations.boxes[rows][real][:, [1, 0, 3, 2]] / [height, width, height, width]
        count = int(real.sum())
        np.testing.assert_allclose(batch["boxes"][0, :count], expected, atol=1e-6)
        np.testing.assert_array_equal(batch["labels"][0], [*annotations.labels[rows][real], *[0] * (4 - count)])
        assert not batch["boxes"][0, count:].any()


@pytest.mark.parametrize("cache", data.CACHES[1:])
def test_caches_and_threads_change_nothing(records, cache):
    expected = batches(data.Source(records), seed=3, workers=1)
    found = batches(data.Source(records, cache), seed=3, workers=4)
    assert len(found) == len(expected) == 3
    for one, other in zip(found, expected, strict=True):
        for name, value in one.items():
            np.testing.assert_array_equal(value, other[name])


def test_epochs_differ_and_can_be_entered_in_the_middle(records):
    source = data.Source(records, "encoded")
    whole = batches(source, seed=3, epoch=2)
    rest = batches(source, seed=3, epoch=2, start_batch=1)
    assert len(rest) == 2 and batches(source, start_batch=3) == []
    for one, other in zip(whole[1:], rest, strict=True):
        for name, value in one.items():
            np.testing.assert_array_equal(value, other[name])
    orders = {tuple(data.order_of(7, seed, epoch)) for seed in (3, 4) for epoch in range(4)}
    assert len(orders) == 8
    # The same example is augmented otherwise in another epoch.
    first = {int(n): image for b in whole for n, image in zip(b["number"], b["image"], strict=True)}
    second = {
        int(n): image
        for b in batches(source, seed=3, epoch=3)
        for n, image in zip(b["number"], b["image"], strict=True)
    }
    both = first.keys() & second.keys()
    assert any(not np.array_equal(first[number], second[number]) for number in both)


def test_evaluation_is_in_order_and_filled_up(annotations, records):
    found = batches(data.Source(records), train=False, batch_size=3)
    assert np.concatenate([batch["number"] for batch in found]).tolist() == [0, 1, 2, 3, 4, 5, 6, -1, -1]
    assert {batch["image"].shape for batch in found} == {(3, 64, 64, 3)} and found[0].keys() == {"image", "number"}
    expected = tf.image.resize(np.asarray(annotations.decode(3)), (64, 64))
    np.testing.assert_allclose(found[1]["image"][0], expected, atol=1e-3)


def test_objects_beyond_the_limit_and_without_area():
    boxes = tf.constant([[0.1, 0.1, 0.1, 0.5], [0.2, 0.2, 0.4, 0.4], [0.3, 0.3, 0.5, 0.5], [0.4, 0.4, 0.6, 0.6]])
    found, labels = data.padded(boxes, tf.constant([1, 2, 3, 4], tf.int64), 2)
    np.testing.assert_array_equal(labels, [2, 3])
    np.testing.assert_array_equal(found, boxes[1:3])


@pytest.mark.parametrize(
    "options, message",
    [({"batch_size": 8}, "1 to the 7 examples, got 8"), ({"start_batch": 4}, "0 to 3, got 4")],
)
def test_wrong_options(records, options, message):
    with pytest.raises(ValueError, match=message):
        batches(data.Source(records), **options)


def test_wrong_cache(records):
    with pytest.raises(ValueError, match="'disk' is none of none, encoded, decoded"):
        data.Source(records, "disk")


def test_a_picture_of_another_size_than_recorded():
    content = tf.io.encode_png(np.zeros((4, 5, 3), np.uint8))
    found = {"encoded": content, "height": tf.constant(4), "width": tf.constant(6), "filename": tf.constant("a.png")}
    with pytest.raises(tf.errors.InvalidArgumentError, match="a.png"):
        data.decode(found)


def test_manifest_is_readable(records):
    content = json.loads((records.folder / "manifest.json").read_text())
    assert [shard["examples"] for shard in content["shards"]] == [3, 2, 2]
    assert len(content["source"]["sha256"]) == 64
