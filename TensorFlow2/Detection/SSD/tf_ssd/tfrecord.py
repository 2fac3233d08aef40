"""COCO data as TFRecords: written from a validated JSON file, read in any order.

    write(coco.read("instances_train2017.json", "train2017"), "/data/coco-records/train", shards=64)
    records = Records.open("/data/coco-records/train")

A folder per split: `data-00000-of-00064.tfrecord` ..., `index.npy` (where each example lies) and `manifest.json`. The
examples have the names of the TensorFlow Object Detection API (image/encoded, image/object/bbox/ymin ...), so that
other programs read them too. JPEG and PNG files go in as they are; others, and turned ones, as PNG.
"""

from __future__ import annotations

import io
import json
import os
import struct
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import tensorflow as tf
from PIL import Image

from dlx.coco import Annotations
from dlx.files import atomic_path, sha256

FORMAT = 1
MANIFEST, INDEX = "manifest.json", "index.npy"
KEYS = {"format", "source", "classes", "category_ids", "examples", "objects", "shards"}
# A record is its length (8 bytes), a checksum of that (4), the bytes, and a checksum of them (4).
HEAD, FOOT = 12, 4
EDGES = ("ymin", "xmin", "ymax", "xmax")


def write(
    annotations: Annotations, folder: str | os.PathLike[str], shards: int = 1, keep_empty: bool = True
) -> Records:
    """Write a split into `folder`, which must not be there, whole or not at all; what is written is read back.

    Examples follow the order of `annotations`, the first ones in the first shard. Without `keep_empty` pictures that
    have no object but crowds are left out. ValueError: a folder that is there, fewer pictures than shards, and all
    that decoding finds.
    """
    folder = Path(folder).expanduser().absolute()
    if folder.exists():
        raise ValueError(f"{folder}: is there already")
    rows = np.arange(len(annotations))
    if not keep_empty:
        rows = rows[[bool((annotations.iscrowd[annotations.rows(row)] == 0).any()) for row in rows]]
    if not 1 <= shards <= len(rows):
        raise ValueError(f"shards must be 1 to the {len(rows)} pictures, got {shards}")
    manifest: dict[str, Any] = {
        "format": FORMAT, "source": {"file": annotations.path.name, "sha256": sha256(annotations.path)},
        "classes": annotations.classes, "category_ids": [int(number) for number in annotations.category_ids],
        "examples": len(rows), "objects": 0, "shards": [],
    }  # fmt: skip
    folder.parent.mkdir(parents=True, exist_ok=True)
    with atomic_path(folder) as temporary:
        temporary.mkdir()
        index = []
        for shard, part in enumerate(np.array_split(rows, shards)):
            name, offset = f"data-{shard:05d}-of-{shards:05d}.tfrecord", 0
            with tf.io.TFRecordWriter(str(temporary / name)) as writer:
                for row in part:
                    content = to_example(annotations, int(row)).SerializeToString()
                    writer.write(content)
                    index.append((shard, offset, len(content)))
                    offset += HEAD + len(content) + FOOT
                    manifest["objects"] += len(annotations.labels[annotations.rows(row)])
            manifest["shards"].append({"file": name, "bytes": offset, "examples": len(part)})
        np.save(temporary / INDEX, np.array(index, np.int64))
        (temporary / MANIFEST).write_text(json.dumps(manifest, indent=1, ensure_ascii=False) + "\n")
        Records.open(temporary).verify()
    return Records.open(folder)


def to_example(annotations: Annotations, row: int) -> tf.train.Example:
    """Picture `row` and its objects. Boxes become fractions of the picture."""
    width, height = (int(side) for side in annotations.sizes[row])
    objects = annotations.rows(row)
    left, top, right, bottom = annotations.boxes[objects].T
    encoded, kind = _encoded(annotations, row)
    labels = annotations.labels[objects]
    names = [annotations.classes[label - 1].encode() for label in labels]
    floats = {"ymin": top / height, "xmin": left / width, "ymax": bottom / height, "xmax": right / width}
    features = {
        "image/height": _integers([height]),
        "image/width": _integers([width]),
        "image/filename": _bytes([annotations.files[row].encode()]),
        "image/source_id": _bytes([str(int(annotations.image_ids[row])).encode()]),
        "image/encoded": _bytes([encoded]),
        "image/format": _bytes([kind]),
        "image/object/class/label": _integers(labels),
        "image/object/class/text": _bytes(names),
        "image/object/is_crowd": _integers(annotations.iscrowd[objects]),
        "image/object/area": _floats(annotations.areas[objects]),
        "image/object/id": _integers(annotations.annotation_ids[objects]),
    } | {f"image/object/bbox/{name}": _floats(values) for name, values in floats.items()}
    return tf.train.Example(features=tf.train.Features(feature=features))


