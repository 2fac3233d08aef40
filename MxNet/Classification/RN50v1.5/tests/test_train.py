"""Whole runs: what they write, stopping and going on to the bit, several workers, precisions, refusals."""

import json
import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import mxnet as mx
import numpy as np
import pytest

from dlx import files, record
from rn50_mxnet import blocks, checkpoint, evaluate, quickstart, registry, runner, train

GOLDEN = Path(__file__).parent / "golden" / "quickstart.json"
SHORT = {
    "arch": "resnet8_small", "epochs": 8, "batch_size": 8, "lr": 0.1, "lr_batch_size": None, "warmup_epochs": 0.5,
    "momentum": 0.9, "log_every": 1, "device": "cpu", "mixup": 0.2,
}  # fmt: skip


def options(dataset, output, **changed):
    values = SHORT | {"data_dir": str(dataset.folder), "output_dir": str(output)} | changed
    return [word for key, value in values.items() for word in (f"--{key}", "null" if value is None else str(value))]


def losses(output):
    return dict(map(tuple, record.load(output).fields["curve"]["train.loss"]))


def same_weights(first, second):
    files = (Path(folder) / "checkpoints" / "last" / "model.safetensors" for folder in (first, second))
    ours, theirs = map(checkpoint.read_tensors, files)
    assert ours.keys() == theirs.keys()
    return all(np.array_equal(ours[name], theirs[name]) for name in ours)


@pytest.fixture(scope="module")
def whole(grey, tmp_path_factory):
    """A run of eight epochs, never interrupted."""
    output = tmp_path_factory.mktemp("whole")
    train.main(options(grey, output))
    return output


def test_a_run_learns_and_leaves_everything(whole):
    found = record.load(whole)
    assert found.value("val.top1") > 90 and found.value("val.samples") == 23
    assert found.fields["status"] == "finished" and found.value("train.steps") == 40
    assert losses(whole)[40] < losses(whole)[1]
    assert (whole / "report.html").is_file() and (whole / "dllogger.json").read_text().startswith("DLLL {")
    assert sorted(path.name for path in (whole / "checkpoints").iterdir()) == ["best", "last"]
    assert not (whole / "checkpoints" / "best" / "trainer.safetensors").exists()


def test_resume_in_the_middle_of_an_epoch_is_exact(grey, whole, tmp_path):
    train.main(options(grey, tmp_path, max_steps=7))
    assert checkpoint.read_state(tmp_path / "checkpoints" / "last")["progress"]["batch"] == 2
    train.main(options(grey, tmp_path))
    assert same_weights(tmp_path, whole)
    assert losses(tmp_path) == losses(whole)  # the page shows the whole run
    again, once = (record.load(folder).fields["curve"]["val.top1"] for folder in (tmp_path, whole))
    assert [point for point in again if point[0] != 7] == once  # it stopped, and was evaluated, at step 7


def test_a_finished_run_that_is_begun_again_keeps_its_results(grey, whole, tmp_path):
    shutil.copytree(whole, tmp_path / "run")
    assert train.main(options(grey, tmp_path / "run")) is None
    before, after = (record.load(folder).fields for folder in (whole, tmp_path / "run"))
    assert after["metrics"] == before["metrics"] and after["curve"] == before["curve"]
    assert after["attachments"]["confusion"] == before["attachments"]["confusion"]


def test_what_a_kill_leaves_of_the_record(grey, tmp_path, monkeypatch):
    monkeypatch.setattr(train, "finish", lambda *given: None)  # what a kill prevents
    train.main(options(grey, tmp_path, max_steps=10))
    assert record.load(tmp_path).fields["status"] == "running" and len(losses(tmp_path)) == 10


@pytest.mark.parametrize("kill_at", [1, 2])
def test_a_kill_in_the_middle_of_a_save_leaves_a_checkpoint(tmp_path, monkeypatch, kill_at):
    network = registry.build("resnet8_small", 3, 1)
    described = {"arch": "resnet8_small", "classes": ["a", "b", "c"]}
    described["preprocessing"] = checkpoint.preprocessing_for("resnet8_small", 1).to_dict()
    target = tmp_path / "checkpoints" / "last"

    def save(step):
        weights = blocks.get_weights(network) | {"fc.bias": np.full(3, step, np.float32)}
        checkpoint.save(target, weights, described, checkpoint.Progress(step=step))

    save(1)
    renamed, rename = [], Path.rename

    def killed(path, to):
        renamed.append(path)
        if len(renamed) == kill_at:
            raise KeyboardInterrupt
        return rename(path, to)

    with monkeypatch.context() as patched, pytest.raises(KeyboardInterrupt):
        patched.setattr(Path, "rename", killed)
        save(2)
    found = checkpoint.load(tmp_path)
    assert found.weights["fc.bias"][0] == checkpoint.read_state(Path(found.source))["progress"]["step"] == kill_at
    (tmp_path / "checkpoints" / ".last.new.abc.tmp").mkdir()  # what a kill in the middle of the writing leaves
    save(3)
    assert checkpoint.load(tmp_path).weights["fc.bias"][0] == 3
    assert [path.name for path in target.parent.iterdir()] == ["last"]


