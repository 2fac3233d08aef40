"""dlx.checkpoint: whole after a kill at any moment, damage found, resume bit for bit, safe types only."""

import json
import math
import os
import random
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import numpy as np
import pytest

torch = pytest.importorskip("torch")
import dlx.checkpoint as checkpoint  # noqa: E402
from dlx.checkpoint import CheckpointError, Checkpoints, StopSignal, load, rng_state, set_rng_state  # noqa: E402

TOOLS = str(Path(checkpoint.__file__).parents[1])
PATH = os.pathsep.join(filter(None, [TOOLS, os.environ.get("PYTHONPATH")]))
ENVIRONMENT = {**os.environ, "PYTHONPATH": PATH, "OMP_NUM_THREADS": "1"}


def weights(value=0.0):
    return {"model": {"weight": torch.full((2, 3), float(value)), "bias": torch.arange(3)}}


def names(folder):
    return sorted(path.name for path in folder.iterdir() if path.name != ".lock")


def test_round_trip_and_layout(tmp_path):
    path = Checkpoints(tmp_path).save(
        7, model={**weights(1), "ema": weights(2)["model"]}, state={"lr": np.float32(0.5)}, metadata={"loss": math.nan},
        metric=0.25,
    )  # fmt: skip
    assert path == tmp_path / "step_00000007" and names(tmp_path) == ["last", "step_00000007"]
    assert names(path) == ["ema.safetensors", "meta.json", "model.safetensors", "state.pt"]
    assert (tmp_path / "last").read_text().strip() == path.name
    loaded = load(path)
    assert loaded.step == 7 and loaded.state == {"lr": 0.5} and loaded.metadata == {"loss": "NaN"}
    assert list(loaded.model) == ["model", "ema"] and list(loaded.model["ema"]) == ["weight", "bias"]
    assert loaded.model["ema"]["weight"].equal(torch.full((2, 3), 2.0))
    assert loaded.model["model"]["bias"].equal(torch.arange(3))
    assert loaded.meta["metric"] == 0.25


def test_keep_best_and_last(tmp_path):
    checkpoints = Checkpoints(tmp_path, keep=2)
    for step in range(1, 7):
        checkpoints.save(step, model=weights(step), best=step in (1, 3))
    assert names(tmp_path) == ["best", "last", "step_00000003", "step_00000005", "step_00000006"]
    assert checkpoints.best().name == "step_00000003" and checkpoints.latest().name == "step_00000006"
    # A run that starts over in the same folder: the newest is what was saved last, not the highest step.
    checkpoints.save(2, model=weights(9))
    assert checkpoints.latest().name == "step_00000002"
    assert names(tmp_path) == ["best", "last", "step_00000002", "step_00000003", "step_00000006"]


def test_same_step_again_replaces(tmp_path):
    checkpoints = Checkpoints(tmp_path)
    for value in (1, 2, 3):
        checkpoints.save(5, model=weights(value))
    assert len(names(tmp_path)) == 2
    loaded = checkpoints.resume()
    assert loaded.step == 5 and loaded.model["model"]["weight"][0, 0] == 3
    checkpoints.save(6, model=weights(4))
    assert load(checkpoints.latest()).step == 6


@pytest.mark.parametrize("kind", ["cut", "flip", "missing", "no meta", "meta cut"])
def test_damage_is_found_and_passed_over(tmp_path, kind):
    checkpoints = Checkpoints(tmp_path)
    good = checkpoints.save(1, model=weights(1))
    bad = checkpoints.save(2, model=weights(2))
    victim = bad / ("meta.json" if "meta" in kind else "model.safetensors")
    content = bytearray(victim.read_bytes())
    if kind == "flip":
        content[-1] ^= 1
        victim.write_bytes(content)
    elif "cut" in kind:
        victim.write_bytes(content[:-5])
    else:
        victim.unlink()
    with pytest.warns(UserWarning, match="damaged checkpoint passed over: .*step_00000002"):
        assert checkpoints.latest() == good
    with pytest.raises(CheckpointError, match=victim.name):
        load(bad)
    with pytest.warns(UserWarning, match="passed over"):
        assert checkpoints.resume("auto").step == 1
    (good / "state.pt").unlink()
    with pytest.raises(CheckpointError, match="every checkpoint is damaged: .*step_00000002.*step_00000001"):
        checkpoints.resume("auto")


