"""Training: the arithmetic of a step, runs that are stopped and resumed, run scopes, two processes."""

from __future__ import annotations

import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import paddle
import pytest
from PIL import Image
from safetensors.numpy import load_file

from dlx import files, record, runlog
from rn50_paddle import checkpoint, options, step, train, trainer
from rn50_paddle.convert import arrays_of
from rn50_paddle.framework import World
from rn50_paddle.model import build

TASK = Path(options.CONFIGS).parent
SMALL = ["--data", "synthetic", "--num_classes", "4", "--num_samples", "64", "--batch_size", "16", "--epochs", "2",
         "--arch", "resnet8_small", "--lr", "0.05", "--lr_batch_size", "null", "--warmup_epochs", "0.5",
         "--log_every", "1", "--mixup", "0.2", "--label_smoothing", "0.1"]  # fmt: skip


def newest(folder):
    return checkpoint.Checkpoints(Path(folder) / "checkpoints").newest()


def small_trainer(**changes):
    config = train.configs.parse(options.TrainConfig, SMALL, exit_on_error=False)
    for key, value in changes.items():
        setattr(config, key, value)
    return trainer.Trainer(config, World())


def assert_equal(first, second):
    assert first.keys() == second.keys()
    different = [key for key in first if not np.array_equal(first[key], second[key])]
    assert not different


# A step


def test_the_rate_warms_up_and_falls_as_a_cosine():
    rates = [trainer.learning_rate(number, 0.4, 4, 20) for number in range(20)]
    np.testing.assert_allclose(rates[:4], [0.1, 0.2, 0.3, 0.4])
    assert rates[4] == 0.4 and abs(rates[12] - 0.2) < 1e-12 and 0 < rates[-1] < 0.005
    assert all(a > b for a, b in zip(rates[4:], rates[5:], strict=False))


def test_smoothing_and_mixup_against_float64():
    generator = np.random.default_rng(0)
    logits, labels = generator.normal(size=(5, 4)), np.array([0, 3, 1, 1, 2])
    logs = logits - np.log(np.exp(logits).sum(1, keepdims=True))
    expected = 0.0
    for row in range(5):
        target = np.zeros(4)
        target[labels[row]] += 0.7
        target[labels[row - 1]] += 0.3
        expected -= ((0.9 * target + 0.1 / 4) * logs[row]).sum() / 5
    found = step.smoothed_loss(paddle.to_tensor(logits, "float32"), paddle.to_tensor(labels), 0.1, 0.7)
    assert abs(float(found) - expected) < 1e-6
    plain = step.smoothed_loss(paddle.to_tensor(logits, "float32"), paddle.to_tensor(labels), 0.0)
    assert abs(float(plain) + logs[np.arange(5), labels].mean()) < 1e-6


def test_an_update_is_momentum_with_decay_on_weights_only():
    built = small_trainer(weight_decay=0.5, momentum=0.8, mixup=0.0)
    state = built.state
    batches = [batch for _, batch in zip(range(2), built.micro_batches(0, 0), strict=False)]
    expected = {name: value.numpy().astype(np.float64) for name, value in state.model.named_parameters()}
    velocity = {name: np.zeros_like(value) for name, value in expected.items()}
    original = state.optimizer.step
    gradients = {}

    def noting_step():
        for name, value in state.model.named_parameters():
            gradients[name] = None if value.stop_gradient else value.grad.numpy().astype(np.float64)
        original()

    state.optimizer.step = noting_step
    for index, batch in enumerate(batches):
        rate = trainer.learning_rate(state.step, built.peak_lr, built.warmup_steps, built.total_steps)
        built.step(batch, 0, index)
        for name, gradient in gradients.items():
            if gradient is not None:
                decay = 0.5 if gradient.ndim > 1 else 0.0
                velocity[name] = 0.8 * velocity[name] + gradient + decay * expected[name]
                expected[name] = expected[name] - rate * velocity[name]
    for name, value in state.model.named_parameters():
        if not value.stop_gradient:
            np.testing.assert_allclose(value.numpy(), expected[name], rtol=1e-4, atol=1e-6, err_msg=name)


