"""Training end to end on drawn shapes: learning, resume, two processes, recipes, the CUDA graph."""

from __future__ import annotations

import importlib.util
import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image, ImageDraw

import dlx
import ssd
from dlx import checkpoint as checkpoints
from dlx import config as configs
from dlx import dist, golden, optim
from dlx import record as records
from dlx.inputs import Normalize
from dlx.precision import LossScaler
from ssd import anchors, pretrained, quickstart, registry, train
from ssd.loss import MultiboxLoss
from ssd.options import CONFIGS
from ssd.pictures import Batch
from ssd.recipe import TrainConfig
from ssd.step import TrainState, capture, train_step
from ssd.synthetic import random_objects

SMALL = (
    "--arch ssd300_small --image_size 257 --batch_size 2 --lr 0.004 --lr_batch_size null --lr_schedule cosine"
    " --workers 0 --device cpu --log_every 1 --augmentation crop --ema_decay 0.9"
).split()
CATEGORIES = [{"id": 3, "name": "box"}, {"id": 17, "name": "ball"}]
PATHS = [str(Path(package.__file__).resolve().parents[1]) for package in (dlx, ssd)]


@pytest.fixture(autouse=True)
def one_thread():
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


def write_split(folder: Path, split: str, count: int, seed: int) -> None:
    """Pictures of one to three shapes, with their annotations in COCO's layout."""
    generator = np.random.default_rng(seed)
    (folder / split).mkdir(parents=True)
    images, annotations = [], []
    for index in range(count):
        width, height = (int(side) for side in generator.integers(180, 320, 2))
        picture = Image.new("RGB", (width, height), (40, 60, 90))
        pen = ImageDraw.Draw(picture)
        images.append({"id": index + 10, "file_name": f"{index}.png", "width": width, "height": height})
        for _ in range(1 + index % 3):
            side = int(generator.integers(60, 120))
            left, top = int(generator.integers(0, width - side)), int(generator.integers(0, height - side))
            kind = int(generator.integers(2))
            shape, colour = ((pen.rectangle, (230, 40, 40)), (pen.ellipse, (240, 220, 60)))[kind]
            shape((left, top, left + side - 1, top + side - 1), fill=colour)
            annotations.append(
                {
                    "id": len(annotations) + 1,
                    "image_id": index + 10,
                    "category_id": CATEGORIES[kind]["id"],
                    "bbox": [left, top, side, side],
                    "area": side * side,
                    "iscrowd": 0,
                }
            )
        picture.save(folder / split / f"{index}.png")
    (folder / "annotations").mkdir(exist_ok=True)
    content = {"images": images, "annotations": annotations, "categories": CATEGORIES}
    (folder / "annotations" / f"instances_{split}.json").write_text(json.dumps(content))


