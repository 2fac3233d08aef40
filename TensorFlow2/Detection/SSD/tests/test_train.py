"""Schedule, training step, exact resumption, replicas and evaluation, with a tiny network."""

from __future__ import annotations

import functools
import os
import signal
import subprocess
import sys
from pathlib import Path

import keras
import numpy as np
import pytest
import tensorflow as tf
from PIL import Image

from dlx import coco, runlog
from dlx.record import load as load_record
from tf_ssd import anchors, backbone, checkpoint, data, evaluate, model, nms, step, targets, tfrecord, train
from tf_ssd.schedule import WarmupCosine

TINY = model.ModelConfig(backbone.BackboneConfig(False, (1, 1, 1, 1), 4, momentum=0.9), channels=8, depth=1)


def make_coco(folder: Path) -> Path:
    """A folder in COCO's layout: 9 and 4 pictures with a light square or a dark bar."""
    generator = np.random.default_rng(0)
    for split, count in (("train", 9), ("val", 4)):
        (folder / split).mkdir(parents=True)
        images, annotations = [], []
        for number in range(count):
            image = generator.integers(100, 140, (64, 80, 3), dtype=np.uint8)
            left, top, kind = int(generator.integers(0, 50)), int(generator.integers(0, 34)), number % 2
            width, height = ((30, 30), (30, 12))[kind]
            image[top : top + height, left : left + width] = (250, 5)[kind]
            Image.fromarray(image).save(folder / split / f"{number}.png")
            images.append({"id": number + 1, "file_name": f"{number}.png", "width": 80, "height": 64})
            annotations.append(
                {
                    "id": number + 1, "image_id": number + 1, "category_id": kind + 1, "iscrowd": 0,
                    "bbox": [left, top, width, height], "area": width * height,
                }
            )  # fmt: skip
        categories = [{"id": 1, "name": "square"}, {"id": 2, "name": "bar"}]
        (folder / "annotations").mkdir(exist_ok=True)
        path = folder / "annotations" / f"instances_{split}.json"
        coco.write(path, images=images, annotations=annotations, categories=categories)
    return folder


@pytest.fixture(scope="module")
def scenes(tmp_path_factory) -> Path:
    return make_coco(tmp_path_factory.mktemp("data") / "coco")


@pytest.fixture
def config(scenes, tmp_path, monkeypatch):
    """A function that gives a configuration of a short run with a tiny network."""
    monkeypatch.setitem(model.ARCHITECTURES, "compact", TINY)

    def make(name: str = "run", **options) -> train.TrainConfig:
        options = {
            "arch": "compact", "data": str(scenes), "records_dir": str(scenes.parent / "records"), "image_size": 64,
            "batch_size": 4, "epochs": 3, "lr": 0.01, "warmup_steps": 2, "warmup_lr": 0.001, "log_every": 1,
            "evaluate_epochs": 3, "output_dir": str(tmp_path / name),
        } | options  # fmt: skip
        return train.TrainConfig(**options)

    return make


def state_of(folder: str | Path) -> dict[str, np.ndarray]:
    reader = tf.train.load_checkpoint(str(Path(folder) / "checkpoints" / "last" / checkpoint.WEIGHTS))
    return {name: reader.get_tensor(name) for name in reader.get_variable_to_shape_map() if "VARIABLE_VALUE" in name}


def losses_of(folder: str | Path) -> list[float]:
    lines = runlog.read(Path(folder) / runlog.FILE_NAME)
    return [line["data"]["train.total"] for line in lines if "train.total" in line.get("data", {})]


# Schedule


def test_schedule_by_hand():
    found = WarmupCosine(0.16, 100, 20, 0.04)
    for number, expected in ((0, 0.04), (10, 0.1), (20, 0.16), (60, 0.08), (100, 0.0), (200, 0.0)):
        np.testing.assert_allclose(found(number), expected, atol=1e-7)
    np.testing.assert_allclose(found(40), 0.08 * (1 + np.cos(np.pi / 4)), rtol=1e-6)
    np.testing.assert_allclose(WarmupCosine(0.1, 10)(0), 0.1, rtol=1e-6)
    assert WarmupCosine.from_config(found.get_config()).get_config() == found.get_config()


@pytest.mark.parametrize("given", [(0.1, 10, 11), (0.1, 0), (0.0, 10), (0.1, 10, 2, 0.2)])
def test_schedules_that_make_no_sense(given):
    with pytest.raises(ValueError, match="must be"):
        WarmupCosine(*given)


# One step


