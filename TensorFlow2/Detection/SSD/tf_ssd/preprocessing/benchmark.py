"""Speed of every step on one CPU core, side by side with the augmentation layers of Keras where one does the same.

    python -m tf_ssd.preprocessing.benchmark --output results/cpu-preprocessing.json

Each program is a tf.data pipeline with one thread that takes pictures from memory, changes them and gives batches.
Keras layers run on pictures one by one, as steps do, and on whole batches; both are shown, and the faster one is the
peer. Programs run in turns (A B A B). What counts is the processor's time of this process, so that other work on the
machine disturbs little: pictures per second of one core, from the median batch. Times by the wall clock are in the
record as well, and so are the layers that stand against each step, with a remark where the two differ.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import tensorflow as tf

from dlx import bench
from dlx import config as configs
from dlx.record import Record

from . import STEPS, fields, get_default_func_arg_map, preprocess

TASK = "TensorFlow2/Detection/SSD"
RECORD = Path(__file__).resolve().parents[2] / "results" / "cpu-preprocessing.json"  # the committed one


@dataclass
class BenchmarkConfig:
    """What is measured, and for how long."""

    image_size: int = configs.field(320, help="side of the pictures in pixels", ge=16)
    batch_size: int = configs.field(32, help="pictures per batch", ge=1)
    objects: int = configs.field(8, help="boxes per picture", ge=0)
    steps: list[str] = configs.field([], help="names of comparisons; none = all")
    iterations: int = configs.field(4, help="batches per turn", ge=2)
    warmup: int = configs.field(2, help="batches before the first turn", ge=1)
    pairs: int = configs.field(5, help="turns of each program", ge=1)
    seed: int = configs.field(1, help="of the pictures and the draws", ge=0)
    output: str = configs.field("runs/tf_ssd_preprocessing.json", help="the record that is written")


@dataclass(frozen=True)
class Comparison:
    """Steps and, as `layers(size)`, the Keras layers that do nearest to the same. `remark`: how those differ."""

    name: str
    steps: tuple[tuple[str, dict[str, Any]], ...]
    layers: Callable[[int], list[Any]] | None = None
    remark: str = ""


def _keras(name: str, *args: Any, **options: Any) -> Callable[[int], list[Any]]:
    def make(size: int) -> list[Any]:
        import keras

        return [getattr(keras.layers, name)(*args, **options)]

    return make


def _several(*makers: Callable[[int], list[Any]]) -> Callable[[int], list[Any]]:
    return lambda size: [layer for make in makers for layer in make(size)]


def _resizing(size: int) -> list[Any]:
    return _keras("Resizing", size, size)(size)


def comparisons(size: int) -> list[Comparison]:
    """Every step that has an equal in Keras, and the list of steps that SSD trains with."""
    values = {"value_range": (0, 255)}
    to_size = ("resize_image", {"new_height": size, "new_width": size, "align_corners": False})
    half = size * 3 // 4
    normalise = {"original_minval": 0.0, "original_maxval": 255.0, "target_minval": -1.0, "target_maxval": 1.0}
    flip = _keras("RandomFlip", "horizontal")
    crop = _several(_keras("RandomCrop", half, half), _resizing)
    crop_step = ("random_crop_image", {"min_object_covered": 0.0, "overlap_thresh": 0.0})
    jitter = _keras(
        "RandomColorJitter", brightness_factor=32 / 255, contrast_factor=0.5, saturation_factor=(0.25, 0.75),
        hue_factor=0.2, **values,
    )  # fmt: skip
    return [
        Comparison("horizontal flip", (("random_horizontal_flip", {}),), flip),
        Comparison("vertical flip", (("random_vertical_flip", {}),), _keras("RandomFlip", "vertical")),
        Comparison("quarter turn", (("random_rotation90", {}),), _keras("RandomRotation", 0.25),
                   "RandomRotation turns by any angle and interpolates"),
        Comparison("brightness", (("random_adjust_brightness", {}),), _keras("RandomBrightness", 0.2, **values)),
        Comparison("contrast", (("random_adjust_contrast", {}),), _keras("RandomContrast", 0.2, **values)),
        Comparison("saturation", (("random_adjust_saturation", {}),), _keras("RandomSaturation", (0.4, 0.6), **values)),
        Comparison("hue", (("random_adjust_hue", {}),), _keras("RandomHue", 0.02, **values)),
        Comparison("grey", (("random_rgb_to_gray", {}),), _keras("RandomGrayscale", 0.1)),
        Comparison("all colours", (("random_distort_color", {}),), jitter),
        Comparison("noise", (("random_pixel_value_scale", {}),)),
        Comparison("black patches", (("random_black_patches", {}),), _keras("RandomErasing", factor=1.0, fill_value=0),
                   "RandomErasing draws one rectangle; the step up to ten squares"),
        Comparison("resize", (("resize_image", {"new_height": half, "new_width": half, "align_corners": False}),),
                   _keras("Resizing", half, half)),
        Comparison("crop to aspect ratio", (("random_crop_to_aspect_ratio", {"aspect_ratio": 0.75}), to_size),
                   _several(_keras("RandomCrop", size, half), _resizing)),
        Comparison("crop and resize", (crop_step, to_size), crop,
                   "RandomCrop has one size and knows no objects; the step draws a size and chooses by objects"),
        Comparison("SSD crop and resize", (("ssd_random_crop", {}), to_size), crop, "as above, with SSD's cases"),
        Comparison("zoom out", (("random_pad_image", {}), to_size),
                   _keras("RandomZoom", (0.0, 1.0), fill_mode="constant"),
                   "RandomZoom interpolates once, the step pads and resizes"),
        Comparison("scale of values", (("normalize_image", normalise),), _keras("Rescaling", 2 / 255, -1.0)),
        Comparison("flip, crop, resize, colours",
                   (("random_horizontal_flip", {}), ("ssd_random_crop", {}), to_size, ("random_distort_color", {}),
                    ("normalize_image", normalise)),
                   _several(flip, crop, jitter, _keras("Rescaling", 2 / 255, -1.0))),
    ]  # fmt: skip


def examples(config: BenchmarkConfig) -> dict[str, np.ndarray]:
    """One batch of pictures with boxes and labels."""
    generator = np.random.default_rng(config.seed)
    shape = (config.batch_size, config.image_size, config.image_size, 3)
    corners = np.sort(generator.random((config.batch_size, config.objects, 2, 2), np.float32), axis=2)
    return {
        fields.IMAGE: generator.integers(0, 256, shape).astype(np.float32),
        fields.BOXES: corners.reshape(config.batch_size, config.objects, 4),
        fields.CLASSES: generator.integers(1, 90, (config.batch_size, config.objects)),
        fields.WEIGHTS: np.ones((config.batch_size, config.objects), np.float32),
    }


class Timed:
    """A program that notes the processor's time of each call."""

    def __init__(self, program: Callable[[], Any]) -> None:
        self.program, self.seconds = program, []

    def __call__(self) -> None:
        started = time.process_time()
        self.program()
        self.seconds.append(time.process_time() - started)

    def rate(self, items: int, warmup: int) -> float:
        """Items per second of processor time, of the median call after `warmup` calls."""
        return items / statistics.median(self.seconds[warmup:])