def test_two_launchers_do_not_share_a_folder(grey, tmp_path):
    with files.lock(tmp_path / ".lock"), pytest.raises(TimeoutError, match="still locked by another process"):
        train.main(options(grey, tmp_path))


def test_a_loss_that_is_no_number_ends_the_run(grey, tmp_path, monkeypatch):
    def step(state, *batch):
        state.step += 1
        return mx.nd.array([np.inf])

    monkeypatch.setattr(train, "train_step", step)
    with pytest.raises(ValueError, match="the loss is inf at step 1"):
        train.main(options(grey, tmp_path))
    assert record.load(tmp_path).fields["status"] == "failed"


def test_a_signal_saves_and_the_same_command_goes_on(grey, whole, tmp_path):
    command = [sys.executable, "-m", "rn50_mxnet.train", *options(grey, tmp_path)]
    slow = "import time, rn50_mxnet.train as t; s = t.train_step\n"
    slow += "t.train_step = lambda *a: (time.sleep(0.2), s(*a))[1]\nt.main()"
    process = subprocess.Popen([sys.executable, "-c", slow, *command[3:]])
    log = tmp_path / "dllogger.json"
    deadline = time.monotonic() + 60
    while time.monotonic() < deadline and not (log.exists() and '"step": [0, 2]' in log.read_text()):
        time.sleep(0.05)
    process.send_signal(signal.SIGTERM)
    assert process.wait(60) == 128 + signal.SIGTERM
    assert record.load(tmp_path).fields["status"] == "stopped"
    assert 2 <= checkpoint.read_state(tmp_path / "checkpoints" / "last")["progress"]["step"] < 40
    subprocess.run(command, check=True, capture_output=True)
    assert same_weights(tmp_path, whole)


def test_other_settings_are_no_continuation(grey, whole):
    with pytest.raises(ValueError, match=r"other settings \(lr 0.1 -> 0.2\); --resume none"):
        train.main(options(grey, whole, lr=0.2))


def test_validation_without_weights_is_refused(grey, tmp_path):
    for mode in ("val", "pred"):
        with pytest.raises(ValueError, match="validation needs trained weights: give --checkpoint"):
            train.main(options(grey, tmp_path, mode=mode))
    with pytest.raises(ValueError, match="validation needs trained weights"):
        evaluate.main(["--data_dir", str(grey.folder)])
    with pytest.raises(ValueError, match="no checkpoint here"):
        evaluate.main(["--data_dir", str(grey.folder), "--checkpoint", str(tmp_path)])
    with pytest.raises(ValueError, match="synthetic pictures have no truth"):
        evaluate.main(["--data", "synthetic", "--checkpoint", str(tmp_path)])


def test_val_and_pred_use_the_weights(grey, whole, tmp_path):
    result = train.main(options(grey, tmp_path / "val", mode="val", checkpoint=whole))
    assert result["top1"] > 90 and result["samples"] == 23
    again = ["--config", "quickstart", "--checkpoint", str(whole), "--data_dir", str(grey.folder)]
    assert evaluate.main([*again, "--output_dir", str(tmp_path)])["confusion"] == result["confusion"]
    content = train.main(options(grey, tmp_path / "pred", mode="pred", checkpoint=whole))
    stored = json.loads((tmp_path / "pred" / "predictions.json").read_text())
    assert stored == content and len(stored["predictions"]) == 23
    counts = [[name for name, _ in stored["predictions"]].count(label) for label in grey.classes]
    assert counts == np.array(result["confusion"]).sum(0).tolist()


