"""RecordIO files: read by MXNet itself, packed with interruptions, and every kind of damage named."""

import io
import os
import struct

import mxnet as mx
import numpy as np
import pytest
from PIL import Image

from dlx import files
from rn50_mxnet import data, packing, prepare, recordio
from rn50_mxnet.recordio import HEADER, MAGIC_BYTES, RecordError


def write(path, payloads, index=True):
    """A .rec file of these payloads with its index."""
    content, lines = b"", []
    for number, payload in enumerate(payloads):
        lines.append(f"{number}\t{len(content)}\n")
        content += recordio.encode_record(payload)
    path.write_bytes(content)
    if index:
        recordio.index_path(path).write_text("".join(lines))
    return path


def picture(label, number=0, size=(8, 8)):
    pixels = np.random.default_rng(number).integers(0, 256, (*size, 3), np.uint8)
    return recordio.encode_picture(label, number, packing.encode_array(pixels))


@pytest.fixture
def good(tmp_path):
    return write(tmp_path / "train.rec", [picture(label % 3, label) for label in range(9)])


def test_records_are_what_mxnet_reads_and_writes(tmp_path):
    """Also with the magic number inside a payload, at a multiple of four or beside it, in a row and at the end."""
    payloads = [
        b"", b"a", b"abcdefgh", MAGIC_BYTES, MAGIC_BYTES * 3, b"abcd" + MAGIC_BYTES + b"x", b"abc" + MAGIC_BYTES,
        b"abcd" * 9 + MAGIC_BYTES, os.urandom(1001),
    ]  # fmt: skip
    path = write(tmp_path / "ours.rec", payloads)
    reader = mx.recordio.MXIndexedRecordIO(str(tmp_path / "ours.idx"), str(path), "r")
    assert [reader.read_idx(i) or b"" for i in range(len(payloads))] == payloads
    writer = mx.recordio.MXRecordIO(str(tmp_path / "theirs.rec"), "w")
    for payload in payloads:
        writer.write(payload)
    writer.close()
    assert (tmp_path / "theirs.rec").read_bytes() == path.read_bytes()
    assert [payload for _, _, payload in recordio.read_records(path)] == payloads


def test_headers_are_mxnets():
    header = mx.recordio.IRHeader(0, 7.0, 12, 0)
    assert recordio.encode_picture(7, 12, b"picture") == mx.recordio.pack(header, b"picture")
    labels, number, rest = recordio.decode_picture(mx.recordio.pack(mx.recordio.IRHeader(2, [1.0, 2.0], 5, 0), b"xy"))
    assert labels.tolist() == [1.0, 2.0] and number == 5 and rest == b"xy"
    with pytest.raises(ValueError, match="3 labels, the record has 24 bytes"):
        recordio.decode_picture(HEADER.pack(3, 0, 0, 0))


def test_a_good_file_passes(good):
    assert recordio.check(good, 3).labels.tolist() == [0, 1, 2] * 3


@pytest.mark.parametrize("cut", [1, 5, 40])
def test_a_truncated_file(good, cut):
    good.write_bytes(good.read_bytes()[:-cut])
    with pytest.raises(RecordError, match=r"train.rec: record 8 at byte \d+: the file is cut short"):
        recordio.check(good, 3)


def test_damage_in_the_middle(good):
    content = bytearray(good.read_bytes())
    offset = recordio.read_index(recordio.index_path(good))[4]
    content[offset] ^= 0xFF
    good.write_bytes(content)
    with pytest.raises(RecordError, match=f"record 4 at byte {offset}: magic number"):
        recordio.check(good, 3)


def test_a_wrong_label_width(tmp_path):
    wide = HEADER.pack(2, 0, 0, 0) + struct.pack("<2f", 0, 1) + b"x"
    path = write(tmp_path / "train.rec", [picture(0), wide])
    with pytest.raises(RecordError, match="record 1 at byte .* label width 2; a classifier's pictures have one"):
        recordio.check(path, 2)
    single = HEADER.pack(1, 0, 0, 0) + struct.pack("<f", 1) + b"x"  # im2rec --pack-label writes one label so
    assert recordio.check(write(path, [picture(0), single]), 2).labels.tolist() == [0, 1]
    with pytest.raises(RecordError, match="speaks of a label that is not there"):
        recordio.check(write(path, [HEADER.pack(1, 0, 0, 0)]), 2)


@pytest.mark.parametrize(
    ("labels", "classes", "message"),
    [
        ([0, 1, 2], 2, "label 2 is none of 0 ... 1"),
        ([0, 1, 1], 3, "3 classes expected, and of class 2 there is no picture"),
        ([0, 0.5], 2, "label 0.5 is none"),
        ([0, -1], 2, "label -1 is none"),
        ([0, float("nan")], 2, "label nan is none"),
    ],
)
def test_a_wrong_class_count(tmp_path, labels, classes, message):
    path = write(tmp_path / "train.rec", [HEADER.pack(0, label, 0, 0) + b"x" for label in labels])
    with pytest.raises(RecordError, match=message):
        recordio.check(path, classes)