@pytest.fixture(scope="module")
def shapes(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("shapes")
    write_split(folder, "train", 12, seed=0)
    write_split(folder, "val", 5, seed=1)  # 5: neither two processes nor the batch divide it
    return folder


def run(shapes: Path, output: Path, *more: str) -> dict:
    return train.main([*SMALL, "--data_dir", str(shapes), "--output_dir", str(output), *more])


def weights_of(output: Path, name: str = "model") -> dict[str, torch.Tensor]:
    store = checkpoints.Checkpoints(output / "checkpoints")
    return checkpoints.load(store.latest()).model[name]


@pytest.fixture(scope="module")
def whole_run(shapes, tmp_path_factory) -> Path:
    """Nine steps, six an epoch, with checkpoints in the middle of the first."""
    output, threads = tmp_path_factory.mktemp("whole"), torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        run(shapes, output, "--epochs", "2", "--max_steps", "9", "--save_steps", "4", "--keep_checkpoints", "5")
    finally:
        torch.set_num_threads(threads)
    return output


def test_loss_falls_and_the_record_is_whole(whole_run):
    record = records.load(whole_run).fields
    losses = [loss for _, loss in record["curve"]["train.loss"]]
    assert len(losses) == 9 and all(np.isfinite(losses)) and np.mean(losses[-3:]) < 0.7 * np.mean(losses[:2])
    assert record["status"] == "finished" and record["metrics"]["steps"]["value"] == 9
    assert {"val.map", "val.map_50", "val.best_map", "val.recall_100", "parameters"} <= set(record["metrics"])
    assert record["metrics"]["val.images"]["value"] == 5
    assert len(record["curve"]["all classes.precision at recall %"]) == 101  # of the last evaluation alone
    assert record["attachments"]["confusion"]["labels"] == ["box", "ball", "nothing"]
    shown = record["attachments"]["samples"]
    assert len(shown) == 5 and all((whole_run / entry["image"]).is_file() for entry in shown)
    assert (whole_run / "report.html").stat().st_size > 10_000


def test_resumed_in_the_middle_of_an_epoch_is_the_uninterrupted_run(shapes, whole_run, tmp_path):
    store = whole_run / "checkpoints"
    middle = next(path for path in store.iterdir() if path.is_dir() and checkpoints.load(path).step == 4)
    (tmp_path / "checkpoints").mkdir()
    shutil.copytree(middle, tmp_path / "checkpoints" / middle.name)
    run(shapes, tmp_path, "--epochs", "2", "--max_steps", "9")
    for name in ("model", "ema"):
        ours, theirs = weights_of(tmp_path, name), weights_of(whole_run, name)
        assert all(torch.equal(ours[key], theirs[key]) for key in theirs)


def test_one_picture_at_a_time_cannot_be_trained_on(shapes, tmp_path):
    with pytest.raises(ValueError, match="batch_size must be at least 2"):
        run(shapes, tmp_path, "--batch_size", "1")


def test_weights_of_another_backbone_are_named_in_one_line(shapes, tmp_path):
    other = tmp_path / "other.pt"
    torch.save({"features.0.0.weight": torch.zeros(32, 3, 3, 3)}, other)
    with pytest.raises(
        ValueError, match="other.pt does not fit the backbone of ssd300_small .* --backbone_from null"
    ) as e:
        run(shapes, tmp_path / "run", "--backbone_from", str(other))
    assert "\n" not in str(e.value)


def test_a_checkpoint_knows_all_that_its_use_needs(whole_run):
    found = pretrained.load(whole_run)
    assert (found.arch, found.classes, found.category_ids) == ("ssd300_small", ["box", "ball"], [3, 17])
    assert found.preprocessing.size == 257


def test_other_classes_are_refused_and_taken_as_a_start(shapes, whole_run, tmp_path):
    other = tmp_path / "other"
    shutil.copytree(shapes, other)
    for file in (other / "annotations").iterdir():
        content = json.loads(file.read_text())
        content["categories"][1]["name"] = "disc"
        file.write_text(json.dumps(content))
    output = tmp_path / "run"
    shutil.copytree(whole_run, output)
    with pytest.raises(ValueError, match=r"trained on other classes \(box, ball \.\.\.\) than the data's \(box, disc"):
        run(other, output)
    trainer_config = configs.parse(
        TrainConfig, [*SMALL, "--data_dir", str(other), "--init_from", str(whole_run)], configs_dir=CONFIGS
    )
    with dist.init("cpu") as world:
        trainer = train.Trainer(trainer_config, world)
    known = pretrained.load(whole_run).model.state_dict()
    started = trainer.state.model.state_dict()
    assert torch.equal(started["backbone.conv1.weight"], known["backbone.conv1.weight"])


def test_two_processes_are_one_with_accumulation(shapes, tmp_path):
    """Evaluation counts every picture once; batch norm sees halves, so weights agree only roughly."""
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(PATHS), "OMP_NUM_THREADS": "1"}
    arguments = [*SMALL, "--data_dir", str(shapes), "--epochs", "1"]
    launcher = "-m dlx.entry torch.distributed.run --standalone --local-addr 127.0.0.1 --nproc-per-node 2 -m".split()
    done = subprocess.run(
        [sys.executable, *launcher, "ssd.train", *arguments, "--output_dir", str(tmp_path / "two")],
        env=environment, capture_output=True, text=True, timeout=240,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-3000:]
    two = records.load(tmp_path / "two").fields
    train.main([*arguments, "--global_batch_size", "4", "--output_dir", str(tmp_path / "one")])
    one = records.load(tmp_path / "one").fields
    assert two["metrics"]["val.images"]["value"] == 5 and two["metrics"]["steps"]["value"] == 3
    curves = [np.array(fields["curve"]["train.loss"]) for fields in (one, two)]
    np.testing.assert_allclose(*curves, rtol=1e-4)
    # The detector that two trained, evaluated by one process, scores what two processes said.
    from ssd import evaluate

    again = evaluate.main(
        ["--checkpoint", str(tmp_path / "two"), "--data_dir", str(shapes), "--batch_size", "3"]
        + ["--device", "cpu", "--workers", "0", "--output_dir", str(tmp_path / "again")]
    )
    assert again["map"] == pytest.approx(two["metrics"]["val.map"]["value"], abs=1e-6)
    assert again["detections"] == two["metrics"]["val.detections"]["value"]


