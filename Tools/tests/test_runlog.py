"""dlx.runlog: the DLLL format, strict JSON, resume, console text, sinks."""

import io
import json
import math
import sys
import warnings

import numpy as np
import pytest

from dlx.runlog import RunLog, new_run_id, read, strict


def parsed(folder):
    """As an existing dllogger parser reads: skip five characters, parse JSON."""

    def refuse(text):
        raise AssertionError(f"{text} is not JSON")

    lines = (folder / "dllogger.json").read_text().splitlines()
    return [json.loads(line[5:], parse_constant=refuse) for line in lines]


def test_lines_have_the_keys_in_dlloggers_order(tmp_path):
    with RunLog(tmp_path, console=False) as log:
        log.metadata("loss", unit="nats", goal="MINIMIZE", stage="TRAIN", format=":.2f")
        log.parameter({"batch_size": 8, "nested": {"lr": 1e-3}, "path": tmp_path})
        log.log((1, 20), {"loss": 0.5})
        log.log((), {"top1": 90.0})
    run, metadata, parameter, train, summary = parsed(tmp_path)
    assert list(train) == ["timestamp", "datetime", "elapsedtime", "type", "step", "data"]
    assert list(metadata) == ["timestamp", "elapsedtime", "datetime", "type", "metric", "metadata"]
    assert all(isinstance(train[key], str) for key in ("timestamp", "datetime", "elapsedtime"))
    assert float(train["timestamp"]) > 1.6e9 and 0 <= float(train["elapsedtime"]) < 60
    assert (train["type"], train["step"], train["data"]) == ("LOG", [1, 20], {"loss": 0.5})
    assert metadata["metadata"] == {"unit": "nats", "GOAL": "MINIMIZE", "STAGE": "TRAIN", "format": ":.2f"}
    assert parameter["step"] == "PARAMETER" and parameter["data"]["path"] == str(tmp_path)
    assert summary["step"] == [] and run["data"]["run_id"] == log.run_id
    assert all(line.startswith("DLLL {") for line in (tmp_path / "dllogger.json").read_text().splitlines())


def test_not_a_number_is_text_with_one_warning_per_metric(tmp_path):
    with RunLog(tmp_path, console=False) as log:
        with pytest.warns(UserWarning, match="loss is nan at step 'Epoch: 1 Iteration: 2'"):
            log.log((1, 2), {"loss": math.nan, "list": [math.inf]})
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            log.log((1, 3), {"loss": -math.inf})
        with pytest.warns(UserWarning, match="other is inf"):
            log.log((1, 3), {"other": np.float32("inf")})
    data = [line["data"] for line in parsed(tmp_path)[1:]]
    assert data == [{"loss": "NaN", "list": ["Infinity"]}, {"loss": "-Infinity"}, {"other": "Infinity"}]
    again = [line["data"] for line in read(tmp_path)][1:]
    assert math.isnan(again[0]["loss"]) and again[1]["loss"] == -math.inf


def test_values_of_other_libraries(tmp_path):
    torch = pytest.importorskip("torch")
    values = {"np": np.float32(0.5), "int": np.int64(3), "array": np.arange(2), "tensor": torch.tensor(2.5)}
    with RunLog(tmp_path, console=False) as log:
        log.log((np.int64(1), 2), values)
    assert parsed(tmp_path)[-1]["data"] == {"np": 0.5, "int": 3, "array": [0, 1], "tensor": 2.5}
    assert strict({1: (math.nan, np.float64(1))}) == {"1": ["NaN", 1.0]}


@pytest.mark.parametrize("step", [(1, 2, 3, 4), (1.5,), (True,), None])
def test_bad_step(tmp_path, step):
    with RunLog(tmp_path, console=False) as log, pytest.raises(ValueError, match="step must be"):
        log.log(step, {})


