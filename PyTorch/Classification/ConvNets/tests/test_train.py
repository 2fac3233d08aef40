"""Whole runs on a few pictures: resumed, stopped, on two processes, with mistakes in them (cases O13, O25)."""

from __future__ import annotations

import importlib.util
import json
import math
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
from convnets import evaluate, options, pretrained, quickstart, registry, samples, train
from convnets.folder import DataError
from convnets.options import CONFIGS
from dlx import checkpoint as checkpoints
from dlx import config as configs
from dlx import golden, runlog
from dlx import record as records
from dlx.task import TORCHRUN

TESTS = Path(__file__).parent


def load_script(path: Path):
    specification = importlib.util.spec_from_file_location(path.stem, path)
    module = importlib.util.module_from_spec(specification)
    specification.loader.exec_module(module)
    return module


small_run = load_script(TESTS / "small_run.py")
PATHS = [str(Path(package.__file__).resolve().parents[1]) for package in (dlx, convnets)]
ENVIRONMENT = {**os.environ, "PYTHONPATH": os.pathsep.join(PATHS), "OMP_NUM_THREADS": "1"}
RECIPE = (
    "--arch resnet8_small --epochs 2 --batch_size 8 --lr 0.05 --lr_batch_size null --warmup_epochs 0.5 --log_every 1"
    " --device cpu --workers 0"
).split()


@pytest.fixture(autouse=True)
def small_data(monkeypatch):
    """One thread (the models are tiny), and data of a few made-up pictures unless a test asks for others."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    monkeypatch.setattr(options, "open_data", lambda *args, **kwargs: small_run.make_splits())
    yield
    torch.set_num_threads(threads)


def run(output: Path, *more: str) -> dict:
    return train.main([*RECIPE, "--output_dir", str(output), *more])


def start(jobs: list[dict], *launcher: str) -> subprocess.Popen:
    command = [sys.executable, *launcher, str(TESTS / "small_run.py"), json.dumps(jobs)]
    return subprocess.Popen(command, env=ENVIRONMENT, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)


def finish(process: subprocess.Popen) -> str:
    try:
        output, _ = process.communicate(timeout=120)
    finally:
        process.kill()
    assert process.returncode == 0, output
    return output


def newest(output: Path) -> checkpoints.Loaded:
    return checkpoints.Checkpoints(output / "checkpoints").resume("auto")


def assert_equal(one, other, where="") -> None:
    """Nested state, to the last bit."""
    assert type(one) is type(other), where
    if isinstance(one, torch.Tensor):
        assert torch.equal(one, other), where
    elif isinstance(one, dict):
        assert list(one) == list(other), where
        for key in one:
            assert_equal(one[key], other[key], f"{where}.{key}")
    elif isinstance(one, list | tuple):
        assert len(one) == len(other), where
        for index, pair in enumerate(zip(one, other, strict=True)):
            assert_equal(*pair, f"{where}[{index}]")
    elif isinstance(one, np.ndarray):
        assert np.array_equal(one, other), where
    else:
        assert one == other, where


def assert_same_run(one: Path, other: Path) -> None:
    """Parameters, averages, optimiser, random states, curves and results."""
    first, second = newest(one), newest(other)
    assert first.step == second.step
    assert_equal(first.model, second.model, "model")
    assert_equal(first.state, second.state, "state")
    ours, theirs = records.load(one).fields, records.load(other).fields
    assert_equal(ours["curve"], theirs["curve"], "curve")
    assert ours["metrics"] == theirs["metrics"]
    assert ours["attachments"]["confusion"] == theirs["attachments"]["confusion"]


# ------------------------------------------------------------------------------------------ stop and resume


@pytest.fixture(scope="module")
def stopped_runs(tmp_path_factory) -> Path:
    """`whole` went straight through its 6 steps; `end` and `middle` got a SIGTERM after step 3 (the last of an epoch)
    and 4, and were continued by a new process; `after_stop` keeps what they were in between."""
    folder = tmp_path_factory.mktemp("stopped")
    recipe = [*RECIPE, "--batch_size", "4", "--global_batch_size", "8", "--ema_decay", "0.7", "--mixup", "0.3"]
    recipe += ["--augmentation", "erase", "--save_steps", "5"]
    jobs = [{"verb": "train", "args": [*recipe, "--output_dir", str(folder / "whole")]}]
    for name, step in (("end", 3), ("middle", 4)):
        job = {"verb": "train", "args": [*recipe, "--output_dir", str(folder / name)]}
        jobs.append(job | {"pause_at": step, "pause_file": str(folder / f"{name}.go")})
    process = start(jobs)
    waiting = iter(["end", "middle"])
    for line in process.stdout:
        if line == "PAUSED\n":
            process.send_signal(signal.SIGTERM)
            (folder / f"{next(waiting)}.go").touch()
    finish(process)
    facts = {}
    for name in ("end", "middle"):
        facts[name] = {"step": newest(folder / name).step, "status": records.load(folder / name).fields["status"]}
    (folder / "facts.json").write_text(json.dumps(facts))
    finish(start([{"verb": "train", "args": job["args"]} for job in jobs[1:]]))
    return folder


def test_sigterm_saves_and_leaves_cleanly(stopped_runs):
    facts = json.loads((stopped_runs / "facts.json").read_text())
    assert facts == {"end": {"step": 3, "status": "stopped"}, "middle": {"step": 4, "status": "stopped"}}


@pytest.mark.parametrize("name", ["end", "middle"])
def test_resumed_run_is_the_uninterrupted_one(stopped_runs, name):
    """User case O25, bit for bit; also where the signal came between an epoch's last step and its evaluation."""
    assert_same_run(stopped_runs / "whole", stopped_runs / name)
    curve = records.load(stopped_runs / name).fields["curve"]
    assert [step for step, _ in curve["train.loss"]] == [1, 2, 3, 4, 5, 6]
    assert [step for step, _ in curve["val.top1"]] == [3, 6]
    resumed = [entry["data"] for entry in runlog.read(stopped_runs / name) if "resumed_from" in entry.get("data", {})]
    assert len(resumed) == 1
    assert list((stopped_runs / name / "samples").glob("*.png")) and (stopped_runs / name / "report.html").is_file()