def test_resume_fresh_foreign_and_explicit(tmp_path, capsys):
    checkpoints = Checkpoints(tmp_path / "run")
    assert checkpoints.resume(None) is None and checkpoints.resume("") is None and capsys.readouterr().err == ""
    assert checkpoints.resume("auto") is None
    assert "run: no checkpoint yet, starting fresh" in capsys.readouterr().err
    (tmp_path / "run").mkdir()
    assert checkpoints.resume("auto") is None and "starting fresh" in capsys.readouterr().err
    with pytest.raises(CheckpointError, match="nowhere: no such folder"):
        checkpoints.resume(tmp_path / "nowhere")
    (tmp_path / "run" / "model_best.pth.tar").write_text("x")
    with pytest.raises(CheckpointError, match="run: no checkpoint here, only model_best.pth.tar"):
        checkpoints.resume("auto")
    path = checkpoints.save(3, model=weights())
    other = Checkpoints(tmp_path / "other")
    assert other.resume(path).step == other.resume(tmp_path / "run").step == 3
    assert checkpoint.resume("auto", tmp_path / "run").step == checkpoint.resume(path).step == 3
    with pytest.raises(ValueError, match="needs the run's checkpoint directory"):
        checkpoint.resume("auto")


@pytest.mark.parametrize("error", [OSError(28, "No space left on device"), KeyboardInterrupt(), RuntimeError("x")])
def test_a_failing_save_leaves_nothing(tmp_path, monkeypatch, error):
    checkpoints = Checkpoints(tmp_path)
    good = checkpoints.save(1, model=weights(1))

    def fail(*arguments):
        Path(arguments[1]).write_bytes(b"half")
        raise error

    monkeypatch.setattr(torch, "save", fail)
    with pytest.raises(type(error)):
        checkpoints.save(2, model=weights(2))
    assert names(tmp_path) == ["last", "step_00000001"] and checkpoints.latest() == good


FULL_DISK = """
import resource, sys, torch
from dlx.checkpoint import Checkpoints
checkpoints = Checkpoints(sys.argv[1])
checkpoints.save(1, model={"model": {"w": torch.zeros(10)}})
resource.setrlimit(resource.RLIMIT_FSIZE, (100_000, 100_000))  # files stop growing, as on a full disk
for part in ({"model": {"model": {"w": torch.zeros(100_000)}}}, {"model": {}, "state": {"w": torch.zeros(100_000)}}):
    try:
        checkpoints.save(2, **part)
    except Exception as error:
        print("refused", type(error).__name__)
"""


def test_a_full_disk_leaves_the_last_good_one(tmp_path):
    done = subprocess.run(
        [sys.executable, "-c", FULL_DISK, str(tmp_path)], env=ENVIRONMENT, capture_output=True, text=True, timeout=60
    )
    assert done.stdout.count("refused") == 2, done.stdout + done.stderr
    assert names(tmp_path) == ["last", "step_00000001"] and Checkpoints(tmp_path).latest().name == "step_00000001"