def _encoded(annotations: Annotations, row: int) -> tuple[bytes, bytes]:
    """A picture's file as it is where TensorFlow's decoder gives the frame that the boxes refer to, else a PNG."""
    image = annotations.decode(row)  # which also says that it is whole, and of the right size
    path = annotations.picture_path(row)
    with Image.open(path) as opened:
        kind, mode = opened.format, opened.mode
    if kind in ("JPEG", "PNG") and mode in ("RGB", "L") and not annotations.turned[row]:
        # TensorFlow does not look at the orientation that a file claims, and here the boxes do not either.
        return Path(path).read_bytes(), kind.lower().encode()
    buffer = io.BytesIO()
    image.save(buffer, "PNG")
    return buffer.getvalue(), b"png"


def _bytes(values: Any) -> tf.train.Feature:
    return tf.train.Feature(bytes_list=tf.train.BytesList(value=values))


def _integers(values: Any) -> tf.train.Feature:
    return tf.train.Feature(int64_list=tf.train.Int64List(value=[int(value) for value in values]))


def _floats(values: Any) -> tf.train.Feature:
    return tf.train.Feature(float_list=tf.train.FloatList(value=[float(value) for value in values]))


def _features() -> dict[str, Any]:
    several = {f"image/object/bbox/{name}": tf.float32 for name in EDGES}
    several |= {"image/object/class/label": tf.int64, "image/object/is_crowd": tf.int64}
    several |= {"image/object/area": tf.float32, "image/object/id": tf.int64}
    one = {"image/height": tf.int64, "image/width": tf.int64, "image/encoded": tf.string}
    one |= {"image/source_id": tf.string, "image/filename": tf.string}
    return {name: tf.io.FixedLenFeature([], dtype) for name, dtype in one.items()} | {
        name: tf.io.FixedLenSequenceFeature([], dtype, allow_missing=True) for name, dtype in several.items()
    }


def parse(content: tf.Tensor) -> dict[str, tf.Tensor]:
    """One serialised example: `encoded` (the picture's file), `filename`, `source_id`, `height`, `width`, and for each
    of its objects `boxes` [n, 4] (fractions), `labels` [n] (1 to C), `is_crowd`, `area`, `id` [n]."""
    found = tf.io.parse_single_example(content, _features())
    return {
        "encoded": found["image/encoded"],
        "filename": found["image/filename"],
        "source_id": found["image/source_id"],
        "height": found["image/height"],
        "width": found["image/width"],
        "boxes": tf.stack([found[f"image/object/bbox/{name}"] for name in EDGES], -1),
        "labels": found["image/object/class/label"],
        "is_crowd": found["image/object/is_crowd"],
        "area": found["image/object/area"],
        "id": found["image/object/id"],
    }


