"""Ends of a training that come from outside: signals with worker processes, kills, a second run, other settings."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image

import convnets
import dlx
from convnets import evaluate, options, quickstart, train
from convnets.folder import DataError
from dlx import checkpoint as checkpoints
from dlx import config as configs
from dlx import files, resuming, runlog, vision
from dlx import record as records

PATHS = [str(Path(package.__file__).resolve().parents[1]) for package in (dlx, convnets)]
ENVIRONMENT = {**os.environ, "PYTHONPATH": os.pathsep.join(PATHS), "OMP_NUM_THREADS": "1"}
RECIPE = (
    "--arch resnet8_small --epochs 2 --batch_size 2 --image_size 16 --lr 0.05 --lr_batch_size null --warmup_epochs 0"
    " --log_every 1 --device cpu --workers 0"
).split()
TORCHRUN = "dlx.entry torch.distributed.run --standalone --local-addr 127.0.0.1 --nproc-per-node 2 -m".split()


@pytest.fixture(scope="module")
def pictures(tmp_path_factory) -> Path:
    """Two classes of four pictures each to train on, two each to evaluate on."""
    folder = tmp_path_factory.mktemp("pictures")
    rng = np.random.default_rng(0)
    for split, count in (("train", 4), ("val", 2)):
        for name, level in (("dark", 60), ("light", 190)):
            (folder / split / name).mkdir(parents=True)
            for index in range(count):
                pixels = np.clip(rng.normal(level, 25, (24, 30, 3)), 0, 255).astype(np.uint8)
                Image.fromarray(pixels).save(folder / split / name / f"{index}.png")
    return folder


@pytest.fixture(autouse=True)
def one_thread():
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


def run(output: Path, pictures: Path, *more: str) -> dict:
    return train.main([*RECIPE, "--data_dir", str(pictures), "--output_dir", str(output), *more])


def newest(output: Path) -> checkpoints.Loaded:
    return checkpoints.Checkpoints(output / "checkpoints").resume("auto")


def signal_at(monkeypatch, step: int, number: int) -> None:
    """Send this process a signal during a step."""
    original = train.train_step

    def signalled(state, batch, mix=None):
        loss = original(state, batch, mix)
        if state.step == step:
            os.kill(os.getpid(), number)
        return loss

    monkeypatch.setattr(train, "train_step", signalled)


# ------------------------------------------------------------------------------------------------- signals


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGHUP])
@pytest.mark.parametrize("launcher", [[], TORCHRUN], ids=["one", "two"])
def test_signal_to_the_whole_group_saves(number, launcher, pictures, tmp_path):
    """Of one process with its loader's workers, as a scheduler does; of two through their launcher."""
    output = tmp_path / "run"
    arguments = [*RECIPE, "--data_dir", str(pictures), "--output_dir", str(output), "--workers", "1"]
    command = [sys.executable, "-m", *(launcher or ["dlx.entry"]), *(["dlx.entry"] if launcher else [])]
    process = subprocess.Popen(
        [*command, "convnets.train", *arguments, "--epochs", "5000", "--evaluate_epochs", "5000"],
        env=ENVIRONMENT, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, start_new_session=True,
    )  # fmt: skip
    try:
        for line in process.stdout:
            if "Epoch: 1 Iteration" in line:
                os.killpg(process.pid, number)
                break
        rest, _ = process.communicate(timeout=100)
    finally:
        process.kill()
    assert process.returncode == 128 + number, rest
    assert rest.count(f"{number.name}: stopped after step") == 1 and "the same command continues there" in rest
    assert newest(output).step >= 4 and records.load(output).fields["status"] == "stopped"


def test_stopped_run_leaves_with_the_signals_status(pictures, tmp_path, monkeypatch, capfd):
    signal_at(monkeypatch, 2, signal.SIGINT)
    with pytest.raises(checkpoints.Stopped) as stopped:
        run(tmp_path, pictures, "--resume", "none")
    assert stopped.value.code == 130 and newest(tmp_path).step == 2
    assert "SIGINT: stopped after step 2" in (error := capfd.readouterr().err)
    assert "the same command with --resume auto continues there" in error