def test_an_empty_split(tmp_path):
    with pytest.raises(RecordError, match="val.rec: this split is empty"):
        recordio.check(write(tmp_path / "val.rec", []), 3)
    with pytest.raises(RecordError, match="nothing.rec: no such file; `prepare` makes it"):
        recordio.check(tmp_path / "nothing.rec", 3)


def test_an_index_that_does_not_fit(good):
    index = recordio.index_path(good)
    lines = index.read_text().splitlines()
    index.write_text("\n".join(lines[:-1]) + "\n")
    with pytest.raises(RecordError, match="train.idx: does not fit train.rec: it lists 8 records, the file has 9"):
        recordio.check(good, 3)
    index.write_text("\n".join([*lines[:-1], "8\t4"]) + "\n")
    with pytest.raises(RecordError, match="no record at 4"):
        recordio.check(good, 3)
    index.write_text("0 0\n")
    with pytest.raises(RecordError, match="line 1: '0 0' is not"):
        recordio.check(good, 3)
    index.unlink()
    with pytest.raises(RecordError, match="train.idx: no such file"):
        recordio.check(good, 3)


def make_pictures(folder, count=6):
    for split in ("train", "val"):
        for label, name in enumerate(("ant", "bee")):
            (folder / split / name).mkdir(parents=True)
            for number in range(count):
                pixels = np.random.default_rng([label, number]).integers(0, 256, (20, 30, 3), np.uint8)
                Image.fromarray(pixels).save(folder / split / name / f"{number}.jpg")
    return folder


def test_prepare_packs_shuffled_and_counts_corrupt_pictures(tmp_path, capsys):
    pictures = make_pictures(tmp_path / "pictures")
    broken = pictures / "train" / "bee" / "3.jpg"
    broken.write_bytes(broken.read_bytes()[:200])
    (pictures / "train" / "ant" / "text.png").write_text("no picture")
    dataset = prepare.main(["--pictures", str(pictures), "--data_dir", str(tmp_path / "records")])
    assert dataset.counts == {"train": 11, "val": 12} and dataset.skipped == {"train": 2, "val": 0}
    assert "2 corrupt ones left out" in capsys.readouterr().out
    found = [recordio.decode_picture(p) for _, _, p in recordio.read_records(dataset.path("train"))]
    labels = [int(label[0]) for label, _, _ in found]
    assert sorted(labels) == [0] * 6 + [1] * 5 and labels != sorted(labels)
    originals = {path.read_bytes(): path.parent.name for path in (pictures / "train").rglob("*.jpg")}
    assert [originals[content] for _, _, content in found] == [dataset.classes[label] for label in labels]


def test_packing_goes_on_where_it_was_killed(tmp_path):
    """At any picture, with half a record and half a line behind the last whole ones, to the same bytes."""
    items = [
        packing.Item(str(i), i % 2, lambda i=i: packing.encode_array(np.full((4, 4 + i), i, np.uint8)))
        for i in range(9)
    ]
    items[4] = packing.Item("4", 0, lambda: packing.encode_file(tmp_path / "missing.jpg", None, 95))
    whole = packing.pack(items, tmp_path / "whole.rec", seed=3, settings={})
    assert whole.records == 8 and [name for name, _ in whole.skipped] == ["4"]
    for stop in range(1, 9):
        target = tmp_path / f"part{stop}.rec"
        assert packing.pack(items, target, seed=3, settings={}, stop_after=stop) is None
        assert not target.exists()
        with open(target.with_suffix(".rec.partial"), "ab") as stream:
            stream.write(MAGIC_BYTES + b"half")
        with open(target.with_suffix(".journal"), "a") as stream:
            stream.write('{"place": ')
        again = packing.pack(items, target, seed=3, settings={})
        assert again == whole
        assert target.read_bytes() == (tmp_path / "whole.rec").read_bytes()
        assert recordio.index_path(target).read_text() == (tmp_path / "whole.idx").read_text()
        # A finished split waits for the others with its journal, and is not packed again.
        unread = [packing.Item(item.name, item.label, lambda: 1 / 0) for item in items]
        assert packing.pack(unread, target, seed=3, settings={}) == whole


