"""Training end to end on a few made-up sounds: learning, resume, two processes, recipes, first losses."""

from __future__ import annotations

import dataclasses
import importlib.util
import math
import os
import shutil
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch

import dlx
import fastspeech
from dlx import checkpoint as checkpoints
from dlx import config as configs
from dlx import dist, golden
from dlx import record as records
from fastspeech import evaluate, pretrained, registry, train
from fastspeech.data import Batch
from fastspeech.model import FastSpeech, FastSpeechConfig
from fastspeech.options import CONFIGS, DataOptions
from fastspeech.recipe import TrainConfig
from fastspeech.registry import Architecture
from fastspeech.step import TrainState, fuse, train_step

audio = pytest.importorskip("dlx.speech.audio", reason="needs soundfile")
SMALL = (
    "--batch_size 2 --lr 0.003 --lr_schedule constant --workers 0 --device cpu --log_every 1 --listen 1 "
    "--durations learned --aligner_steps 3"
).split()
PATHS = [str(Path(package.__file__).resolve().parents[1]) for package in (dlx, fastspeech)]
TINY = FastSpeechConfig(channels=32, head_channels=8, feed_forward=32, encoder_blocks=1, decoder_blocks=1, predictor=16)


@pytest.fixture(autouse=True)
def small_and_alone(monkeypatch, tmp_path_factory):
    """A tiny model, one thread, caches of their own."""
    monkeypatch.setitem(registry.ARCHITECTURES, "tiny", Architecture(TINY, 0))
    monkeypatch.setenv("DLX_HOME", str(tmp_path_factory.getbasetemp() / "home"))
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


@pytest.fixture(scope="module")
def lists(tmp_path_factory) -> list[str]:
    """Eight tones to learn and three to evaluate: neither two processes nor the batch divide three."""
    folder = tmp_path_factory.mktemp("tones")
    generator, words = np.random.default_rng(0), "one two three four five six".split()
    for split, count in (("train", 8), ("val", 3)):
        lines = []
        for number in range(count):
            time = np.arange(int(22050 * generator.uniform(0.45, 0.7))) / 22050
            tone = 0.3 * np.sin(2 * np.pi * (150 + 20 * number) * time).astype(np.float32)
            audio.write_wav(folder / f"{split}{number}.wav", tone, 22050)
            lines.append(f"{folder}/{split}{number}.wav|tone number {words[number % 6]}")
        (folder / f"{split}.txt").write_text("\n".join(lines) + "\n")
    return ["--train_list", str(folder / "train.txt"), "--val_list", str(folder / "val.txt")]


def weights_of(output: Path) -> dict[str, torch.Tensor]:
    return checkpoints.load(checkpoints.Checkpoints(output / "checkpoints").latest()).model["model"]


def test_a_voice_learns_and_its_report_can_be_heard(lists, tmp_path, capsys):
    train.main([*SMALL, *lists, "--arch", "tiny", "--epochs", "4", "--output_dir", str(tmp_path)])
    record = records.load(tmp_path).fields
    losses = [loss for _, loss in record["curve"]["train.loss"]]
    assert len(losses) == 16 and np.mean(losses[-3:]) < 0.8 * np.mean(losses[:3])
    assert {"val.loss", "val.mel_l1", "val.duration_frames", "val.best_loss"} <= set(record["metrics"])
    sounds = record["attachments"]["audio"]
    assert len(sounds) == 2 and all((tmp_path / entry["file"]).stat().st_size > 1000 for entry in sounds)
    assert (tmp_path / record["attachments"]["samples"][0]["image"]).is_file()
    assert "data:audio/wav" in (tmp_path / "report.html").read_text()
    found = pretrained.load(tmp_path)
    assert found.arch == "tiny" and found.leads and len(found.front_end.symbols) == 148
    options = [*lists, "--batch_size", "3", "--workers", "0", "--device", "cpu", *SMALL[-4:]]
    again = evaluate.main(["--checkpoint", str(tmp_path), *options, "--output_dir", str(tmp_path / "again")])
    assert again["loss"] == pytest.approx(record["metrics"]["val.best_loss"]["value"], rel=1e-4)
    assert "note:" not in capsys.readouterr().err
    config = evaluate.options_of(["--checkpoint", str(tmp_path), *options, "--max_seconds", "9"])
    assert evaluate.other_utterances(config, found) == ["max_seconds 12.0 instead of 9.0"]


def test_resumed_in_the_middle_of_an_epoch_is_the_uninterrupted_run(lists, tmp_path):
    arguments = [*SMALL, *lists, "--arch", "tiny", "--epochs", "2", "--listen", "0"]
    train.main([*arguments, "--save_steps", "3", "--keep_checkpoints", "9", "--output_dir", str(tmp_path / "whole")])
    folders = (path for path in (tmp_path / "whole" / "checkpoints").iterdir() if path.is_dir())
    middle = next(path for path in folders if checkpoints.load(path).step == 3)
    shutil.copytree(middle, tmp_path / "resumed" / "checkpoints" / middle.name)
    train.main([*arguments, "--resident", "true", "--listen", "1", "--output_dir", str(tmp_path / "resumed")])
    ours, theirs = weights_of(tmp_path / "resumed"), weights_of(tmp_path / "whole")
    assert all(torch.equal(ours[key], theirs[key]) for key in theirs)