KILL_SAVES = """
import itertools, os, random, signal, sys, time, warnings
import torch
from dlx.checkpoint import Checkpoints, load

folder, rounds = sys.argv[1], int(sys.argv[2])
checkpoints = Checkpoints(folder, keep=2)
big = torch.ones(500_000)

def save_forever(step, confirm):
    for step in itertools.count(step):
        w = big * step
        checkpoints.save(step, model={"model": {"w": w}, "ema": {"w": w}}, state={"m": w}, best=step % 3 == 0)
        os.write(confirm, b"%d " % step)

generator = random.Random(0)
warnings.simplefilter("error")  # not even a damaged one that is passed over
step = interrupted = 1
for _ in range(rounds):
    read, write = os.pipe()
    child = os.fork()
    if child == 0:
        save_forever(step, write)
    os.close(write)
    confirmed = int(os.read(read, 100).split()[-1])
    time.sleep(generator.uniform(0.0, 0.1))
    os.kill(child, signal.SIGKILL)
    os.waitpid(child, 0)
    confirmed = int((os.read(read, 100000).split() or [confirmed])[-1])
    os.close(read)
    interrupted += any(name.endswith(".tmp") for name in os.listdir(folder))
    loaded = checkpoints.resume("auto")
    assert loaded.step in (confirmed, confirmed + 1), (loaded.step, confirmed)
    assert all(bool((tensor == loaded.step).all()) for tensor in (loaded.model["ema"]["w"], loaded.state["m"]))
    assert load(checkpoints.best()).step % 3 == 0 if checkpoints.best() else loaded.step < 4
    step = loaded.step + 1
checkpoints.save(step, model={"model": {"w": big}})
print(interrupted - 1)
"""


