"""Training end to end on a few made-up sounds: learning, resume, two processes, recipes, both kinds of model."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch

import dlx
import tacotron2
from dlx import checkpoint as checkpoints
from dlx import config as configs
from dlx import record as records
from tacotron2 import evaluate, pretrained, registry, train
from tacotron2.options import CONFIGS
from tacotron2.recipe import TrainConfig
from tacotron2.registry import Architecture
from tacotron2.step import hide_frames
from tacotron2.waveglow import WaveGlowConfig

audio = pytest.importorskip("dlx.speech.audio", reason="needs soundfile")
SMALL = "--batch_size 2 --lr 0.002 --lr_schedule constant --workers 0 --device cpu --log_every 1 --listen 1".split()
PATHS = [str(Path(package.__file__).resolve().parents[1]) for package in (dlx, tacotron2)]


@pytest.fixture(autouse=True)
def small_and_alone(monkeypatch, tmp_path_factory):
    """Two tiny models, one thread, caches of their own."""
    voice = registry.Tacotron2Config(encoder=16, prenet=8, rnn=16, postnet=8)
    vocoder = WaveGlowConfig(channels=8, upsample_groups=80, condition=8, flows=4, layers=2)
    monkeypatch.setitem(registry.ARCHITECTURES, "tiny_voice", Architecture(voice, 0))
    monkeypatch.setitem(registry.ARCHITECTURES, "tiny_vocoder", Architecture(vocoder, 0))
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
            time = np.arange(int(22050 * generator.uniform(0.35, 0.6))) / 22050
            tone = 0.3 * np.sin(2 * np.pi * (150 + 20 * number) * time).astype(np.float32)
            audio.write_wav(folder / f"{split}{number}.wav", tone, 22050)
            lines.append(f"{folder}/{split}{number}.wav|tone number {words[number % 6]}")
        (folder / f"{split}.txt").write_text("\n".join(lines) + "\n")
    return ["--train_list", str(folder / "train.txt"), "--val_list", str(folder / "val.txt")]


def weights_of(output: Path) -> dict[str, torch.Tensor]:
    return checkpoints.load(checkpoints.Checkpoints(output / "checkpoints").latest()).model["model"]


def test_a_voice_learns_and_its_report_can_be_heard(lists, tmp_path):
    train.main([*SMALL, *lists, "--arch", "tiny_voice", "--epochs", "3", "--output_dir", str(tmp_path)])
    record = records.load(tmp_path).fields
    losses = [loss for _, loss in record["curve"]["train.loss"]]
    assert len(losses) == 12 and np.mean(losses[-3:]) < 0.98 * np.mean(losses[:3])
    assert {"val.loss", "val.focus", "val.diagonal", "val.best_loss"} <= set(record["metrics"])
    sounds = record["attachments"]["audio"]
    assert len(sounds) == 2 and all((tmp_path / entry["file"]).stat().st_size > 1000 for entry in sounds)
    assert (tmp_path / record["attachments"]["samples"][0]["image"]).is_file()
    assert "data:audio/wav" in (tmp_path / "report.html").read_text()
    found = pretrained.load(tmp_path)
    assert found.arch == "tiny_voice" and len(found.front_end.symbols) == 148 and found.mel.hop_length == 256
    again = evaluate.main(
        [*lists, "--checkpoint", str(tmp_path), "--batch_size", "3", "--workers", "0", "--device", "cpu"]
        + ["--output_dir", str(tmp_path / "again")]
    )
    assert again["loss"] == pytest.approx(record["metrics"]["val.best_loss"]["value"], rel=0.05)  # other dropout
    tuned = tmp_path / "tuned"
    more = ["--arch", "tiny_voice", "--init_from", str(tmp_path), "--max_steps", "1", "--hide", "0.5"]
    train.main([*SMALL, *lists, *more, "--output_dir", str(tuned)])
    captions = [entry["caption"] for entry in records.load(tuned).fields["attachments"]["audio"]]
    assert len(captions) == 3 and sum("(before training)" in caption for caption in captions) == 1
    assert (tuned / "samples" / "00_before.wav").stat().st_size > 1000


def test_frames_are_hidden_in_runs():
    torch.manual_seed(0)
    mel = torch.rand(4, 3, 5000) + 1
    assert hide_frames(mel, 0.0, 8) is mel
    hidden = hide_frames(mel, 0.3, 8)
    gone = hidden[:, 0] == 0
    assert torch.equal(hidden, torch.where(gone[:, None], 0, mel))  # all bands of a frame, nothing else
    assert gone.float().mean().item() == pytest.approx(0.3, abs=0.02)
    for row in gone[:, 8:-8].int():
        edges = torch.cat((row.new_zeros(1), row, row.new_zeros(1))).diff()
        runs = (edges == -1).nonzero() - (edges == 1).nonzero()
        assert (runs[1:-1] >= 8).all()


def test_a_vocoder_learns(lists, tmp_path):
    arguments = ["--arch", "tiny_vocoder", "--segment", "2048", "--epochs", "3", "--output_dir", str(tmp_path)]
    train.main([*SMALL, *lists, *arguments])
    record = records.load(tmp_path).fields
    losses = [loss for _, loss in record["curve"]["train.loss"]]
    assert len(losses) == 12 and np.mean(losses[-3:]) < np.mean(losses[:3])
    assert pretrained.load(tmp_path).front_end is None


def test_resumed_in_the_middle_of_an_epoch_is_the_uninterrupted_run(lists, tmp_path):
    arguments = [*SMALL, *lists, "--arch", "tiny_voice", "--epochs", "2", "--listen", "0"]
    train.main([*arguments, "--save_steps", "3", "--keep_checkpoints", "9", "--output_dir", str(tmp_path / "whole")])
    middle = next(
        path
        for path in (tmp_path / "whole" / "checkpoints").iterdir()
        if path.is_dir() and checkpoints.load(path).step == 3
    )
    shutil.copytree(middle, tmp_path / "resumed" / "checkpoints" / middle.name)
    train.main([*arguments, "--output_dir", str(tmp_path / "resumed")])
    ours, theirs = weights_of(tmp_path / "resumed"), weights_of(tmp_path / "whole")
    assert all(torch.equal(ours[key], theirs[key]) for key in theirs)


def test_two_processes_measure_what_one_does(lists, tmp_path):
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(PATHS), "OMP_NUM_THREADS": "1"}
    launcher = "-m dlx.entry torch.distributed.run --standalone --local-addr 127.0.0.1 --nproc-per-node 2 -m".split()
    arguments = [*SMALL, *lists, "--arch", "waveglow_compact", "--segment", "1024", "--max_steps", "1"]
    done = subprocess.run(
        [sys.executable, *launcher, "tacotron2.train", *arguments, "--output_dir", str(tmp_path / "two")],
        env=environment, capture_output=True, text=True, timeout=240,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-3000:]
    train.main([*arguments, "--global_batch_size", "4", "--output_dir", str(tmp_path / "one")])
    one, two = (records.load(tmp_path / name).fields for name in ("one", "two"))
    for curve in ("train.loss", "val.loss"):
        np.testing.assert_allclose(np.array(one["curve"][curve]), np.array(two["curve"][curve]), rtol=1e-3)


@pytest.mark.parametrize("path", sorted(CONFIGS.glob("*.yaml")), ids=lambda path: path.stem)
def test_recipes_are_valid(path):
    config = configs.parse(TrainConfig, ["--config", str(path)], configs_dir=CONFIGS)
    assert config.arch in registry.ARCHITECTURES


def test_evaluation_takes_the_data_of_a_recipe():
    measured = evaluate.options_of(["--checkpoint", "x", "--config", "flite"])
    assert (measured.data, measured.utterances, measured.voices) == ("flite-speech", 6000, ["rms"])
    assert measured.output_dir == "runs/evaluate" and measured.precision == "fp32"