def test_a_model_of_other_classes_is_refused(colour, grey, whole, tmp_path):
    with pytest.raises(ValueError, match="takes pictures of 1 channels, .* has 3"):
        evaluate.main(["--checkpoint", str(whole), "--data_dir", str(colour.folder), "--output_dir", str(tmp_path)])
    last = whole / "checkpoints" / "last"
    content = checkpoint.read_state(last) | {"classes": ["ant", "wasp", "cat"]}
    other = tmp_path / "other"
    other.mkdir()
    (other / "state.json").write_text(json.dumps(content))
    (other / "model.safetensors").write_bytes((last / "model.safetensors").read_bytes())
    with pytest.raises(ValueError, match="calls class 1 'wasp', .* calls it 'bee'"):
        evaluate.main(["--checkpoint", str(other), "--data_dir", str(grey.folder), "--output_dir", str(tmp_path)])


def test_evaluation_by_hand():
    """Sums over batches of different sizes, against numpy."""
    logits = np.random.default_rng(0).standard_normal((7, 6)).astype(np.float32)
    truth = np.array([0, 1, 2, 3, 4, 5, 0])
    batches = [(mx.nd.array(logits[:4]), mx.nd.array(truth[:4])), (mx.nd.array(logits[4:]), mx.nd.array(truth[4:]))]
    found = evaluate.evaluate(
        lambda x: x.reshape((-1, 6)) * 255, [(x.reshape((-1, 1, 2, 3)), y) for x, y in batches], mean=(0.0,),
        std=(1.0,), num_classes=6, workers=train.Workers(), ctx=mx.cpu(),
    )  # fmt: skip
    scores = logits - np.log(np.exp(logits).sum(1, keepdims=True))
    ranks = (logits > logits[np.arange(7), truth][:, None]).sum(1)
    assert found["loss"] == pytest.approx(-scores[np.arange(7), truth].mean(), rel=1e-5)
    assert found["top1"] == pytest.approx(100 * (ranks < 1).mean())
    assert found["top5"] == pytest.approx(100 * (ranks < 5).mean())
    assert np.array(found["confusion"]).sum(1).tolist() == [2, 1, 1, 1, 1, 1]


def test_two_workers_train_validate_and_resume(grey, tmp_path):
    """In two halves or in one go, the same; every validation picture counts once."""
    arguments = ["-n", "2", "-b", "4", "--"]
    for output, steps in (("whole", [30]), ("halves", [4, 30])):
        for count in steps:
            words = options(grey, tmp_path / output, epochs=6, max_steps=count, mixup=0.0)
            assert runner.main([*arguments, *words]) == 0
    found = record.load(tmp_path / "whole")
    assert found.value("val.samples") == 23 and found.value("workers") == 2 and found.value("val.top1") > 55
    ours, theirs = (checkpoint.load(tmp_path / name / "checkpoints" / "last").weights for name in ("halves", "whole"))
    for name, value in theirs.items():
        # Statistics are averaged over the workers once more in the halves: the same but for rounding.
        tolerance = 1e-5 if "running" in name else 0
        np.testing.assert_allclose(ours[name], value, rtol=tolerance, atol=tolerance, err_msg=name)


def test_a_worker_that_fails_ends_the_run(grey, tmp_path):
    assert runner.main(["-n", "2", "--", *options(grey, tmp_path, arch="resnet8_small", batch_size=1000)]) != 0
    with pytest.raises(SystemExit):
        runner.main(["-n", "0"])


def start_two_workers(grey, output):
    """The runner in a process group of its own, when the workers have begun to train."""
    words = options(grey, output, batch_size=4, epochs=2000)
    command = [sys.executable, "-m", "rn50_mxnet.runner", "-n", "2", "--", *words]
    process = subprocess.Popen(command, stderr=subprocess.DEVNULL, stdout=subprocess.DEVNULL, start_new_session=True)
    log, deadline = output / "dllogger.json", time.monotonic() + 60
    while time.monotonic() < deadline and not (log.exists() and '"step": [1, ' in log.read_text()):
        time.sleep(0.05)
    return process