def test_resume_appends_and_drops_a_half_line(tmp_path):
    with RunLog(tmp_path, console=False) as log:
        log.log((1,), {"loss": 1.0})
    with open(tmp_path / "dllogger.json", "a") as stream:
        stream.write('DLLL {"timestamp": "1')
    assert len(list(read(tmp_path))) == 2  # the half line is skipped while it is the last
    with RunLog(tmp_path, console=False) as log:
        log.log((2,), {"loss": 0.5})
    records = parsed(tmp_path)
    assert [r["step"] for r in records] == ["RUN", [1], "RUN", [2]]
    assert [records[0]["data"]["resumed"], records[2]["data"]["resumed"]] == [False, True]
    assert records[0]["data"]["run_id"] != records[2]["data"]["run_id"]


def test_read_names_a_damaged_line(tmp_path):
    path = tmp_path / "dllogger.json"
    path.write_text('DLLL {"type": "LOG"}\noops\nDLLL {}\n')
    with pytest.raises(ValueError, match=r"dllogger.json:2: not a log line"):
        list(read(path))


def test_console_line(tmp_path, capsys):
    with RunLog(tmp_path) as log:
        log.metadata("train.loss", format=":.2f")
        log.metadata("train.ips", unit="images/s")
        log.log((1, 20), {"train.loss": 0.5234, "train.ips": 1234.5678})
        log.log((1, 20, 3), {"val.loss": 0.25})
        log.log((), {"top1": 91.5})
        log.log("PARAMETER", {"arch": "resnet50"})
    lines = capsys.readouterr().out.splitlines()
    assert lines[0].startswith("DLL 20")
    texts = [line.split(" - ", 1)[1] for line in lines]
    assert texts == [
        "Epoch: 1 Iteration: 20 train.loss : 0.52 train.ips : 1234.6 images/s",
        "Epoch: 1 Iteration: 20 Validation Iteration: 3 val.loss : 0.25",
        "Summary: top1 : 91.5",
        "PARAMETER arch : resnet50",
    ]


@pytest.mark.parametrize("options", [{"goal": "MIMIMIZE"}, {"stage": "train"}, {"format": "{:q}"}])
def test_bad_metadata(tmp_path, options):
    with RunLog(tmp_path, console=False) as log, pytest.raises(ValueError, match="'loss'"):
        log.metadata("loss", **options)


def test_disabled_writes_nothing(tmp_path, capsys):
    with RunLog(tmp_path / "none", enabled=False, tensorboard=True) as log:
        log.parameter({})
        log.metadata("loss", unit="nats")
        log.log((1,), {"loss": 1.0})
        assert list(log.progress([1, 2])) == [1, 2]
    assert not (tmp_path / "none").exists() and capsys.readouterr().out == ""


class Terminal(io.StringIO):
    def isatty(self):
        return True


def test_progress_bar_only_on_a_terminal(tmp_path, monkeypatch, capsys):
    with RunLog(tmp_path) as log:
        assert list(log.progress(iter("ab"), total=2, desc="epoch 1")) == ["a", "b"]
        assert capsys.readouterr().err == ""
        terminal = Terminal()
        monkeypatch.setattr(sys, "stderr", terminal)
        for number in log.progress(range(2), desc="epoch 1"):
            log.log((1, number), {"loss": 0.5})
        assert "epoch 1" in terminal.getvalue()
        monkeypatch.undo()
    lines = capsys.readouterr().out.splitlines()
    assert [line for line in lines if "loss : 0.5" in line] == lines and len(lines) == 2


def test_tensorboard_sink(tmp_path):
    pytest.importorskip("tensorboard")
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    with RunLog(tmp_path, console=False, tensorboard=True) as log:
        log.log((1, 10), {"loss": 0.5, "note": "text"})
        log.log((1, 20), {"loss": 0.25})
        log.log((1,), {"top1": 80.0})
    events = EventAccumulator(str(tmp_path / "tb"))
    events.Reload()
    assert [(event.step, event.value) for event in events.Scalars("loss")] == [(10, 0.5), (20, 0.25)]
    assert [(event.step, event.value) for event in events.Scalars("top1")] == [(1, 80.0)]


def test_run_ids_differ():
    assert len({new_run_id() for _ in range(50)}) == 50