def pipeline(data: dict[str, np.ndarray], change: Callable[[Any], Any], batch: int, whole: bool) -> Callable[[], Any]:
    """A function that makes the next batch. `whole`: `change` takes batches, else single pictures."""
    source = tf.data.Dataset.from_tensor_slices(data).repeat()
    counted = tf.data.Dataset.zip(tf.data.Dataset.counter(), source)
    changed = counted.batch(batch).map(change) if whole else counted.map(change).batch(batch)
    options = tf.data.Options()
    options.threading.private_threadpool_size = 1
    options.autotune.enabled = False
    iterator = iter(changed.with_options(options))
    return lambda: next(iterator)


def ours(comparison: Comparison, config: BenchmarkConfig, data: dict[str, np.ndarray]) -> Callable[[], Any]:
    """The steps over whole examples, boxes included. The batch has pictures only, since boxes differ in number."""
    steps = [(STEPS[name].function, options) for name, options in comparison.steps]
    arguments = get_default_func_arg_map()

    def change(number: tf.Tensor, example: dict[str, tf.Tensor]) -> tf.Tensor:
        example = {**example, fields.IMAGE: tf.expand_dims(example[fields.IMAGE], 0)}
        seed = tf.stack([tf.constant(config.seed, tf.int64), number])
        changed = preprocess(example, steps, arguments, seed=seed)
        picture = tf.squeeze(changed[fields.IMAGE], 0)
        touched = [value for name, value in changed.items() if name != fields.IMAGE and value is not example[name]]
        with tf.control_dependencies(touched):  # or the graph would drop what the batch does not hold
            return tf.identity(picture) if touched else picture

    return pipeline(data, change, config.batch_size, whole=False)