def test_stopped_quickstart_does_not_go_on(pictures, tmp_path, monkeypatch, capsys):
    signal_at(monkeypatch, 2, signal.SIGTERM)
    with pytest.raises(checkpoints.Stopped) as stopped:
        quickstart.main([*RECIPE, "--data_dir", str(pictures), "--output_dir", str(tmp_path)])
    output = capsys.readouterr().out
    assert stopped.value.code == 143 and "2/4" in output and "3/4" not in output


def test_signal_in_the_last_evaluation(pictures, tmp_path, monkeypatch):
    """The training is complete, but whoever started it must not go on."""
    original = train.evaluate

    def signalled(*args, **kwargs):
        os.kill(os.getpid(), signal.SIGTERM)
        return original(*args, **kwargs)

    monkeypatch.setattr(train, "evaluate", signalled)
    with pytest.raises(checkpoints.Stopped):
        run(tmp_path, pictures, "--epochs", "1")
    assert records.load(tmp_path).fields["status"] == "finished" and newest(tmp_path).meta["metric"] is not None


def test_kill_in_an_evaluation_costs_only_the_evaluation(pictures, tmp_path, monkeypatch):
    run(tmp_path / "whole", pictures)
    with monkeypatch.context() as patched, pytest.raises(KeyboardInterrupt):

        def killed(*args, **kwargs):
            raise KeyboardInterrupt

        patched.setattr(train, "evaluate", killed)
        run(tmp_path / "parts", pictures)
    assert newest(tmp_path / "parts").step == 4 and newest(tmp_path / "parts").meta["metric"] is None
    run(tmp_path / "parts", pictures)
    ours, theirs = (records.load(tmp_path / name).fields for name in ("parts", "whole"))
    assert ours["curve"] == theirs["curve"] and ours["metrics"] == theirs["metrics"]
    ours, theirs = (newest(tmp_path / name) for name in ("parts", "whole"))
    assert ours.state["best"] == theirs.state["best"] and ours.meta["metric"] == theirs.meta["metric"]
    assert all(torch.equal(ours.model["model"][key], value) for key, value in theirs.model["model"].items())
    best = [(tmp_path / name / "checkpoints" / "best").read_text().split(".")[0] for name in ("parts", "whole")]
    assert best[0].strip() == best[1].strip()


# -------------------------------------------------------------------------------------- other runs and settings


def test_second_run_in_a_folder_is_refused(pictures, tmp_path, monkeypatch, capfd):
    monkeypatch.setattr(resuming, "LOCK_SECONDS", 0.1)
    with files.lock(tmp_path / ".lock"), pytest.raises(ValueError, match="another training is running in .*output_dir"):
        run(tmp_path, pictures)
    assert os.listdir(tmp_path) == [".lock"] and "waiting" in capfd.readouterr().err
    assert run(tmp_path, pictures)["status"] == "finished"


def test_other_settings_are_listed(pictures, tmp_path, recwarn):
    run(tmp_path, pictures, "--epochs", "1")
    run(tmp_path, pictures, "--epochs", "2", "--workers", "1", "--batch_size", "1", "--global_batch_size", "2")
    assert not [warning for warning in recwarn if "other settings" in str(warning.message)]
    other = tmp_path / "other"
    other.mkdir()
    for split in ("train", "val"):
        (other / split).symlink_to(pictures / split)
    more = ["--data_dir", str(other), "--seed", "5", "--image_size", "20", "--batch_size", "4", "--epochs", "4"]
    with pytest.warns(UserWarning, match="other settings") as found:
        run(tmp_path, pictures, *more)
    text = next(str(warning.message) for warning in found if "other settings" in str(warning.message))
    for part in ("seed: 1 -> 5", "image_size: 16 -> 20", "global_batch_size: 2 -> 4", f"data: {pictures} -> {other}"):
        assert part in text, text
    assert "lr:" not in text and "--resume none" in text