def test_gradient_merge_is_the_gradient_of_the_whole_batch():
    results = []
    for merge in (1, 2):
        paddle.seed(3)
        model = build("resnet8_small", 4)
        model.eval()  # the norms of a training step see their micro-batch only
        optimizer = paddle.optimizer.SGD(0.1, model.parameters())
        shape = small_trainer().preprocessing
        state = step.TrainState(model, model, optimizer, shape)
        images = paddle.to_tensor(np.random.default_rng(1).integers(0, 256, (8, 3, 28, 28), np.uint8))
        labels = paddle.to_tensor(np.arange(8) % 4)
        size = 8 // merge
        parts = [(images[n * size : (n + 1) * size], labels[n * size : (n + 1) * size]) for n in range(merge)]
        loss = step.train_step(state, parts)
        results.append((float(loss), arrays_of(model)))
    assert abs(results[0][0] - results[1][0]) < 1e-5
    for name, value in results[0][1].items():
        np.testing.assert_allclose(results[1][1][name], value, rtol=1e-4, atol=1e-5, err_msg=name)


def test_merged_steps_take_consecutive_batches():
    built = small_trainer(gradient_merge=2)
    assert (built.steps_per_epoch, built.global_batch) == (2, 32)
    whole = [[labels.numpy().tolist() for _, labels in batch] for batch in built.micro_batches(0, 0)]
    later = [[labels.numpy().tolist() for _, labels in batch] for batch in built.micro_batches(0, 1)]
    assert len(whole) == 2 and later == whole[1:]


@pytest.mark.parametrize("to_static", [False, True])
def test_training_learns(to_static):
    built = small_trainer(mixup=0.0, label_smoothing=0.0, to_static=to_static)
    batch = next(built.micro_batches(0, 0))
    built.total_steps, built.warmup_steps = 40, 0
    losses = [float(built.step(batch, 0, 0)) for _ in range(12)]
    assert losses[-1] < 0.3 * losses[0]


# Runs


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    """A run that nothing interrupted."""
    folder = tmp_path_factory.mktemp("whole")
    fields = train.main([*SMALL, "--output_dir", str(folder)])
    return folder, fields


def test_a_run_is_logged_recorded_and_reported(whole):
    folder, fields = whole
    assert fields["status"] == "finished" and fields["metrics"]["steps"]["value"] == 8
    losses = [
        entry["data"]["train.loss"]
        for entry in runlog.read(folder)
        if isinstance(entry.get("step"), list) and "train.loss" in entry["data"]
    ]
    assert len(losses) == 8 and losses == [value for _, value in fields["curve"]["train.loss"]]
    assert "val.top1" in (folder / "report.html").read_text()
    assert record.load(folder).value("val.best_top1") >= record.load(folder).value("val.top1")
    assert len(list((folder / "samples").glob("*.png"))) == 8
    assert fields["versions"]["paddlepaddle"] == paddle.__version__


def test_a_stopped_run_goes_on_exactly(whole, tmp_path, monkeypatch):
    original = trainer.train_step

    def stopping(state, *arguments):
        loss = original(state, *arguments)
        if state.step == 3:
            os.kill(os.getpid(), signal.SIGTERM)
        return loss

    monkeypatch.setattr(trainer, "train_step", stopping)
    with pytest.raises(SystemExit) as left:
        train.main([*SMALL, "--output_dir", str(tmp_path)])
    assert left.value.code == 128 + signal.SIGTERM
    assert newest(tmp_path).step == 3 and record.load(tmp_path).fields["status"] == "stopped"
    monkeypatch.setattr(trainer, "train_step", original)
    fields = train.main([*SMALL, "--output_dir", str(tmp_path)])
    first, second = newest(whole[0]), newest(tmp_path)
    assert second.step == 8
    assert_equal(first.model, second.model)
    assert_equal(first.optimizer, second.optimizer)
    assert len(first.optimizer) > 20
    assert fields["curve"]["train.loss"] == whole[1]["curve"]["train.loss"]


