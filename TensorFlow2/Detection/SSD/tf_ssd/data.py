"""Batches from TFRecords through tf.data: parallel decoding, the preprocessing steps, and an order that can be resumed.

    dataset = make_dataset(records, batch_size=32, train=True, seed=1, epoch=3, start_batch=10)

Which example is where in an epoch, and what is drawn for it, depends only on (seed, epoch, example): not on threads,
nor on where the epoch was left. A dataset is one epoch.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import tensorflow as tf

from .preprocessing import (
    fields,
    get_default_func_arg_map,
    preprocess,
    random_crop_image,
    random_horizontal_flip,
    resize_image,
)
from .tfrecord import Reader, Records, parse

CACHES = ("none", "encoded", "decoded")
MAX_OBJECTS = 100
Steps = Sequence[tuple[Any, Mapping[str, Any]]]
# The augmentation that SSD320 is trained with.
TRAINING_STEPS: Steps = (
    (random_horizontal_flip, {}),
    (
        random_crop_image,
        {
            "min_object_covered": 0.0,
            "aspect_ratio_range": (0.75, 3.0),
            "area_range": (0.75, 1.0),
            "overlap_thresh": 0.0,
        },
    ),
)


class Source:
    """A split's examples by their numbers, kept in memory or not; made once, used for every epoch.

    `cache`: "none" reads a record each time, "encoded" holds the records (the pictures' files), "decoded" the pixels
    as well, which takes height x width x 3 bytes a picture.
    """

    def __init__(self, records: Records, cache: str = "none") -> None:
        if cache not in CACHES:
            raise ValueError(f"cache {cache!r} is none of {', '.join(CACHES)}")
        self.records, self.cache = records, cache
        self._read = Reader(records)
        self._contents = None
        self._pixels = None
        if cache != "none":
            with tf.device("CPU"):
                self._contents = tf.constant([self._read(number) for number in range(len(records))])
        if cache == "decoded":
            dataset = tf.data.Dataset.from_tensor_slices(self._contents).map(
                lambda content: tf.io.serialize_tensor(decode(parse(content))), tf.data.AUTOTUNE
            )
            with tf.device("CPU"):
                self._pixels = tf.constant([content.numpy() for content in dataset])

    def __len__(self) -> int:
        return len(self.records)

    def example(self, number: tf.Tensor) -> dict[str, tf.Tensor]:
        """Inside a map of tf.data: what `tfrecord.parse` gives of example `number`, and `image` uint8 [H, W, 3]."""
        if self._contents is None:
            content = tf.numpy_function(lambda place: self._read(int(place)), [number], tf.string)
            content.set_shape([])
        else:
            content = tf.gather(self._contents, number)
        found = parse(content)
        if self._pixels is None:
            return found | {"image": decode(found)}
        image = tf.io.parse_tensor(tf.gather(self._pixels, number), tf.uint8)
        return found | {"image": tf.ensure_shape(image, [None, None, 3])}


def decode(found: Mapping[str, tf.Tensor]) -> tf.Tensor:
    """The picture of a parsed example, uint8 [H, W, 3]; an error where its size is not the one that was recorded."""
    # This operation reads PNG, too. Its default transform is off by up to 20 of 255 where edges are sharp.
    image = tf.io.decode_jpeg(found["encoded"], channels=3, dct_method="INTEGER_ACCURATE")
    expected = tf.cast(tf.stack([found["height"], found["width"]]), tf.int32)
    message = tf.strings.join([found["filename"], ": the picture has not the size that its record says"])
    tf.debugging.Assert(tf.reduce_all(tf.shape(image)[:2] == expected), [message])
    return tf.ensure_shape(image, [None, None, 3])


def order_of(count: int, seed: int, epoch: int) -> np.ndarray:
    """The examples of a training epoch in their order: another one for each epoch."""
    return np.random.default_rng([seed, epoch]).permutation(count)


def batches_of(count: int, batch_size: int, train: bool) -> int:
    """How many batches an epoch has. Training drops what does not fill one. ValueError if nothing is left."""
    if batch_size < 1 or count < 1 or (train and count < batch_size):
        raise ValueError(f"batch_size must be 1 to the {count} examples, got {batch_size}")
    return count // batch_size if train else -(-count // batch_size)


def make_dataset(
    source: Source,
    *,
    batch_size: int,
    train: bool,
    image_size: int = 320,
    steps: Steps = TRAINING_STEPS,
    seed: int = 0,
    epoch: int = 0,
    start_batch: int = 0,
    max_objects: int = MAX_OBJECTS,
    workers: int | None = None,
) -> tf.data.Dataset:
    """One epoch, from batch `start_batch` on: `image` [B, S, S, 3] float32 of 0 to 255, `number` [B] (of the example).

    Training adds `boxes` [B, max_objects, 4] and `labels` [B, max_objects] (0 from an example's last object on; crowds,
    objects without an area, and those beyond `max_objects` are left out), and drops the last batch where it is not
    full. Evaluation goes through the examples in their order, without `steps`; its last batch is filled up with
    repetitions whose `number` is -1. `workers`: threads, by default as many as are good.
    """
    count = len(source)
    number = batches_of(count, batch_size, train)
    if not 0 <= start_batch <= number:
        raise ValueError(f"start_batch must be 0 to {number}, got {start_batch}")
    if train:
        order = order_of(count, seed, epoch)[: number * batch_size]
        shown = order
    else:
        order = np.resize(np.arange(count), number * batch_size)
        shown = np.where(np.arange(len(order)) < count, order, -1)
    first = start_batch * batch_size
    dataset = tf.data.Dataset.from_tensor_slices((order[first:], shown[first:]))

    def one(place: tf.Tensor, label: tf.Tensor) -> dict[str, tf.Tensor]:
        found = source.example(place)
        if not train:
            return {"image": resized(found["image"], image_size), "number": label}
        draw = tf.stack([tf.constant((seed << 32) + epoch, tf.int64), tf.cast(place, tf.int64)])
        image, boxes, labels = augmented(found, steps, draw)
        boxes, labels = padded(boxes, labels, max_objects)
        return {"image": resized(image, image_size), "boxes": boxes, "labels": labels, "number": label}

    dataset = dataset.map(one, workers or tf.data.AUTOTUNE, deterministic=True)
    dataset = dataset.batch(batch_size, drop_remainder=True)  # all are full; this makes the size known to the graph
    options = tf.data.Options()
    # One example per record of an order: replicas share batches, not files.
    options.experimental_distribute.auto_shard_policy = tf.data.experimental.AutoShardPolicy.DATA
    return dataset.with_options(options).prefetch(tf.data.AUTOTUNE)


def resized(image: tf.Tensor, size: int) -> tf.Tensor:
    """A picture [H, W, 3] of any type as float32 [size, size, 3], its sides scaled apart; half-pixel centres."""
    scaled = resize_image(tf.cast(image, tf.float32), new_height=size, new_width=size, align_corners=False)[0]
    return tf.ensure_shape(scaled, [size, size, 3])


def augmented(found: Mapping[str, tf.Tensor], steps: Steps, seed: tf.Tensor) -> tuple[tf.Tensor, tf.Tensor, tf.Tensor]:
    """Picture, boxes and labels of a parsed example after the steps, without crowds."""
    real = found["is_crowd"] == 0
    example = {
        fields.IMAGE: tf.cast(found["image"], tf.float32)[None],
        fields.BOXES: tf.boolean_mask(found["boxes"], real),
        fields.CLASSES: tf.boolean_mask(found["labels"], real),
    }
    example = preprocess(example, steps, get_default_func_arg_map(include_label_weights=False), seed=seed)
    return example[fields.IMAGE][0], example[fields.BOXES], example[fields.CLASSES]


def padded(boxes: tf.Tensor, labels: tf.Tensor, rows: int) -> tuple[tf.Tensor, tf.Tensor]:
    """The first `rows` objects that have an area, filled up with zeros: [rows, 4] and int32 [rows]."""
    sized = tf.reduce_all(boxes[:, 2:] > boxes[:, :2], -1)
    boxes, labels = tf.boolean_mask(boxes, sized)[:rows], tf.cast(tf.boolean_mask(labels, sized)[:rows], tf.int32)
    missing = rows - tf.shape(labels)[0]
    boxes = tf.ensure_shape(tf.pad(boxes, [[0, missing], [0, 0]]), [rows, 4])
    return boxes, tf.ensure_shape(tf.pad(labels, [[0, missing]]), [rows])