def test_killed_run_keeps_its_curve(tmp_path, monkeypatch):
    """A kill leaves no record and perhaps log lines past the checkpoint; the record of the resumed run is whole."""
    run(tmp_path / "whole", "--save_steps", "2")
    step = train.train_step

    def killed(state, batch, mix=None):
        if state.step == 5:
            raise KeyboardInterrupt
        return step(state, batch, mix)

    monkeypatch.setattr(train, "train_step", killed)
    with pytest.raises(KeyboardInterrupt):
        run(tmp_path / "parts", "--save_steps", "2")
    monkeypatch.setattr(train, "train_step", step)
    assert newest(tmp_path / "parts").step == 4 and not (tmp_path / "parts" / "record.json").exists()
    run(tmp_path / "parts", "--save_steps", "2")
    assert_same_run(tmp_path / "whole", tmp_path / "parts")


def test_finished_run_again_keeps_its_results(tmp_path):
    first = run(tmp_path)
    again = run(tmp_path)
    for key in ("metrics", "curve", "attachments"):
        assert again[key] == first[key], key
    assert again["status"] == "finished" and newest(tmp_path).step == 6


def test_more_epochs_continue_and_none_starts_over(tmp_path, capsys):
    run(tmp_path, "--epochs", "1")
    assert "starting fresh" in capsys.readouterr().err
    longer = run(tmp_path)
    assert [step for step, _ in longer["curve"]["train.loss"]] == [1, 2, 3, 4, 5, 6]
    fresh = run(tmp_path, "--resume", "none", "--epochs", "1")
    assert [step for step, _ in fresh["curve"]["train.loss"]] == [1, 2, 3] and newest(tmp_path).step == 3
    continued = run(tmp_path)  # continues the fresh one: the log of the older run is not its curve
    assert continued["curve"]["train.loss"][:3] == fresh["curve"]["train.loss"]


def test_resume_from_another_folder(tmp_path):
    run(tmp_path / "a", "--epochs", "1")
    checkpoint = next((tmp_path / "a" / "checkpoints").glob("step_*"))
    for number, source in enumerate((tmp_path / "a", tmp_path / "a" / "checkpoints", checkpoint)):
        fields = run(tmp_path / f"b{number}", "--resume", str(source))
        assert [step for step, _ in fields["curve"]["train.loss"]] == [4, 5, 6]
    with pytest.raises(ValueError, match="no such folder"):
        run(tmp_path / "c", "--resume", str(tmp_path / "nowhere"))
    (tmp_path / "empty").mkdir()
    assert (
        run(tmp_path / "d", "--resume", str(tmp_path / "empty"), "--max_steps", "1")["metrics"]["steps"]["value"] == 1
    )