def peer(comparison: Comparison, config: BenchmarkConfig, data: dict[str, np.ndarray], whole: bool) -> Callable:
    """Keras layers over the pictures of the same examples."""
    layers = comparison.layers(config.image_size)

    def change(_: tf.Tensor, example: dict[str, tf.Tensor]) -> tf.Tensor:
        image = example[fields.IMAGE]
        for layer in layers:
            image = layer(image, training=True) if "Random" in type(layer).__name__ else layer(image)
        return image

    return pipeline(data, change, config.batch_size, whole)


def measure(config: BenchmarkConfig) -> list[dict[str, Any]]:
    """One row a comparison."""
    data = examples(config)
    chosen = comparisons(config.image_size)
    unknown = set(config.steps) - {item.name for item in chosen}
    if unknown:
        raise ValueError(f"unknown steps {sorted(unknown)}; known: {', '.join(item.name for item in chosen)}")
    rows = []
    for item in chosen:
        if config.steps and item.name not in config.steps:
            continue
        programs = {"ours": Timed(ours(item, config, data))}
        if item.layers is not None:
            programs["keras, picture by picture"] = Timed(peer(item, config, data, whole=False))
            programs["keras, whole batches"] = Timed(peer(item, config, data, whole=True))
        measured = bench.against_peers(
            programs, pairs=config.pairs, iterations=config.iterations, warmup=config.warmup, items=config.batch_size,
            unit="pictures/s", batch=config.batch_size,
        )  # fmt: skip
        speeds = {name: program.rate(config.batch_size, config.warmup) for name, program in programs.items()}
        row: dict[str, Any] = {"name": item.name, "steps": [name for name, _ in item.steps], "ours": speeds["ours"]}
        if item.layers is not None:
            row["layers"] = [type(layer).__name__ for layer in item.layers(config.image_size)]
            row["keras_pictures"] = speeds["keras, picture by picture"]
            row["keras_batches"] = speeds["keras, whole batches"]
            row["ours_over_keras"] = speeds["ours"] / max(row["keras_pictures"], row["keras_batches"])
        rows.append(row | {"remark": item.remark, "programs": measured})
        print(
            f"{item.name:28s}" + "  ".join(f"{k} {v:.3g}" for k, v in row.items() if isinstance(v, float)), flush=True
        )
    return rows


def main(args: list[str] | None = None) -> dict[str, Any]:
    config = configs.parse(BenchmarkConfig, args, prog="tf_ssd.preprocessing.benchmark")
    tf.config.threading.set_intra_op_parallelism_threads(1)
    tf.config.threading.set_inter_op_parallelism_threads(1)
    record = Record.start(TASK, "benchmark", configs.to_dict(config), seed=config.seed)
    record.attach("rows", measure(config))
    print(f"record: {record.finish().save(config.output)}")
    return record.fields


if __name__ == "__main__":
    main()