def test_an_evaluation_that_a_kill_prevented_is_made_up_for(whole, tmp_path, monkeypatch):
    original = trainer.Trainer.evaluate

    def killed(self):
        if self.state.step == 8:
            raise KeyboardInterrupt
        return original(self)

    monkeypatch.setattr(trainer.Trainer, "evaluate", killed)
    with pytest.raises(KeyboardInterrupt):
        train.main([*SMALL, "--output_dir", str(tmp_path)])
    monkeypatch.setattr(trainer.Trainer, "evaluate", original)
    fields = train.main([*SMALL, "--output_dir", str(tmp_path)])
    assert fields["status"] == "finished"
    for name in ("val.top1", "val.loss"):
        assert fields["curve"][name] == whole[1]["curve"][name] and len(fields["curve"][name]) == 2
    for name in ("val.best_top1", "val.top1"):
        assert fields["metrics"][name] == whole[1]["metrics"][name]


def test_a_kill_between_records_takes_nothing_from_the_curves(whole, tmp_path, monkeypatch):
    original = trainer.train_step

    def killed(state, *arguments):
        if state.step == 7:
            raise KeyboardInterrupt
        return original(state, *arguments)

    monkeypatch.setattr(trainer, "train_step", killed)
    with pytest.raises(KeyboardInterrupt):
        train.main([*SMALL, "--save_steps", "1", "--output_dir", str(tmp_path)])
    assert len(record.load(tmp_path).fields["curve"]["train.loss"]) == 4  # of the first epoch's evaluation
    monkeypatch.setattr(trainer, "train_step", original)
    fields = train.main([*SMALL, "--save_steps", "1", "--output_dir", str(tmp_path)])
    assert fields["curve"] == whole[1]["curve"]


def test_a_kill_leaves_whole_checkpoints(whole, tmp_path):
    folder = tmp_path / "run"
    shutil.copytree(whole[0], folder)
    store = checkpoint.Checkpoints(folder / "checkpoints")
    assert [path.name for path in store.list()] == ["step_00000004", "step_00000008"]
    half = store.directory / ".step_00000009.x.tmp" / "step_00000009"
    half.mkdir(parents=True)
    (half / "model.safetensors").write_bytes(b"half")
    assert store.newest().step == 8
    with open(folder / "checkpoints/step_00000008/optimizer.safetensors", "r+b") as stream:
        stream.seek(-1, os.SEEK_END)
        last = stream.read(1)
        stream.seek(-1, os.SEEK_END)
        stream.write(bytes([last[0] ^ 1]))
    with pytest.raises(checkpoint.CheckpointError, match="damaged"):
        checkpoint.load(folder / "checkpoints/step_00000008")
    assert store.newest().step == 4
    (folder / "checkpoints/step_00000004/meta.json").unlink()
    with pytest.raises(checkpoint.CheckpointError, match="no checkpoint of"):
        store.newest()


def test_the_best_and_the_newest_are_kept(tmp_path):
    store = checkpoint.Checkpoints(tmp_path, keep=2)
    arrays = {"a": np.ones(3, np.float32)}
    for number, score in enumerate((50.0, 90.0, 60.0, 70.0, 90.0), 1):
        store.score(store.save(number, arrays, arrays, {}), number, score)
    assert store.best_score() == 90.0 and not store.owes_evaluation(5) and store.owes_evaluation(6)
    assert [path.name[-1] for path in store.list()] == ["2", "4", "5"] and store.best().name.endswith("2")


def test_a_resumed_run_must_be_the_same(whole):
    with pytest.raises(ValueError, match="seed was 1 and is 2"):
        train.main([*SMALL, "--seed", "2", "--output_dir", str(whole[0])])
    before = (whole[0] / "record.json").read_bytes()
    for key, value, shown in (
        ("lr", "0.01", "peak_lr was 0.05 and is 0.01"), ("mixup", "0", "mixup was 0.2 and is 0.0"),
        ("weight_decay", "0.1", "weight_decay was"), ("label_smoothing", "0", "label_smoothing was 0.1 and is 0.0"),
        ("image_size", "32", "image_size was 28 and is 32"), ("warmup_epochs", "1", "warmup_steps was 2 and is 4"),
    ):  # fmt: skip
        with pytest.raises(ValueError, match=shown):
            train.main([*SMALL, f"--{key}", value, "--output_dir", str(whole[0])])
    assert (whole[0] / "record.json").read_bytes() == before
    with pytest.raises(ValueError, match="holds a run already"):
        train.main([*SMALL, "--resume", "none", "--output_dir", str(whole[0])])