def test_foreign_files_are_not_started_over(tmp_path):
    (tmp_path / "checkpoints").mkdir()
    (tmp_path / "checkpoints" / "model_final.pth").write_bytes(b"another program's")
    with pytest.raises(ValueError, match=r"no checkpoint here.*model_final\.pth"):
        run(tmp_path)
    assert sorted(os.listdir(tmp_path)) == [".lock", "checkpoints"]


def test_checkpoint_of_something_else_is_refused(tmp_path, monkeypatch):
    run(tmp_path, "--max_steps", "1")
    with pytest.raises(ValueError, match="holds a resnet8_small, not a resnet14_small"):
        run(tmp_path, "--arch", "resnet14_small")
    monkeypatch.setattr(options, "open_data", lambda *args, **kwargs: small_run.make_splits(["elk", "fox"]))
    with pytest.raises(ValueError, match=r"other classes \(ant, bee.*elk, fox"):
        run(tmp_path)


# -------------------------------------------------------------------------------------------- two processes


@pytest.fixture(scope="module")
def two_processes(tmp_path_factory) -> Path:
    """Runs of two processes over gloo, all in one launch."""
    folder = tmp_path_factory.mktemp("two")
    recipe = [*RECIPE, "--batch_size", "4", "--global_batch_size", "8"]
    jobs = [{"verb": "train", "args": [*recipe, "--ema_decay", "0.7", "--output_dir", str(folder / "two")]}]
    check = f"--checkpoint {folder / 'two'} --batch_size 5 --workers 0 --device cpu --output_dir {folder / 'evaluated'}"
    jobs.append({"verb": "evaluate", "args": check.split()})
    # Dropout and stochastic depth draw random numbers, other ones on each process.
    drawing = [*RECIPE, "--arch", "efficientnet_b0", "--image_size", "32", "--batch_size", "4", "--max_steps", "4"]
    drawing += ["--lr", "1e-6", "--save_steps", "2", "--keep_checkpoints", "5", "--evaluate_epochs", "9"]
    jobs.append({"verb": "train", "args": [*drawing, "--output_dir", str(folder / "straight")]})
    middle = str(folder / "straight" / "checkpoints" / "step_00000002")
    jobs.append({"verb": "train", "args": [*drawing, "--output_dir", str(folder / "resumed"), "--resume", middle]})
    output = finish(start(jobs, "-m", *TORCHRUN, "--nproc-per-node", "2"))
    (folder / "output.txt").write_text(output)
    return folder


def test_two_processes_train_like_one_with_accumulation(two_processes, tmp_path):
    recipe = ["--batch_size", "4", "--global_batch_size", "8", "--ema_decay", "0.7"]
    one, two = run(tmp_path, *recipe), records.load(two_processes / "two").fields
    assert len(one["curve"]["train.loss"]) == 6
    np.testing.assert_allclose(one["curve"]["train.loss"], two["curve"]["train.loss"], rtol=2e-4)
    np.testing.assert_allclose(one["curve"]["train.lr"], two["curve"]["train.lr"], rtol=0)
    ours, theirs = newest(tmp_path).model["model"], newest(two_processes / "two").model["model"]
    for name in (name for name, value in ours.items() if value.is_floating_point() and "running" not in name):
        assert torch.allclose(ours[name], theirs[name], atol=1e-4), name


def test_evaluation_on_two_processes_is_exact(two_processes, tmp_path):
    """37 samples: every one counts once, and with the statistics of the model that is saved."""
    arguments = f"--checkpoint {two_processes / 'two'} --batch_size 8 --workers 0 --output_dir {tmp_path}"
    alone = evaluate.main(arguments.split())
    assert alone["samples"] == small_run.VAL
    during = records.load(two_processes / "two").fields
    after = records.load(two_processes / "evaluated").fields
    for fields in (during, after):
        assert fields["metrics"]["val.samples"]["value"] == small_run.VAL
        assert fields["metrics"]["val.loss"]["value"] == pytest.approx(alone["loss"], rel=1e-5)
        assert fields["metrics"]["val.top1"]["value"] == pytest.approx(alone["top1"])
        assert np.sum(fields["attachments"]["confusion"]["matrix"]) == small_run.VAL
        assert fields["attachments"]["confusion"]["matrix"] == alone["confusion"]