def test_two_processes_measure_what_one_does(lists, tmp_path):
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(PATHS), "OMP_NUM_THREADS": "1"}
    launcher = "-m dlx.entry torch.distributed.run --standalone --local-addr 127.0.0.1 --nproc-per-node 2 -m".split()
    arguments = [*SMALL, *lists, "--arch", "fastspeech_compact", "--max_steps", "1", "--listen", "0"]
    done = subprocess.run(
        [sys.executable, *launcher, "fastspeech.train", *arguments, "--output_dir", str(tmp_path / "two")],
        env=environment, capture_output=True, text=True, timeout=240,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-3000:]
    train.main([*arguments, "--global_batch_size", "4", "--output_dir", str(tmp_path / "one")])
    one, two = (records.load(tmp_path / name).fields for name in ("one", "two"))
    # Dropout differs between the two in the one step, and so what it has learnt.
    np.testing.assert_allclose(one["curve"]["train.loss"], two["curve"]["train.loss"], rtol=0.05)
    np.testing.assert_allclose(one["curve"]["val.loss"], two["curve"]["val.loss"], rtol=0.05)


def test_evaluation_does_not_depend_on_batches_or_padding(lists):
    config = configs.parse(TrainConfig, [*SMALL, *lists], configs_dir=CONFIGS)
    splits = config.open_timed()
    torch.manual_seed(0)
    model = registry.build("tiny")
    results = []
    with dist.init("cpu") as world:
        for size, buckets in ((1, []), (2, []), (3, [700])):
            config.batch_size, config.mel_buckets = size, buckets
            results.append(evaluate.evaluate(model, config.loader("val", splits, False, world), world=world))
    for other in results[1:]:
        assert other == pytest.approx(results[0], rel=1e-5)
    assert model.training and results[0]["loss"] == pytest.approx(results[0]["mel"] + results[0]["duration"])


def test_made_up_data_are_trained_on_and_not_evaluated(tmp_path):
    options = "--data synthetic --batch_size 2 --max_steps 2 --device cpu --log_every 1 --arch tiny".split()
    train.main([*options, "--output_dir", str(tmp_path)])
    fields = records.load(tmp_path).fields
    assert fields["status"] == "finished" and len(fields["curve"]["train.loss"]) == 2
    assert not [name for name in fields["metrics"] if name.startswith("val.")]


def test_blocks_that_compile_learn_the_same():
    torch.manual_seed(0)
    models = [FastSpeech(TINY).train() for _ in range(2)]
    models[1].load_state_dict(models[0].state_dict())
    fuse(models[1], backend="aot_eager")
    assert list(models[0].state_dict()) == list(models[1].state_dict())
    text, durations = torch.randint(1, 148, (2, 7)), torch.randint(0, 4, (2, 7))
    frames = durations.sum(1)
    mel = torch.randn(2, 80, int(frames.max()))
    batch = Batch(text, torch.tensor([7, 7]), durations, mel, frames)
    results = []
    for model in models:
        for module in model.modules():
            if hasattr(module, "dropout"):
                module.dropout = 0.0
        state = TrainState(model, torch.optim.SGD(model.parameters(), 1e-2), max_norm=1.0)
        results.append([train_step(state, [batch]).item() for _ in range(3)])
    assert results[0] == pytest.approx(results[1], rel=1e-5) and results[0][2] < results[0][0]
    assert all(hasattr(block, "_compiled_call_impl") for block in models[1].decoder.blocks)


def test_noam_rises_and_falls_with_the_root():
    rates = [train.noam(step, 1e-3, 100) for step in range(1000)]
    assert max(rates) == rates[99] == pytest.approx(1e-3)
    assert rates[49] == pytest.approx(5e-4) and rates[399] == pytest.approx(5e-4)
    assert rates[899] == pytest.approx(1e-3 * math.sqrt(100 / 900))


@pytest.mark.parametrize("path", sorted(CONFIGS.glob("*.yaml")), ids=lambda path: path.stem)
def test_recipes_are_valid(path):
    config = configs.parse(TrainConfig, ["--config", str(path)], configs_dir=CONFIGS)
    assert config.arch in registry.ARCHITECTURES
    measured = evaluate.options_of(["--checkpoint", "x", "--config", str(path)])  # the same data, not the same folder
    for item in dataclasses.fields(DataOptions):
        assert getattr(measured, item.name) == getattr(config, item.name)
    assert measured.output_dir == "runs/evaluate" and measured.precision == "fp32"


def test_first_losses_of_the_quickstart(monkeypatch):
    """Exact on the machine that the file names, else within what other kernels may round differently."""
    from dlx.speech import flite

    monkeypatch.delenv("DLX_HOME")
    try:
        flite.open_flite()
    except ValueError as error:
        pytest.skip(f"needs flite: {error}")
    path = Path(__file__).with_name("golden") / "make_quickstart.py"
    spec = importlib.util.spec_from_file_location("make_quickstart", path)
    make_quickstart = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(make_quickstart)
    assert golden.difference(make_quickstart.FILE, make_quickstart.first_losses(), rtol=2e-2) == ""