def batch_of(size: int = 4) -> dict[str, tf.Tensor]:
    generator = np.random.default_rng(1)
    low = generator.uniform(0, 0.5, (size, 2, 2))
    boxes = np.concatenate([low, low + generator.uniform(0.1, 0.5, (size, 2, 2))], -1)
    return {
        "image": tf.constant(generator.uniform(0, 255, (size, 64, 64, 3)), tf.float32),
        "boxes": tf.constant(boxes, tf.float32),
        "labels": tf.constant(generator.integers(1, 3, (size, 2)), tf.int32),
    }


@functools.cache
def one_step(precision: str, clip: float | None = None, jit: bool = False) -> tuple[list[float], list[np.ndarray]]:
    """The losses of a step of rate 1 without momentum, and by how much it changed the variables."""
    keras.utils.set_random_seed(0)
    network = model.build_model(TINY, 2, 64, step.POLICIES[precision])
    before = [variable.numpy() for variable in network.trainable_variables]
    optimizer = step.make_optimizer(1.0, 0.0, clip, precision)
    optimizer.build(network.trainable_variables)
    run = step.make_train_step(network, optimizer, tf.distribute.get_strategy(), weight_decay=0.01, jit=jit)
    losses = [float(value) for value in run(batch_of())]
    pairs = zip(network.trainable_variables, before, strict=True)
    return losses, [variable.numpy() - value for variable, value in pairs]


def norm(changes: list[np.ndarray]) -> float:
    return float(np.sqrt(sum(np.sum(np.square(change, dtype=np.float64)) for change in changes)))


def test_clipping_limits_the_norm_of_all_gradients():
    _, free = one_step("fp32")
    _, clipped = one_step("fp32", clip=0.1)
    assert norm(free) > 0.2
    np.testing.assert_allclose(norm(clipped), 0.1, rtol=1e-4)
    for one, other in zip(free, clipped, strict=True):
        np.testing.assert_allclose(other, one * 0.1 / norm(free), atol=1e-5)


@pytest.mark.parametrize("precision, jit", [("bf16", False), ("fp16", False), ("fp32", True)])
def test_half_precision_and_xla_make_about_the_same_step(precision, jit):
    losses, expected = one_step("fp32")
    found, changes = one_step(precision, jit=jit)
    np.testing.assert_allclose(found, losses, rtol=1e-4 if jit else 0.03)
    product = sum(np.sum(one * other) for one, other in zip(expected, changes, strict=True))
    assert product / norm(expected) / norm(changes) > (0.9999 if jit else 0.97)
    np.testing.assert_allclose(norm(changes), norm(expected), rtol=1e-3 if jit else 0.1)


REPLICAS = """
import sys
import keras, numpy as np, tensorflow as tf
cpu = tf.config.list_physical_devices("CPU")[0]
tf.config.set_logical_device_configuration(cpu, [tf.config.LogicalDeviceConfiguration()] * 2)
from tf_ssd import backbone, model, step
config = model.ModelConfig(backbone.BackboneConfig(False, (1, 1, 1, 1), 4), channels=8, depth=1)
generator = np.random.default_rng(1)
low = generator.uniform(0, 0.5, (2, 2, 2)).astype(np.float32)
half = {
    "image": generator.uniform(0, 255, (2, 64, 64, 3)).astype(np.float32),
    "boxes": np.concatenate([low, low + 0.3], -1),
    "labels": np.array([[1, 2], [2, 1]], np.int32),
}
# Two halves with the same pictures, whose norms agree, and other labels: one has less matched anchors.
other = {**half, "labels": np.array([[2, 0], [0, 0]], np.int32)}
batch = {name: np.concatenate([half[name], other[name]]) for name in half}
found = []
for strategy in (tf.distribute.get_strategy(), tf.distribute.MirroredStrategy(["CPU:0", "CPU:1"])):
    keras.utils.set_random_seed(0)
    count = strategy.num_replicas_in_sync
    with strategy.scope():
        network = model.build_model(config, 2, 64)
        optimizer = step.make_optimizer(0.5, 0.9, 0.3, "fp32", count)
        optimizer.build(network.trainable_variables)
    run = step.make_train_step(network, optimizer, strategy, weight_decay=0.01)
    dataset = tf.data.Dataset.from_tensors(batch).unbatch().batch(4)
    for each in strategy.experimental_distribute_dataset(dataset):
        losses = [float(value) for value in run(each)]
    found.append((count, losses, [variable.numpy() for variable in network.trainable_variables]))
assert [count for count, _, _ in found] == [1, 2]
np.testing.assert_allclose(found[0][1], found[1][1], rtol=1e-5)
for one, two in zip(found[0][2], found[1][2], strict=True):
    np.testing.assert_allclose(one, two, atol=2e-6)
print("EQUAL")
"""