def test_only_the_first_process_writes(two_processes):
    entries = list(runlog.read(two_processes / "two"))
    assert sum(entry.get("step") == "RUN" for entry in entries) == 1
    assert [entry["step"] for entry in entries if "train.loss" in entry.get("data", {})] == [
        [(step - 1) // 3, step] for step in range(1, 7)
    ]
    assert (two_processes / "output.txt").read_text().count(
        "Epoch: 0 Iteration: 1 "
    ) == 2  # once per training from the start


def test_two_processes_resume_bit_exactly(two_processes):
    """Each with its own random state: dropout goes on where it was."""
    straight, resumed = (newest(two_processes / name) for name in ("straight", "resumed"))
    assert straight.step == resumed.step == 4
    assert_equal(straight.model, resumed.model)
    assert_equal(straight.state, resumed.state)
    first, second = straight.state["rng"]
    assert not torch.equal(first["torch"], second["torch"])


def test_one_process_continues_what_two_began(two_processes, tmp_path):
    """And the other way the optimiser's state is equally at home: nothing in it depends on the world."""
    last = newest(two_processes / "two")
    recipe = ["--batch_size", "8", "--ema_decay", "0.7", "--epochs", "3"]
    fields = run(tmp_path, *recipe, "--resume", str(last.path))
    assert [step for step, _ in fields["curve"]["train.loss"]] == [7, 8, 9]
    assert newest(tmp_path).metadata["world_size"] == 1


@pytest.mark.multigpu
@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two CUDA devices")
def test_a_captured_step_of_two_gpus_is_the_eager_one(tmp_path):
    curves, weights = [], []
    for engine in ("eager", "graph"):
        recipe = "--arch resnet8_small --data synthetic --batch_size 32 --max_steps 8 --precision fp32 --log_every 1"
        arguments = [*recipe.split(), "--engine", engine, "--output_dir", str(tmp_path / engine)]
        command = [sys.executable, "-m", *TORCHRUN, "--nproc-per-node", "2", "-m", "convnets.train", *arguments]
        done = subprocess.run(command, capture_output=True, text=True, timeout=240)
        assert done.returncode == 0, done.stderr[-3000:]
        curves.append(records.load(tmp_path / engine).fields["curve"]["train.loss"])
        weights.append(newest(tmp_path / engine).model["model"])
    np.testing.assert_allclose(curves[1], curves[0], rtol=1e-4)
    for name, value in weights[0].items():
        torch.testing.assert_close(weights[1][name], value, rtol=1e-3, atol=1e-5, msg=name)


# ------------------------------------------------------------------------------------------------- mistakes


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--batchsize", "8"], ["unknown key '--batchsize'", "batch_size"]),
        (["--batch_size", "0"], ["batch_size", "at least 1", "0"]),
        (["--precision", "int4"], ["precision", "bf16", "int4"]),
        (["--label_smoothing", "1.0"], ["label_smoothing", "less than 1"]),
        (["--epochs", "many"], ["epochs", "int", "many"]),
        (["--augmentation", "autoaugmnt"], ["augmentation", "autoaugment"]),
        (["--config", "resnet5"], ["resnet5", "resnet50"]),
        (["--lr"], ["--lr", "needs a value"]),
        (["resnet50"], ["resnet50", "--key value"]),
    ],
)
def test_bad_option_is_one_line(arguments, words, tmp_path, capsys):
    with pytest.raises(SystemExit) as stopped:
        run(tmp_path / "out", *arguments)
    lines = capsys.readouterr().err.splitlines()
    assert stopped.value.code == 2 and len(lines) == 1
    assert all(word in lines[0] for word in words), lines[0]
    assert not (tmp_path / "out").exists()


def test_bad_key_in_a_file_is_named(tmp_path, capsys):
    (tmp_path / "mine.yaml").write_text("arch: resnet8_small\nlearning_rate: 0.1\n")
    with pytest.raises(SystemExit):
        run(tmp_path / "out", "--config", str(tmp_path / "mine.yaml"))
    error = capsys.readouterr().err
    assert "mine.yaml" in error and "learning_rate" in error and error.count("\n") == 1


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--global_batch_size", "12"], "12.*8"),
        (["--global_batch_size", "32"], "32 is more than the 24 training images"),
        (["--batch_size", "32"], "24 training samples do not fill one global batch of 32"),
        (["--arch", "resnet8_smal"], "resnet8_small"),
        (["--engine", "graph"], "CUDA"),
        (["--device", "cuda:7"], "cuda:7"),
        (["--augmentation", "autoaugment"], "picture files"),
        (["--data_backend", "dali-cpu"], "fashion-mnist"),
        (["--init_from", "nothing_known"], r"nothing_known.*mobilenet_v2\.imagenet"),
    ],
)
def test_what_cannot_work_is_said_before_training(arguments, message, tmp_path):
    with pytest.raises(ValueError, match=message):
        run(tmp_path / "out", *arguments)
    assert not (tmp_path / "out").exists()