def test_kill_9_in_the_middle_of_a_save(tmp_path):
    """Killed at random moments, a process always leaves a whole checkpoint, as new as the last that it confirmed."""
    command = [sys.executable, "-c", KILL_SAVES, str(tmp_path), "12"]
    done = subprocess.run(command, env=ENVIRONMENT, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    assert int(done.stdout) >= 4  # the kills did hit saves
    assert not [path.name for path in tmp_path.iterdir() if path.name.endswith(".tmp")]


TRAIN = """
import sys, torch, random, numpy as np
from dlx.checkpoint import Checkpoints, rng_state, set_rng_state, unwrap
from dlx.dist import TrainOrder, seed_everything
def train(folder, first, last):
    seed_everything(1)
    data = torch.randn(40, 8)
    torch.manual_seed(5)
    nn = torch.nn
    model = nn.Sequential(nn.Linear(8, 16), nn.BatchNorm1d(16), nn.Dropout(0.3), nn.Linear(16, 4))
    ema = {key: value.clone() for key, value in model.state_dict().items()}
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01, amsgrad=True)
    scheduler = torch.optim.lr_scheduler.SequentialLR(optimizer, [
        torch.optim.lr_scheduler.LinearLR(optimizer, 0.1, total_iters=2),
        torch.optim.lr_scheduler.MultiStepLR(optimizer, [1, 3])], milestones=[2])
    order = TrainOrder(40, seed=3)
    checkpoints = Checkpoints(folder)
    loaded = checkpoints.resume("auto")
    seen, epoch, position = [], 0, 0
    if loaded:
        assert loaded.step == first
        model.load_state_dict(loaded.model["model"])
        ema = loaded.model["ema"]
        optimizer.load_state_dict(loaded.state["optimizer"])
        scheduler.load_state_dict(loaded.state["scheduler"])
        seen, epoch, position = loaded.state["seen"], loaded.state["epoch"], loaded.state["position"]
        set_rng_state(loaded.state["rng"])
    for step in range(first, last):
        order.set_epoch(epoch, position)
        batch = list(order)[:16]
        position += 16
        if len(batch) < 16:
            epoch, position = epoch + 1, 16
            order.set_epoch(epoch)
            batch = list(order)[:16]
        seen.append(batch)
        noise = random.random() + np.random.rand()
        optimizer.zero_grad()
        (model(data[batch] + noise) ** 2).mean().backward()
        optimizer.step()
        scheduler.step()
        for key, value in model.state_dict().items():
            ema[key] = ema[key].lerp(value, 0.1) if value.is_floating_point() else value.clone()
    checkpoints.save(last, model={"model": model.state_dict(), "ema": ema}, state={
        "optimizer": optimizer.state_dict(), "scheduler": scheduler.state_dict(), "seen": seen, "epoch": epoch,
        "position": position, "rng": rng_state()})

for run in sys.argv[1:]:
    folder, first, last = run.split(":")
    train(folder, int(first), int(last))
"""


def equal(a, b):
    if isinstance(a, torch.Tensor):
        return a.dtype == b.dtype and a.equal(b)
    if isinstance(a, np.ndarray):
        return np.array_equal(a, b)
    if isinstance(a, dict):
        return list(a) == list(b) and all(equal(a[key], b[key]) for key in a)
    if isinstance(a, list | tuple):
        return type(a) is type(b) and len(a) == len(b) and all(map(equal, a, b))
    return a == b


def test_resumed_is_the_uninterrupted_run_bit_for_bit(tmp_path):
    def run(*runs):
        command = [sys.executable, "-c", TRAIN, *runs]
        done = subprocess.run(command, env=ENVIRONMENT, cwd=tmp_path, capture_output=True, text=True, timeout=120)
        assert done.returncode == 0, done.stderr

    run("straight:0:6", "resumed:0:3")
    run("resumed:3:6")
    one, two = load(tmp_path / "straight" / "step_00000006"), load(tmp_path / "resumed" / "step_00000006")
    assert len(one.state["seen"]) == 6
    for key in one.state:
        assert equal(one.state[key], two.state[key]), key
    assert equal(one.model, two.model)


def test_tied_strided_and_wrapped_tensors(tmp_path):
    shared = torch.arange(6.0).reshape(2, 3)
    big = torch.arange(1000.0)
    tensors = {
        "a": shared, "b": shared, "transposed": shared.t(), "slice": big[10:13], "scalar": torch.tensor(3),
        "empty": torch.empty(0, 3), "half": torch.ones(2, dtype=torch.bfloat16),
        "last": torch.ones(2, 2, 2, 2).to(memory_format=torch.channels_last),
        "complex": torch.ones(2, dtype=torch.complex64), "_extra_state": {"amax": [1.0]},
    }  # fmt: skip
    wrapped = {f"module.{key}": value for key, value in tensors.items()}
    path = Checkpoints(tmp_path).save(1, model={"model": wrapped}, state={"v": big[1:3]})
    loaded = load(path).model["model"]
    assert sorted(loaded) == sorted(tensors)
    for key, value in tensors.items():
        assert equal(value, loaded[key]), key
    assert (path / "state.pt").stat().st_size < 4000 and (path / "model.safetensors").stat().st_size < 4000
    compiled = {"_orig_mod.layer.weight": torch.ones(1), "inner._orig_mod.bias": torch.ones(1)}
    path = Checkpoints(tmp_path).save(2, model={"model": compiled})
    assert list(load(path).model["model"]) == ["layer.weight", "inner.bias"]


def test_unwrap():
    inner = torch.nn.Linear(1, 1)
    assert checkpoint.unwrap(torch.nn.DataParallel(inner)) is inner and checkpoint.unwrap(inner) is inner
    compiled = torch.nn.Module()  # as torch.compile wraps; the real one takes seconds to import
    compiled._orig_mod = torch.nn.DataParallel(inner)
    assert checkpoint.unwrap(compiled) is inner


def test_state_of_every_plain_kind(tmp_path):
    state = {
        "none": None, "flag": True, "bytes": b"x", "nested": [{"a": (1, [2.5, "é"])}, {1, 2}], 3: "int key",
        "size": torch.Size([2]), "dtype": torch.bfloat16, "array": np.arange(6, dtype=np.uint32).reshape(2, 3),
        "np": np.int64(4), "inf": math.inf,
        "param": torch.nn.Parameter(torch.ones(2)), "path": np.str_("text"),
    }  # fmt: skip
    path = Checkpoints(tmp_path).save(1, model=weights(), state=state)
    loaded = load(path).state
    assert loaded["nested"] == [{"a": (1, [2.5, "é"])}, {1, 2}] and loaded[3] == "int key" and loaded["size"] == (2,)
    assert loaded["array"].dtype == np.uint32 and np.array_equal(loaded["array"], state["array"])
    assert loaded["np"] == 4 and type(loaded["np"]) is int and loaded["dtype"] is torch.bfloat16
    assert loaded["param"].equal(torch.ones(2)) and loaded["path"] == "text" and loaded["inf"] == math.inf


@pytest.mark.parametrize(
    "state, message",
    [
        ({"a": [1, lambda: 0]}, r"state\['a'\]\[1\] is a function"),
        ({"a": {"b": Path("x")}}, r"state\['a'\]\['b'\] is a PosixPath"),
        ({"a": torch.empty(2, device="meta")}, r"state\['a'\] is a shard or a meta tensor"),
        ({"a": np.array(["x"])}, r"state\['a'\] is an array of <U1"),
    ],
)
def test_state_that_cannot_be_loaded_safely_is_refused_when_saved(tmp_path, state, message):
    with pytest.raises(TypeError, match=message):
        Checkpoints(tmp_path).save(1, model=weights(), state=state)
    assert not names(tmp_path)


def test_bad_names_steps_and_meta_tensors(tmp_path):
    checkpoints = Checkpoints(tmp_path)
    for model in ({"../x": {}}, {"state": {}}, {"": {}}):
        with pytest.raises(ValueError, match="model name"):
            checkpoints.save(1, model=model)
    with pytest.raises(ValueError, match="step must be"):
        checkpoints.save(-1, model=weights())
    with pytest.raises(ValueError, match="keep must be at least 1, got 0"):
        Checkpoints(tmp_path, keep=0)
    with pytest.raises(TypeError, match=r"model\['model'\]\['w'\] is on the meta device"):
        checkpoints.save(1, model={"model": {"w": torch.empty(1, device="meta")}})


class Bomb:
    def __init__(self, marker):
        self.marker = marker

    def __reduce__(self):
        return os.mkdir, (str(self.marker),)


def test_a_pickle_that_runs_code_is_refused(tmp_path):
    path = Checkpoints(tmp_path / "run").save(1, model=weights())
    torch.save({"state": {"x": Bomb(tmp_path / "marker")}, "extra": {}}, path / "state.pt")
    meta = json.loads((path / "meta.json").read_text())
    meta["files"]["state.pt"] = {
        "sha256": checkpoint.sha256(path / "state.pt"), "size": (path / "state.pt").stat().st_size,
    }  # fmt: skip
    (path / "meta.json").write_text(json.dumps(meta))
    with pytest.raises(CheckpointError, match=r"state.pt: refused.*mkdir.*: python -m dlx.weights convert"):
        load(path)
    assert not (tmp_path / "marker").exists()


def test_tensors_saved_on_a_gpu_load_on_the_cpu(tmp_path, monkeypatch):
    monkeypatch.setattr(torch.serialization, "location_tag", lambda storage: "cuda:0")
    path = Checkpoints(tmp_path).save(1, model=weights(4), state={"m": torch.ones(3)})
    monkeypatch.undo()
    loaded = load(path)
    assert loaded.state["m"].device.type == "cpu" and loaded.state["m"].equal(torch.ones(3))
    assert loaded.model["model"]["weight"].device.type == "cpu"


def test_rng_state_of_another_device_count(tmp_path):
    state = {**rng_state(), "cuda": [torch.zeros(16, dtype=torch.uint8)] * 4}
    expected = (random.random(), np.random.randn(), torch.rand(1).item())
    path = Checkpoints(tmp_path).save(1, model=weights(), state={"rng": state})
    set_rng_state(load(path).state["rng"])
    assert (random.random(), np.random.randn(), torch.rand(1).item()) == expected


def test_stop_signal():
    before = signal.getsignal(signal.SIGTERM), signal.getsignal(signal.SIGINT)
    with StopSignal() as stop:
        assert not stop.requested
        os.kill(os.getpid(), signal.SIGTERM)
        assert stop.requested and stop.signal == "SIGTERM"
        with pytest.raises(KeyboardInterrupt):
            os.kill(os.getpid(), signal.SIGINT)
            time.sleep(1)
    assert (signal.getsignal(signal.SIGTERM), signal.getsignal(signal.SIGINT)) == before
    result = []

    def run():
        with StopSignal() as stop:
            result.append(stop.requested)

    thread = threading.Thread(target=run)
    thread.start()
    thread.join()
    assert result == [False]


class FakeWorld:
    """Two processes, of which the other one is told to stop before question `told_at`; time goes by the clock."""

    size, is_main = 2, True

    def __init__(self, told_at=10**9):
        self.told_at, self.questions = told_at, 0

    def sum(self, tensor):
        self.questions += 1
        return tensor + torch.tensor([float(self.questions >= self.told_at), 0.0])


@pytest.mark.parametrize(("seconds", "questions"), [(8.0, 40), (0.3, 14), (0.001, 4)])
def test_slow_steps_ask_every_time(monkeypatch, seconds, questions):
    now = [0.0]
    monkeypatch.setattr(time, "perf_counter", lambda: now[0])
    world = FakeWorld()
    with StopSignal(world) as stop:
        for _ in range(40):
            now[0] += seconds
            assert not stop.agreed()
    # The first step asks; from then on every step, every third, every tenth.
    assert world.questions == questions


def test_the_world_stops_at_one_step():
    for told_at in (1, 3):
        with StopSignal(FakeWorld(told_at)) as stop:
            answers = [stop.agreed() for _ in range(30)]
        assert answers.index(True) == {1: 0, 3: 20}[told_at] and not stop.requested
    with StopSignal() as stop:
        assert not stop.agreed() and stop.number() is None
        os.kill(os.getpid(), signal.SIGHUP)
        assert stop.agreed() and stop.number() == signal.SIGHUP
    assert checkpoint.Stopped(signal.SIGTERM).code == 143


def test_marked_after_saving(tmp_path):
    store = Checkpoints(tmp_path, keep=1)
    first = store.save(1, model=weights(1))
    store.mark(first, 0.5, best=True)
    second = store.save(2, model=weights(2))
    assert store.best() == first and load(first).meta["metric"] == 0.5 and load(second).meta["metric"] is None
    store.mark(second, 0.7, best=True)
    assert store.best() == second and load(second).meta["metric"] == 0.7
    assert names(tmp_path) == ["best", "last", "step_00000002"]


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_a_run_on_the_gpu_loads_on_the_cpu_and_goes_on_there(tmp_path):
    model = torch.nn.Linear(3, 4).cuda()
    optimizer = torch.optim.AdamW(model.parameters(), fused=True)
    model(torch.ones(1, 3, device="cuda")).sum().backward()
    optimizer.step()
    state = {"optimizer": optimizer.state_dict(), "rng": rng_state()}
    expected = torch.rand(2, device="cuda").tolist()
    loaded = load(Checkpoints(tmp_path).save(1, model={"model": model.state_dict()}, state=state))
    assert {tensor.device.type for tensor in loaded.model["model"].values()} == {"cpu"}
    set_rng_state(loaded.state["rng"])
    assert torch.rand(2, device="cuda").tolist() == expected
    other = torch.nn.Linear(3, 4)
    other.load_state_dict(loaded.model["model"])
    other_optimizer = torch.optim.AdamW(other.parameters())
    other_optimizer.load_state_dict(loaded.state["optimizer"])
    assert other.weight.equal(model.weight.cpu())
    assert other_optimizer.state[other.weight]["exp_avg"].equal(optimizer.state[model.weight]["exp_avg"].cpu())