def test_a_finished_run_has_nothing_left_to_do(whole, tmp_path):
    folder = tmp_path / "run"
    shutil.copytree(whole[0], folder)
    fields = train.main([*SMALL, "--output_dir", str(folder)])
    assert fields["status"] == "finished" and newest(folder).step == 8
    assert fields["curve"] == whole[1]["curve"]
    assert fields["metrics"] == whole[1]["metrics"]
    assert fields["seconds"] >= whole[1]["seconds"]  # of all its processes


def test_scopes(whole, tmp_path):
    folder, fields = whole
    only = train.main([*SMALL, "--run_scope", "train_only", "--epochs", "1", "--output_dir", str(tmp_path)])
    assert only["status"] == "finished" and "val.top1" not in only["metrics"]
    assert newest(tmp_path).step == 4
    measured = train.main([*SMALL, "--run_scope", "eval_only", "--output_dir", str(folder)])
    assert measured["top1"] == fields["metrics"]["val.best_top1"]["value"] and measured["samples"] == 8


def test_a_users_own_pictures(tmp_path):
    """Files through worker processes: the whole way from a folder to an evaluated checkpoint."""
    for split, count in (("train", 8), ("val", 3)):
        for label, name in enumerate(("black", "white")):
            (tmp_path / split / name).mkdir(parents=True)
            for number in range(count):
                Image.new("RGB", (40 + number, 36), (200 * label + number,) * 3).save(
                    tmp_path / split / name / f"{number}.jpg"
                )
    fields = train.main([
        "--data_dir", str(tmp_path), "--arch", "resnet8_small", "--image_size", "32", "--batch_size", "4",
        "--epochs", "3", "--lr", "0.02", "--lr_batch_size", "null", "--warmup_epochs", "0",
        "--output_dir", str(tmp_path / "run"),
    ])  # fmt: skip
    assert fields["metrics"]["val.samples"]["value"] == 6 and fields["metrics"]["val.top1"]["value"] == 100
    assert newest(tmp_path / "run").meta["model"]["classes"] == ["black", "white"]
    assert fields["data"] == {}


def test_without_a_val_split_the_run_says_that_it_is_not_evaluated(tmp_path, capsys):
    for name in ("a", "b"):
        (tmp_path / "data/train" / name).mkdir(parents=True)
        for number in range(4):
            Image.new("RGB", (32, 32)).save(tmp_path / "data/train" / name / f"{number}.png")
    fields = train.main([
        *SMALL, "--data_dir", str(tmp_path / "data"), "--batch_size", "8", "--epochs", "1", "--workers", "0",
        "--output_dir", str(tmp_path / "run"),
    ])  # fmt: skip
    assert fields["status"] == "finished" and "no split val" in capsys.readouterr().out
    with pytest.raises(ValueError, match="no such data folder"):
        train.main([*SMALL, "--data_dir", str(tmp_path / "nowhere"), "--output_dir", str(tmp_path / "other")])
    assert not (tmp_path / "other").exists()  # what could not begin leaves no empty folder


def test_amp_on_a_cpu_is_said_to_be_none(tmp_path, capsys):
    train.main([*SMALL, "--precision", "bf16", "--max_steps", "1", "--output_dir", str(tmp_path)])
    assert "no AMP on a CPU" in capsys.readouterr().out
    parameters = next(e["data"] for e in runlog.read(tmp_path) if e.get("step") == "PARAMETER")
    assert parameters["effective_precision"] == "fp32"


def test_a_loss_that_is_no_number_ends_the_run(tmp_path):
    with pytest.raises(ArithmeticError, match="loss is (nan|inf)"):
        train.main([*SMALL, "--lr", "1e12", "--warmup_epochs", "0", "--output_dir", str(tmp_path)])


def free_port():
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        return listener.getsockname()[1]


def launch(arguments, logs):
    """Two processes through scripts/train.sh."""
    variables = os.environ | {"NPROC": "2", "PYTHON": sys.executable, "LOG_DIR": str(logs)}
    variables |= {"PADDLE_MASTER": f"127.0.0.1:{free_port()}", "PYTHONUNBUFFERED": "1"}
    command = ["bash", str(TASK / "scripts/train.sh"), *arguments]
    return subprocess.Popen(command, env=variables, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)