@pytest.mark.filterwarnings("ignore:train.loss is nan")
@pytest.mark.parametrize("more", [[], ["--log_every", "100", "--save_steps", "1"], ["--log_every", "100"]])
def test_divergence_stops_and_names_the_last_good_checkpoint(more, tmp_path, monkeypatch):
    """Found by the logged loss, by a save, or at the end of the epoch; what is not finite is never saved."""
    run(tmp_path, "--epochs", "1")
    step = train.train_step

    def diverging(state, batch, mix=None):
        loss = step(state, batch, mix)
        if state.step == 5:
            state.model.fc.weight.data[1, 2] = math.nan
        return loss

    monkeypatch.setattr(train, "train_step", diverging)
    with pytest.raises(ArithmeticError, match=r"last good checkpoint is .*step_0000000[34]\. Lower lr \(0\.05\)"):
        run(tmp_path, *more)
    assert newest(tmp_path).step == (4 if "--save_steps" in more else 3)
    assert all(torch.isfinite(value).all() for value in newest(tmp_path).model["model"].values())


# ---------------------------------------------------------------------------------------------------- options


def test_max_steps_ends_the_schedule_there(tmp_path):
    fields = run(tmp_path, "--max_steps", "4", "--warmup_epochs", "0", "--end_lr", "0.01")
    rates = [rate for _, rate in fields["curve"]["train.lr"]]
    assert rates == pytest.approx([0.01 + 0.04 * (1 + math.cos(math.pi * step / 4)) / 2 for step in range(4)])
    assert fields["metrics"]["steps"]["value"] == 4 and "val.top1" in fields["metrics"]


def test_rate_follows_the_global_batch(tmp_path):
    recipe = ["--batch_size", "4", "--global_batch_size", "12", "--lr_batch_size", "6", "--lr_schedule", "constant"]
    fields = run(tmp_path, *recipe, "--warmup_epochs", "0", "--max_steps", "1")
    assert fields["curve"]["train.lr"] == [[1, 0.1]]


def test_init_from_a_run(tmp_path, monkeypatch):
    run(tmp_path / "first", "--ema_decay", "0.5")
    source = pretrained.load(tmp_path / "first").model.state_dict()
    still = ["--lr", "1e-12", "--max_steps", "1", "--weight_decay", "0", "--init_from", str(tmp_path / "first")]
    run(tmp_path / "same", *still)
    same = newest(tmp_path / "same").model["model"]
    assert all(
        torch.allclose(source[name], value)
        for name, value in same.items()
        if "running" not in name and "num_" not in name
    )
    monkeypatch.setattr(options, "open_data", lambda *args, **kwargs: small_run.make_splits(["elk", "fox"]))
    run(tmp_path / "other", *still)
    other = newest(tmp_path / "other").model["model"]
    assert other["fc.weight"].shape[0] == 2  # a fresh head under the trained body
    assert torch.allclose(source["layer1.0.conv1.weight"], other["layer1.0.conv1.weight"])
    with pytest.raises(ValueError, match="holds a resnet8_small, not a resnet14_small"):
        run(tmp_path / "bad", *still, "--arch", "resnet14_small")


def test_training_learns_and_the_record_is_whole(tmp_path):
    fields = run(tmp_path, "--epochs", "6", "--augmentation", "none", "--tensorboard")
    assert fields["metrics"]["val.best_top1"]["value"] > 80
    assert fields["status"] == "finished" and fields["seed"] == 1 and fields["versions"]["torch"]
    found = records.load(tmp_path).fields["attachments"]
    assert found["model"]["arch"] == "resnet8_small" and found["confusion"]["labels"] == small_run.CLASSES
    assert len(found["samples"]) == samples.COUNT
    assert all((tmp_path / shown["image"]).is_file() for shown in found["samples"])
    assert list((tmp_path / "tb").iterdir())
    best = (tmp_path / "checkpoints" / "best").read_text().strip()
    meta = json.loads((tmp_path / "checkpoints" / best / "meta.json").read_text())
    assert meta["metric"] == fields["metrics"]["val.best_top1"]["value"]