@dataclass
class Records:
    """A split's folder. `index` [N, 3] int64: each example's shard, where its record starts and its length in bytes."""

    folder: Path
    manifest: dict[str, Any]
    index: np.ndarray

    @classmethod
    def open(cls, folder: str | os.PathLike[str]) -> Records:
        """Read manifest and index and compare them with the files. ValueError says what does not fit."""
        folder = Path(folder).expanduser().absolute()
        try:
            manifest = json.loads((folder / MANIFEST).read_text(encoding="utf-8"))
            index = np.load(folder / INDEX, allow_pickle=False)
        except (OSError, ValueError) as error:
            raise ValueError(f"{folder}: no folder of TFRecords that this program wrote: {error}") from None
        if not isinstance(manifest, dict) or manifest.keys() != KEYS or manifest["format"] != FORMAT:
            raise ValueError(f"{folder / MANIFEST}: not a manifest of format {FORMAT} with the keys {sorted(KEYS)}")
        counts = [shard["examples"] for shard in manifest["shards"]]
        if index.shape != (manifest["examples"], 3) or sum(counts) != manifest["examples"]:
            raise ValueError(f"{folder}: {manifest['examples']} examples, index of {index.shape}, shards of {counts}")
        for number, shard in enumerate(manifest["shards"]):
            path = folder / shard["file"]
            size = path.stat().st_size if path.is_file() else None
            if size != shard["bytes"]:
                raise ValueError(f"{path}: {'is missing' if size is None else f'{size} bytes'}, not {shard['bytes']}")
            rows = index[index[:, 0] == number]
            if len(rows) != shard["examples"] or (rows[:, 1:].sum(1) + HEAD + FOOT > shard["bytes"]).any():
                raise ValueError(f"{folder / INDEX}: does not fit {shard['file']}")
        return cls(folder, manifest, index)

    def __len__(self) -> int:
        return len(self.index)

    @property
    def classes(self) -> list[str]:
        return list(self.manifest["classes"])

    @property
    def shards(self) -> list[str]:
        return [str(self.folder / shard["file"]) for shard in self.manifest["shards"]]

    def verify(self) -> None:
        """Read everything, with checksums. ValueError names file and example where content and index differ."""
        read, number = Reader(self), 0
        for path in self.shards:
            try:
                for content in tf.data.TFRecordDataset(path):
                    if number >= len(self) or content.numpy() != read(number):
                        raise ValueError(f"{path}: example {number} is not the one in {INDEX}")
                    number += 1
            except tf.errors.DataLossError as error:
                raise ValueError(f"{path}: damaged at example {number}: {error.message}") from None
        if number != len(self):
            raise ValueError(f"{self.folder}: holds {number} examples, not {len(self)}")

    def annotations(self) -> Annotations:
        """What the JSON file said, for evaluation; boxes in pixels, rounded to float32 fractions on the way."""
        read = Reader(self)
        found = [
            {name: value.numpy() for name, value in parse(tf.constant(read(number))).items() if name != "encoded"}
            for number in range(len(self))
        ]
        sizes = np.array([[one["width"], one["height"]] for one in found], np.int32)
        counts = [len(one["labels"]) for one in found]
        edges = np.concatenate([one["boxes"] for one in found]).astype(np.float64)[:, [1, 0, 3, 2]]
        joined = {name: np.concatenate([one[name] for one in found]) for name in ("labels", "is_crowd", "area", "id")}
        return Annotations(
            path=self.folder / MANIFEST, folder=self.folder, classes=self.classes,
            category_ids=list(self.manifest["category_ids"]), files=[one["filename"].decode() for one in found],
            image_ids=np.array([int(one["source_id"]) for one in found], np.int64), sizes=sizes,
            starts=np.concatenate([[0], np.cumsum(counts)]).astype(np.int64),
            boxes=edges * np.repeat(np.tile(sizes, 2), counts, 0), labels=joined["labels"],
            areas=joined["area"].astype(np.float64), iscrowd=joined["is_crowd"], annotation_ids=joined["id"],
            orientations=np.ones(len(found), np.int64), turned=np.zeros(len(found), bool),
            plain=np.ones(len(found), bool),
        )  # fmt: skip


class Reader:
    """Calling it with i gives the bytes of example i; threads may share it. Lengths are checked, no checksums."""

    def __init__(self, records: Records) -> None:
        self.records, self._files = records, []
        for path in records.shards:
            self._files.append(os.open(path, os.O_RDONLY))

    def __del__(self) -> None:
        for number in self._files:
            os.close(number)

    def __call__(self, number: int) -> bytes:
        shard, offset, length = self.records.index[number].tolist()
        content = os.pread(self._files[shard], HEAD + length, offset)
        if len(content) != HEAD + length or struct.unpack("<Q", content[:8])[0] != length:
            path = self.records.shards[shard]
            raise ValueError(f"{path}: no record of {length} bytes at {offset} (example {number})")
        return content[HEAD:]
