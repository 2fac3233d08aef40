"""The examples run, learn, go on from a checkpoint, and work in two processes."""

from __future__ import annotations

import importlib.util
import os
import subprocess
import sys
from pathlib import Path
from types import ModuleType

import numpy as np
import pytest
import torch
from PIL import Image

EXAMPLES = Path(__file__).parents[1] / "examples"


def load(name: str) -> ModuleType:
    spec = importlib.util.spec_from_file_location(f"fusedops_example_{name}", EXAMPLES / f"{name}.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two classes of pictures that a glance tells apart: dark and bright."""
    root = tmp_path_factory.mktemp("pictures")
    random = np.random.default_rng(0)
    for split, count in (("train", 48), ("val", 12)):
        for name, level in (("bright", 190), ("dark", 60)):
            (root / split / name).mkdir(parents=True)
            for number in range(count):
                pixels = random.normal(level, 20, (40, 48, 3)).clip(0, 255).astype(np.uint8)
                Image.fromarray(pixels).save(root / split / name / f"{number}.png")
    return root


@pytest.mark.parametrize("level", ["none", "O0", "O1", "O2"])
def test_classification_learns(folder: Path, level: str) -> None:
    example = load("main_amp")
    words = f"{folder} --device cpu -b 16 --epochs 3 --opt-level {level} --seed 1"
    found = example.run(example.parse(words.split()))
    assert found["top1"] > 90 and found["images_per_second"] > 0


def test_classification_goes_on_from_a_checkpoint(folder: Path, tmp_path: Path, capsys) -> None:
    example = load("main_amp")
    file = tmp_path / "state.pt"
    words = f"{folder} --device cpu -b 16 --epochs 2 --opt-level O1 --checkpoint {file}"
    example.run(example.parse(words.split()))
    assert torch.load(file, weights_only=True)["epoch"] == 2
    capsys.readouterr()
    example.run(example.parse([*words.split(), "--epochs", "3", "--resume", str(file)]))
    assert "epoch 3/3" in (text := capsys.readouterr().out) and "epoch 2/3" not in text


def test_two_processes_with_synchronised_norms(folder: Path) -> None:
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--local-addr", "127.0.0.1"]
    command += ["--nproc-per-node", "2", str(EXAMPLES / "main_amp.py"), str(folder), "--device", "cpu"]
    done = subprocess.run(
        [*command, "-b", "8", "--epochs", "2", "--sync-bn"],
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=240,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    assert done.stdout.count("epoch 2/2: top-1") == 1


@pytest.mark.parametrize("words", ["--epochs 0", "--batch-size 0", "--opt-level O4", "--arch vgg"])
def test_bad_arguments(words: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        load("main_amp").parse(words.split())
    assert words.split()[0] in capsys.readouterr().err


def test_an_empty_folder_is_named(tmp_path: Path) -> None:
    for split in ("train", "val"):
        (tmp_path / split).mkdir()
    example = load("main_amp")
    with pytest.raises(ValueError, match=f"{tmp_path}/train: no pictures"):
        example.run(example.parse([str(tmp_path), "--device", "cpu"]))


@pytest.mark.parametrize("level", ["none", "O1", "O2"])
def test_dcgan(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, level: str) -> None:
    example = load("dcgan")
    shapes = torch.zeros(64, 1, 32, 32, dtype=torch.uint8)
    shapes[:, :, 8:24, 8:24] = 255
    monkeypatch.setattr(example, "pictures", lambda count: shapes)
    words = f"--device cpu --width 8 -b 16 --opt-level {level} --output_dir {tmp_path}"
    first = example.run(example.parse([*words.split(), "--epochs", "1"]))
    later = example.run(example.parse([*words.split(), "--epochs", "6"]))
    assert later["discriminator"] < first["discriminator"] < 3  # squares are easily told from noise at first
    assert Image.open(tmp_path / "epoch_006.png").size == (256, 256)


def test_dcgan_of_too_few_pictures(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    example = load("dcgan")
    monkeypatch.setattr(example, "pictures", lambda count: torch.zeros(4, 1, 32, 32, dtype=torch.uint8))
    with pytest.raises(ValueError, match="4 pictures are too few for 1 x 128 of a step"):
        example.run(example.parse(["--device", "cpu", "--output_dir", str(tmp_path)]))