@pytest.mark.parametrize("path", sorted(CONFIGS.glob("*.yaml")), ids=lambda path: path.stem)
def test_recipe_is_complete(path):
    config = configs.parse(train.TrainConfig, ["--config", path.stem], configs_dir=CONFIGS, exit_on_error=False)
    assert config.arch in registry.ARCHITECTURES
    assert config.warmup_epochs < config.epochs and config.output_dir.startswith("runs/")
    assert 1e-3 < config.lr * (1 if config.lr_batch_size is None else config.batch_size / config.lr_batch_size) < 20


# ------------------------------------------------------------------------------------------------ own folder


@pytest.fixture
def pictures(tmp_path, monkeypatch) -> Path:
    """Two classes of four JPEG each to train on, three PNG each to evaluate on."""
    monkeypatch.undo()  # real data from here on
    monkeypatch.setenv("DLX_HOME", str(tmp_path / "home"))
    rng = np.random.default_rng(0)
    for split, count, suffix in (("train", 4, "jpg"), ("val", 3, "png")):
        for name, level in (("dark", 60), ("light", 190)):
            folder = tmp_path / "pictures" / split / name
            folder.mkdir(parents=True)
            for index in range(count):
                pixels = np.clip(rng.normal(level, 25, (40, 50, 3)), 0, 255).astype(np.uint8)
                Image.fromarray(pixels).save(folder / f"{index}.{suffix}")
    return tmp_path / "pictures"


FOLDER_RECIPE = ["--batch_size", "2", "--image_size", "16", "--epochs", "1", "--warmup_epochs", "0"]


def test_own_folder(pictures, tmp_path):
    fields = run(tmp_path / "run", *FOLDER_RECIPE, "--data_dir", str(pictures), "--augmentation", "autoaugment")
    assert fields["metrics"]["steps"]["value"] == 4 and fields["metrics"]["val.samples"]["value"] == 6
    assert fields["attachments"]["model"]["classes"] == ["dark", "light"] and fields["data"] == {}


def test_bad_files_strict_and_tolerant(pictures, tmp_path):
    """User case O13: one cut file and one missing among 8."""
    cut, missing = pictures / "train" / "dark" / "1.jpg", pictures / "train" / "light" / "2.jpg"
    cut.write_bytes(cut.read_bytes()[:-400])
    missing.unlink()
    missing.symlink_to(tmp_path / "gone.jpg")
    arguments = [*FOLDER_RECIPE, "--data_dir", str(pictures)]
    with pytest.raises(DataError) as error:
        run(tmp_path / "strict", *arguments)
    assert str(cut) in str(error.value) and str(missing) in str(error.value) and "2 faults" in str(error.value)
    assert not (tmp_path / "strict").exists()
    fields = run(tmp_path / "tolerant", *arguments, "--tolerant")
    assert fields["metrics"]["steps"]["value"] == 3  # six pictures
    assert sorted(path for path, _ in fields["attachments"]["skipped"]) == sorted(map(str, (cut, missing)))


def test_quickstart_on_an_own_folder(pictures, tmp_path, capsys):
    cut = pictures / "train" / "dark" / "1.jpg"
    cut.write_bytes(cut.read_bytes()[:-400])
    more = [
        "--data_dir",
        str(pictures),
        "--output_dir",
        str(tmp_path / "run"),
        "--tolerant",
        "--interpolation",
        "bicubic",
    ]
    quickstart.main([*RECIPE, *FOLDER_RECIPE, *more])
    output = capsys.readouterr().out
    assert "top-1 on 6 pictures" in output
    for name in ("report.html", "record.json", "evaluate/record.json", "infer/predictions.json"):
        assert (tmp_path / "run" / name).is_file(), name


# -------------------------------------------------------------------------------------------------- golden


def test_first_losses_of_the_quickstart(monkeypatch):
    """Exact on the machine that the file names, else within what other kernels may round differently."""
    monkeypatch.undo()
    make_quickstart = load_script(TESTS / "golden" / "make_quickstart.py")
    assert golden.difference(make_quickstart.FILE, make_quickstart.first_losses()) == ""