@pytest.mark.parametrize("path", sorted(CONFIGS.glob("*.yaml")), ids=lambda path: path.stem)
def test_recipes_are_valid(path):
    config = configs.parse(TrainConfig, ["--config", str(path)], configs_dir=CONFIGS)
    assert config.arch in registry.ARCHITECTURES and config.image_size == 300


def test_rate_of_the_published_recipe(monkeypatch):
    config = configs.parse(TrainConfig, ["--config", "resnet50_coco"], configs_dir=CONFIGS)
    config.data, config.data_backend, config.device, config.batch_size = "synthetic", "synthetic", "cpu", 2
    config.arch, config.global_batch_size, config.precision = "ssd300_small", 128, "fp32"
    with dist.init("cpu") as world:
        trainer = train.Trainer(config, world)
    assert trainer.peak_lr == pytest.approx(2.6e-3 * 128 / 32)
    per_epoch = trainer.steps_per_epoch
    assert trainer.learning_rate(149) == pytest.approx(trainer.peak_lr / 2)
    for epoch, share in ((20, 1.0), (43, 0.1), (54, 0.01)):
        assert trainer.learning_rate(epoch * per_epoch) == pytest.approx(share * trainer.peak_lr)


def test_quickstart_on_an_own_folder(shapes, tmp_path, capsys):
    quickstart.main(
        [*SMALL, "--backbone_from", "null", "--data_dir", str(shapes), "--epochs", "1", "--warmup_steps", "0"]
        + ["--train_scenes", "null", "--val_scenes", "null", "--output_dir", str(tmp_path)]
    )
    assert "mAP at IoU 0.5" in capsys.readouterr().out
    found = json.loads((tmp_path / "infer" / "detections.json").read_text())
    assert len(found["pictures"]) == 5


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("precision", ["fp32", "bf16", "fp16"])
def test_graph_equals_eager(precision):
    device = torch.device("cuda")

    def make() -> TrainState:
        torch.manual_seed(0)
        model = registry.build("ssd300_small", 3).to(device, memory_format=torch.channels_last).train()
        return TrainState(
            model,
            optim.build_optimizer(model, "sgd", lr=1e-3, momentum=0.9, weight_decay=0.0),
            loss=MultiboxLoss(anchors.default_boxes(300)).to(device),
            normalize=Normalize().to(device),
            precision=precision,
            scaler=LossScaler(model.named_parameters(), enabled=precision == "fp16"),
            ema=optim.ModelEma(model, 0.9),
        )

    def batch(seed: int) -> list[Batch]:
        generator = torch.Generator().manual_seed(seed)
        images = torch.randint(256, (4, 3, 300, 300), dtype=torch.uint8, generator=generator)
        return [Batch(*(t.to(device) for t in (images, *random_objects(4, 3, 3, generator))))]

    eager, graphed = make(), make()
    step = capture(graphed, batch(0))
    for index in range(4):
        expected, found = train_step(eager, batch(index)), step(batch(index))
        assert found.item() == pytest.approx(expected.item(), rel=1e-3 if precision == "fp32" else 3e-2)
    assert graphed.step == eager.step == 4


def test_first_losses_of_the_quickstart():
    """Exact on the machine that the file names, else within what other kernels may round differently."""
    path = Path(__file__).with_name("golden") / "make_quickstart.py"
    spec = importlib.util.spec_from_file_location("make_quickstart", path)
    make_quickstart = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(make_quickstart)
    assert golden.difference(make_quickstart.FILE, make_quickstart.first_losses(), rtol=2e-2) == ""