def test_two_replicas_make_the_step_of_one():
    done = subprocess.run(
        [sys.executable, "-c", REPLICAS], env={**os.environ, "PYTHONPATH": str(Path(model.__file__).parents[1])},
        capture_output=True, text=True, timeout=120,
    )  # fmt: skip
    assert "EQUAL" in done.stdout, done.stderr[-3000:]


# A run


def test_a_run_that_was_stopped_goes_on_to_the_bit(config, monkeypatch):
    whole = config("whole")
    assert train.run(whole)["images"] == 4
    expected = losses_of(whole.output_dir)
    assert len(expected) == 6 and min(expected[3:]) < expected[0]
    monkeypatch.setattr(train.Trainer, "train", stopping_after(3))
    with pytest.raises(train.Stopped) as stopped:
        train.run(config("parts"))
    assert stopped.value.code == 128 + signal.SIGTERM
    assert load_record(Path(whole.output_dir).parent / "parts" / "record.json").fields["status"] == "stopped"
    monkeypatch.undo()
    monkeypatch.setitem(model.ARCHITECTURES, "compact", TINY)
    train.run(config("parts", cache="decoded"))
    parts = config("parts").output_dir
    assert losses_of(parts) == expected
    one, other = state_of(whole.output_dir), state_of(parts)
    assert one.keys() == other.keys() and len(one) > 50
    for name, value in one.items():
        np.testing.assert_array_equal(value, other[name], err_msg=name)
    with pytest.raises(ValueError, match="lr: 0.01 -> 0.02"):
        train.run(config("parts", lr=0.02))
    assert train.run(config("parts")) is None  # nothing is left to do
    found = checkpoint.load(parts)
    assert (found.classes, found.image_size, found.arch) == (["square", "bar"], 64, "compact")
    results = evaluate.main(
        ["--checkpoint", parts, "--data", config().data, "--records_dir", config().records_dir]
        + ["--output_dir", str(Path(parts) / "evaluate"), "--batch_size", "3"]
    )
    assert results["images"] == 4 and (Path(parts) / "evaluate" / "detections.json").is_file()
    best = checkpoint.read_state(Path(parts) / "checkpoints" / "best")["progress"]["best"]
    np.testing.assert_allclose(results["map"], best, atol=1e-6)


def stopping_after(number: int):
    """`Trainer.train` with a signal that comes before step `number` ends: in the middle of an epoch."""
    original = train.Trainer.train

    def stopped(self, log, record):
        original_step = self.train_step

        def counted(batch):
            if self.progress["step"] == number - 1:
                os.kill(os.getpid(), signal.SIGTERM)
            return original_step(batch)

        self.train_step = counted
        return original(self, log, record)

    return stopped


def test_checkpoints_of_another_network_do_not_fit(tmp_path, monkeypatch):
    state = {"arch": "compact", "classes": ["a"], "image_size": 64, "progress": {}}
    checkpoint.save(tmp_path / "last", state, model=model.build_model(TINY, 2, 64))
    monkeypatch.setitem(model.ARCHITECTURES, "compact", TINY)
    with pytest.raises(ValueError, match="do not fit"):
        checkpoint.load(tmp_path / "last")
    with pytest.raises(ValueError, match="no checkpoint here"):
        checkpoint.load(tmp_path / "nothing")


@pytest.mark.parametrize("options, message", [({"image_size": 100}, "100"), ({"augmentation": "x"}, "no file")])
def test_wrong_settings_are_found_at_once(config, options, message):
    with pytest.raises(ValueError, match=message):
        config(**options)


# Evaluation


def test_perfect_outputs_have_a_precision_of_1(scenes):
    annotations = coco.read(scenes / "annotations" / "instances_val.json", scenes / "val")
    records = scenes.parent / "perfect"
    source = data.Source(tfrecord.write(annotations, records))
    places = tf.constant(anchors.make_anchors(64))
    examples = iter(tf.data.Dataset.range(4).map(source.example))

    def perfect(images):
        found = [next(examples, None) for _ in images]
        found = [example or found[0] for example in found]
        boxes, labels = tf.stack([one["boxes"] for one in found]), tf.stack([one["labels"] for one in found])
        aims = targets.match(boxes, labels, places)
        logits = tf.one_hot(aims.labels - 1, 2, on_value=5.0, off_value=-20.0)
        return nms.detect(aims.offsets, logits, places, score_threshold=0.5)

    dataset = data.make_dataset(source, batch_size=3, train=False, image_size=64)
    found = evaluate.collect(perfect, dataset, annotations.sizes)
    assert sorted(found.picture.tolist()) == [0, 1, 2, 3]
    np.testing.assert_allclose(found.boxes[np.argsort(found.picture)], annotations.boxes, atol=1e-3)
    assert evaluate.cocoeval.evaluate(annotations, found)["map"] == 1.0