def test_nothing_left_is_said(pictures, tmp_path, capsys):
    run(tmp_path, pictures)
    assert "nothing left" not in capsys.readouterr().err
    run(tmp_path, pictures, "--max_steps", "6")
    assert "nothing left to train: step 8 of 6" in capsys.readouterr().err


def test_other_architecture_says_what_to_do(pictures, tmp_path):
    run(tmp_path, pictures, "--max_steps", "1")
    with pytest.raises(ValueError, match="--resume none or another --output_dir"):
        run(tmp_path, pictures, "--arch", "resnet14_small")


# ------------------------------------------------------------------------------------------------------ data


def test_missing_split_is_named(pictures, tmp_path):
    run(tmp_path / "run", pictures, "--max_steps", "1")
    (tmp_path / "only").mkdir()
    (tmp_path / "only" / "train").symlink_to(pictures / "train")
    arguments = ["--checkpoint", str(tmp_path / "run"), "--workers", "0", "--output_dir", str(tmp_path / "evaluated")]
    with pytest.raises(ValueError, match="no split 'val', only train"):
        evaluate.main([*arguments, "--data_dir", str(tmp_path / "only")])


def test_all_pictures_unreadable(pictures, tmp_path, monkeypatch):
    """Each passes the look at its header, none decodes."""
    run(tmp_path / "run", pictures, "--max_steps", "1")

    def unreadable(source):
        raise ValueError(f"{source}: cut short")

    monkeypatch.setattr(vision, "decode_image", unreadable)
    arguments = ["--checkpoint", str(tmp_path / "run"), "--workers", "0", "--output_dir", str(tmp_path / "evaluated")]
    with pytest.raises(ValueError, match="not one of the pictures to evaluate can be read"):
        evaluate.main([*arguments, "--data_dir", str(pictures), "--tolerant"])
    with pytest.raises(DataError, match="not one of the 8 pictures can be read.*cut short"):
        run(tmp_path / "other", pictures, "--tolerant")


def test_log_and_record_name_the_folder(pictures, tmp_path):
    assert run(tmp_path, pictures, "--max_steps", "1")["config"]["data"] == str(pictures)
    logged = [entry["data"] for entry in runlog.read(tmp_path) if entry.get("step") == "PARAMETER"]
    assert logged[-1]["data"] == str(pictures)
    assert options.DataOptions().data == "fashion-mnist"


def test_too_large_batch_says_which_fits(pictures, tmp_path):
    with pytest.raises(ValueError, match="lower --batch_size to 8 or less"):
        run(tmp_path / "run", pictures, "--batch_size", "64")


def test_quickstart_takes_few_pictures(pictures, tmp_path, capsys):
    arguments = ["--data_dir", str(pictures), "--output_dir", str(tmp_path), "--workers", "0", "--device", "cpu"]
    quickstart.main([*arguments, "--epochs", "1", "--image_size", "16"])
    output = capsys.readouterr().out
    assert "8 pictures: batch_size 128 -> 2, lr 0.2 -> 0.003125" in output and "top-1 on 4 pictures" in output
    saved = json.loads((newest(tmp_path).path / "meta.json").read_text())["metadata"]["config"]
    assert saved["batch_size"] == 2


def test_quickstart_leaves_a_fitting_batch_alone():
    config = configs.parse(train.TrainConfig, ["--batch_size", "64", "--lr", "0.5"], exit_on_error=False)
    quickstart.fit_batch(config, 256)
    assert (config.batch_size, config.lr) == (64, 0.5)
    quickstart.fit_batch(config, 200)
    assert (config.batch_size, config.lr) == (50, 0.5)  # the default lr_batch_size scales the rate already