@pytest.mark.parametrize("sparse", ["false", "true"])
def test_two_processes_are_one_with_merged_gradients(tmp_path, sparse):
    """The norms see 8 pictures either way, so two processes that merge 2 give the weights of one that merges 4."""
    common = [*SMALL, "--mixup", "0", "--warmup_epochs", "0", "--max_steps", "3", "--batch_size", "8", "--asp", sparse]
    train.main([*common, "--gradient_merge", "4", "--output_dir", str(tmp_path / "one")])
    done = launch([*common, "--gradient_merge", "2", "--output_dir", str(tmp_path / "two")], tmp_path / "logs")
    done.wait(timeout=240)
    logs = "".join(path.read_text()[-2000:] for path in (tmp_path / "logs").glob("workerlog*"))
    assert done.returncode == 0, logs
    one, two = newest(tmp_path / "one"), newest(tmp_path / "two")
    assert one.step == two.step == 3
    trained = [name for name in one.model if not name.endswith(("_mean", "_variance"))]
    for name in trained:
        np.testing.assert_allclose(two.model[name], one.model[name], rtol=1e-3, atol=1e-5, err_msg=name)
    start = arrays_of(small_trainer().state.model)
    assert np.abs(two.model["conv1.weight"] - start["conv1.weight"]).max() > 1e-3  # it did train
    assert record.load(tmp_path / "two").value("val.samples") == 8


def test_a_killed_run_leaves_no_workers_that_hold_its_folder(tmp_path):
    """The loader's workers are in groups of their own; one that waits for its dead parent would keep the run's lock."""
    arguments = [*SMALL, "--num_samples", "6400", "--workers", "2", "--output_dir", str(tmp_path)]
    process = subprocess.Popen([sys.executable, "-m", "rn50_paddle.train", *arguments], stdout=subprocess.DEVNULL)
    deadline = time.monotonic() + 60
    while time.monotonic() < deadline and "train.loss" not in log_text(tmp_path):
        time.sleep(0.05)
    with pytest.raises(TimeoutError), files.lock(tmp_path / ".lock", timeout=0):
        pass
    process.kill()
    process.wait(timeout=10)
    with files.lock(tmp_path / ".lock", timeout=5):
        pass


def test_two_processes_stop_together_and_go_on(tmp_path):
    """The launcher signals whole process groups; the loaders' workers must live until the step is saved."""
    output = tmp_path / "run"
    arguments = [*SMALL, "--num_samples", "480", "--batch_size", "8", "--run_scope", "train_only"]
    process = launch([*arguments, "--output_dir", str(output)], tmp_path / "logs")
    deadline = time.monotonic() + 120
    while time.monotonic() < deadline and "train.loss" not in log_text(output):
        time.sleep(0.1)
    process.terminate()
    process.wait(timeout=60)
    stopped = newest(output)
    assert stopped is not None and 0 < stopped.step < 60 and stopped.step % 5 == 0
    assert record.load(output).fields["status"] == "stopped"
    assert launch([*arguments, "--output_dir", str(output)], tmp_path / "again").wait(timeout=240) == 0
    assert newest(output).step == 60 and record.load(output).fields["status"] == "finished"


def log_text(folder):
    path = Path(folder) / runlog.FILE_NAME
    return path.read_text() if path.is_file() else ""


def test_the_quickstarts_first_losses(tmp_path):
    """golden/quickstart.json: a change of numerics shows here, and updates the file with its reason."""
    arguments = ["--config", "quickstart", "--run_scope", "train_only", "--max_steps", "12", "--log_every", "1"]
    fields = train.main([*arguments, "--output_dir", str(tmp_path)])
    losses = [value for _, value in fields["curve"]["train.loss"]]
    golden = json.loads((Path(__file__).parent / "golden/quickstart.json").read_text())["losses"]
    np.testing.assert_allclose(losses, golden, rtol=2e-3)


def test_a_checkpoint_holds_no_pickle(whole):
    folder = newest(whole[0]).path
    assert sorted(path.name for path in folder.iterdir()) == ["meta.json", "model.safetensors", "optimizer.safetensors"]
    velocities = load_file(folder / "optimizer.safetensors")
    assert "layer1.0.conv1.weight_velocity_0" in velocities