def test_a_kill_in_the_second_split_does_not_cost_the_first(tmp_path, monkeypatch):
    reads = []
    splits = {
        name: [
            packing.Item(
                f"{name}{i}", i % 2, lambda i=i: reads.append(i) or packing.encode_array(np.zeros((4, 4), np.uint8))
            )
            for i in range(4)
        ]
        for name in ("train", "val")
    }
    pack = packing.pack
    monkeypatch.setattr(
        packing, "pack", lambda items, target, **k: 1 / 0 if target.stem == "val" else pack(items, target, **k)
    )
    with pytest.raises(ZeroDivisionError):
        packing.make(tmp_path, ["a", "b"], splits, 1, 1, {})
    monkeypatch.undo()
    assert packing.make(tmp_path, ["a", "b"], splits, 1, 1, {}).counts == {"train": 4, "val": 4}
    assert len(reads) == 8
    assert not list(tmp_path.glob("*.journal"))


def test_a_picture_that_was_replaced_is_packed_again(tmp_path):
    pictures = make_pictures(tmp_path / "p", 1)
    bee = pictures / "train" / "bee" / "0.jpg"
    good = bee.read_bytes()
    bee.write_bytes(good[:100])
    words = ["--pictures", str(pictures), "--data_dir", str(tmp_path / "r")]
    with pytest.raises(ValueError, match="of class 1 there is no picture"):
        prepare.main(words)
    bee.write_bytes(good)
    assert prepare.main(words).counts == {"train": 2, "val": 2}
    with files.lock(tmp_path / "r" / ".lock"), pytest.raises(TimeoutError, match="still locked"):
        prepare.main(words)  # two at once would write into each other's files


def test_packing_begins_again_when_its_input_changed(tmp_path):
    read = []
    items = [packing.Item(str(i), 0, lambda i=i: read.append(i) or bytes([i])) for i in range(5)]
    target = tmp_path / "x.rec"
    packing.pack(items, target, seed=1, settings={"resize": 8}, stop_after=3)
    packing.pack(items, target, seed=1, settings={"resize": 9}, stop_after=1)
    assert len(read) == 4
    packing.pack(items, target, seed=1, settings={"resize": 9})
    assert len(read) == 8 and set(read) == set(range(5))


def test_prepare_refuses(tmp_path):
    pictures = make_pictures(tmp_path / "p", 1)
    (pictures / "val" / "bee" / "0.jpg").unlink()
    with pytest.raises(ValueError, match="val/bee: no picture of this class"):
        prepare.main(["--pictures", str(pictures), "--data_dir", str(tmp_path / "r")])
    (pictures / "val" / "bee").rmdir()
    (pictures / "val" / "cat").mkdir()
    Image.new("RGB", (8, 8)).save(pictures / "val" / "cat" / "x.png")
    with pytest.raises(ValueError, match="different classes; 'bee' is in one only"):
        prepare.main(["--pictures", str(pictures), "--data_dir", str(tmp_path / "r")])
    with pytest.raises(ValueError, match="pictures needs data_dir"):
        prepare.main(["--pictures", str(pictures)])


@pytest.mark.parametrize("mode", ["CMYK", "P", "RGBA", "rotated"])
def test_what_mxnet_would_see_otherwise_is_decoded_before(tmp_path, mode):
    from dlx import vision

    coarse = Image.fromarray(np.random.default_rng(0).integers(0, 256, (2, 3, 3), np.uint8))
    image = coarse.resize((48, 32), Image.Resampling.BICUBIC)  # smooth, so that JPEG's losses are small
    path = tmp_path / ("x.jpg" if mode in ("CMYK", "rotated") else "x.png")
    if mode == "rotated":
        exif = Image.Exif()
        exif[0x0112] = 6
        image.save(path, exif=exif, quality=95)
    else:
        image.convert(mode).save(path)
    stored = Image.open(io.BytesIO(packing.encode_file(path, None, 100)))
    expected = np.asarray(vision.decode_image(path), int)
    assert stored.mode == "RGB" and stored.size == expected.shape[1::-1]
    assert np.abs(np.asarray(stored, int) - expected).mean() < 3


def test_a_dataset_whose_file_changed_is_checked_again(tmp_path):
    dataset = prepare.main(["--pictures", str(make_pictures(tmp_path / "p")), "--data_dir", str(tmp_path / "r")])
    path = dataset.path("val")
    path.write_bytes(path.read_bytes()[:-30])
    with pytest.raises(RecordError, match="val.rec: record 11 .* cut short"):
        data.open_dataset(tmp_path / "r")
    (tmp_path / "r" / "dataset.json").write_text("{}")
    with pytest.raises(RecordError, match="not the description of a data set"):
        data.open_dataset(tmp_path / "r")


def test_a_foreign_folder_needs_names_of_its_classes(tmp_path, good):
    with pytest.raises(RecordError, match="classes.txt; run `prepare` first"):
        data.open_dataset(tmp_path)
    (tmp_path / "classes.txt").write_text("ant\nbee\ncat\n")
    assert data.open_dataset(tmp_path).counts == {"train": 9}
    (tmp_path / "classes.txt").write_text("ant\nbee\n")
    with pytest.raises(RecordError, match="label 2 is none of 0 ... 1"):
        data.open_dataset(tmp_path)