def test_a_signal_to_the_whole_group_stops_two_workers(grey, tmp_path):
    """As a closed terminal sends it: workers end their step, for which they need the server, save and leave."""
    process = start_two_workers(grey, tmp_path)
    os.killpg(process.pid, signal.SIGHUP)
    try:
        assert process.wait(20) == 128 + signal.SIGHUP
    finally:
        process.kill()
    assert checkpoint.read_state(tmp_path / "checkpoints" / "last")["progress"]["step"] >= 5


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
def test_nothing_is_left_of_a_killed_runner(grey, tmp_path):
    process = start_two_workers(grey, tmp_path)
    children = Path(f"/proc/{process.pid}/task/{process.pid}/children").read_text().split()
    process.kill()
    process.wait()
    assert len(children) == 4
    deadline = time.monotonic() + 10
    alive = children
    while alive and time.monotonic() < deadline:
        alive = [child for child in alive if is_running(child)]
        time.sleep(0.05)
    for child in alive:
        os.kill(int(child), signal.SIGKILL)
    assert not alive


def is_running(child):
    try:
        return Path(f"/proc/{child}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except FileNotFoundError:
        return False


def test_the_job_script_starts_workers_and_a_server(grey, tmp_path):
    """scripts/slurm.sub with stand-ins for Slurm's commands that start two tasks on this machine."""
    stand_ins = {
        "scontrol": "echo localhost",
        "srun": 'shift; for i in 1 2; do "$@" & p="$p $!"; done; for i in $p; do wait $i; done',
    }
    for name, text in stand_ins.items():
        (tmp_path / name).write_text(f"#!/bin/bash\n{text}\n")
        (tmp_path / name).chmod(0o755)
    script = Path(__file__).parent.parent / "scripts" / "slurm.sub"
    slurm = {"SLURM_SUBMIT_DIR": str(script.parent), "SLURM_JOB_NODELIST": "localhost", "SLURM_NTASKS": "2"}
    others = {"PYTHON": sys.executable, "PORT": str(runner.free_port()), "PATH": f"{tmp_path}:{os.environ['PATH']}"}
    words = options(grey, tmp_path / "run", batch_size=4, max_steps=6)
    subprocess.run(["bash", str(script), *words], check=True, env=os.environ | slurm | others, timeout=60)
    found = record.load(tmp_path / "run")
    assert found.value("workers") == 2 and found.value("train.steps") == 6


def test_bf16_trains(grey, whole, tmp_path):
    """In a process of its own: MXNet's AMP changes its operators for good. The products must be in bfloat16."""
    words = options(grey, tmp_path, precision="bf16")
    code = "import sys, mxnet as mx, rn50_mxnet.train as t\n"
    code += "w = t.Workers(); run = t.Run(t.configs.parse(t.TrainConfig, sys.argv[1:]), w)\n"
    code += "assert 'bfloat16' in str(run.network(mx.nd.zeros((2, 1, 28, 28))).dtype)\n"
    code += "t.main(sys.argv[1:])"
    subprocess.run([sys.executable, "-c", code, *words], check=True, env=os.environ | {"PYTHONWARNINGS": "ignore"})
    plain, half = losses(whole), losses(tmp_path)
    assert half[1] == pytest.approx(plain[1], rel=0.05) and half[1] != plain[1]
    assert record.load(tmp_path).value("val.top1") > 60


def test_fp16_and_gpus_are_refused_where_there_are_none(grey, tmp_path):
    with pytest.raises(ValueError, match="precision fp16 needs a GPU"):
        train.main(options(grey, tmp_path, precision="fp16"))
    with pytest.raises(ValueError, match="built without CUDA"):
        train.main(options(grey, tmp_path, device="gpu"))


def test_a_checkpoint_starts_a_training(grey, whole, tmp_path):
    train.main(options(grey, tmp_path, checkpoint=whole, max_steps=1, lr=1e-6, mixup=0.0))
    assert losses(tmp_path)[1] < 0.8


def test_quickstart_goes_through(grey, tmp_path, capsys):
    words = ["--data_dir", str(grey.folder), "--output_dir", str(tmp_path), "--batch_size", "8", "--epochs", "2"]
    quickstart.main(words)
    assert "% top-1 on 23 pictures never trained on" in capsys.readouterr().out
    assert (tmp_path / "report.html").is_file() and (tmp_path / "infer" / "picture.png").is_file()


def test_the_first_losses_of_the_quick_start_have_not_changed(tmp_path):
    """A change of numerics belongs into the file, with the reason in the commit: tests/golden/make_quickstart.py."""
    stored = json.loads(GOLDEN.read_text())
    train.main(
        ["--config", "quickstart", "--mode", "train", "--max_steps", "20", "--log_every", "1"]
        + ["--output_dir", str(tmp_path)]
    )
    found = losses(tmp_path)
    assert [found[step] for step in range(1, 21)] == pytest.approx(stored["losses"], rel=2e-3)
