"""dlx.record: what is captured, strict JSON, and refusal of records that do not follow the schema."""

import json
import math
import os
import socket
import subprocess
import sys
from types import SimpleNamespace

import numpy as np
import pytest

from dlx.record import SCHEMA, Record, commit, hardware, load, versions


def make(**options):
    return Record.start(task="A/B", verb="train", config={"lr": 1e-3, "bad": math.inf}, **options)


def test_round_trip(tmp_path, monkeypatch):
    monkeypatch.setenv("DLX_COMMAND", "./dlx run A/B train")
    record = make(seed=3, data={"fashion-mnist": "ab"})
    record.metric("val.top1", np.float32(50.0), "%", goal="MAXIMIZE")
    record.metric("val.loss", math.nan, "nats", "MINIMIZE")
    record.curve("loss", 1, 2.5)
    record.curve("loss", np.int64(2), math.inf)
    record.attach("files", ["a.onnx"])
    assert record.fields["status"] == "running"
    path = record.finish().save(tmp_path)
    assert path == tmp_path / "record.json"
    json.loads(path.read_text(), parse_constant=lambda text: pytest.fail(text))
    again = load(tmp_path)
    assert again.fields == record.fields and again.run_id == record.run_id
    fields = again.fields
    assert fields["command"] == "./dlx run A/B train" and fields["config"] == {"lr": 1e-3, "bad": "Infinity"}
    assert (fields["schema"], fields["seed"], fields["data"]) == (SCHEMA, 3, {"fashion-mnist": "ab"})
    assert fields["curve"] == {"loss": [[1, 2.5], [2, "Infinity"]]}
    assert fields["started"] <= fields["ended"] and fields["seconds"] >= 0 and fields["status"] == "finished"
    assert again.value("val.top1") == 50.0 and math.isnan(again.value("val.loss"))
    with pytest.raises(KeyError, match="no metric 'x'; there are val.top1"):
        again.value("x")


def test_save_into_a_new_folder_and_to_a_file(tmp_path):
    assert make().save(tmp_path / "run") == tmp_path / "run" / "record.json"
    assert make().save(tmp_path / "r" / "x.json") == tmp_path / "r" / "x.json"


def test_conditions():
    found = hardware()
    assert found["cores"] >= 1 and found["memory_gib"] > 0 and found["cpu"] and isinstance(found["gpus"], list)
    assert versions()["numpy"] == np.__version__
    text = json.dumps(make().fields)
    assert socket.gethostname() not in text or len(socket.gethostname()) < 4


def test_the_version_of_torch_names_its_build(monkeypatch):
    """Wheels of the package index say 2.13.0 where torch itself says 2.13.0+cu130."""
    loaded = SimpleNamespace(__version__="9.9.0+cu130", version=SimpleNamespace(cuda=None))
    monkeypatch.setitem(sys.modules, "torch", loaded)
    assert versions()["torch"] == "9.9.0+cu130"


def test_command_without_the_launcher(monkeypatch):
    monkeypatch.delenv("DLX_COMMAND", raising=False)
    assert "pytest" in make().fields["command"]


def test_commit(tmp_path):
    def git(*arguments):
        identity = ["-c", "user.name=a", "-c", "user.email=a@b"]
        subprocess.run(["git", *identity, *arguments], cwd=tmp_path, check=True, capture_output=True)

    assert commit(tmp_path) is None
    git("init")
    (tmp_path / "a.py").write_text("1")
    git("add", "a.py")
    git("commit", "-m", "x")
    found = commit(tmp_path)
    assert len(found["commit"]) == 40 and found["dirty"] is False
    (tmp_path / "a.py").write_text("2")
    assert commit(tmp_path)["dirty"] is True
    (tmp_path / "site-packages").mkdir()
    assert commit(tmp_path / "site-packages") is None


def test_commit_of_a_copy_without_repository(tmp_path, monkeypatch):
    monkeypatch.setenv("GIT_CEILING_DIRECTORIES", str(tmp_path.parent))
    monkeypatch.setenv("DLX_COMMIT", "a" * 40)
    assert commit(tmp_path) == {"commit": "a" * 40, "dirty": False}
    monkeypatch.setenv("DLX_COMMIT", "a" * 40 + "-dirty")
    assert commit(tmp_path)["dirty"] is True
    monkeypatch.delenv("DLX_COMMIT")
    assert commit(tmp_path) is None


@pytest.mark.parametrize(
    "change, message",
    [
        (lambda f: f.pop("seed"), "record.json: seed: missing"),
        (lambda f: f.update(schema=9), "record.json: schema: expected 1, got 9"),
        (lambda f: f.update(config=[]), r"record.json: config: expected dict, got list \[\]"),
        (lambda f: f.update(seed="x"), "record.json: seed: expected int or null, got str 'x'"),
        (lambda f: f.update(extra=1), "record.json: extra: unknown key"),
        (lambda f: f.update(status="ok"), "record.json: status: expected one of running, .* got 'ok'"),
        (lambda f: f["metrics"].update(a={"value": 1}), "record.json: metrics.a: expected value, unit, goal"),
        (lambda f: f["metrics"].update(a={"value": "x", "unit": "", "goal": None}), "value must be a number"),
        (lambda f: f["metrics"].update(a={"value": 1, "unit": "", "goal": "UP"}), "metrics.a: bad goal 'UP'"),
        (lambda f: f["curve"].update(a=[1, 2]), "record.json: curve.a: expected"),
        (lambda f: f["curve"].update(a=[[1, None]]), "record.json: curve.a: expected"),
    ],
)
def test_load_refuses(tmp_path, change, message):
    fields = make().fields
    change(fields)
    (tmp_path / "record.json").write_text(json.dumps(fields))
    with pytest.raises(ValueError, match=message):
        load(tmp_path)


@pytest.mark.parametrize("text", ["", "[]", "{", '{"schema": NaN}'])
def test_load_refuses_other_files(tmp_path, text):
    (tmp_path / "record.json").write_text(text)
    with pytest.raises(ValueError, match="record.json"):
        load(tmp_path / "record.json")


def test_load_missing(tmp_path):
    with pytest.raises(FileNotFoundError, match="no such run record"):
        load(tmp_path)


def test_bad_metrics_and_status():
    record = make()
    for arguments in [("a", "x", "%"), ("a", None, "%"), ("a", True, "%"), ("a", 1, None), ("a", 1, "%", "UP")]:
        with pytest.raises(ValueError, match="'a'"):
            record.metric(*arguments)
    with pytest.raises(ValueError, match="status must be"):
        record.finish("done")


def test_failed_save_leaves_the_old_record(tmp_path):
    record = make()
    record.save(tmp_path)
    before = (tmp_path / "record.json").read_text()
    record.fields["metrics"]["a"] = 1
    with pytest.raises(ValueError):
        record.save(tmp_path)
    assert (tmp_path / "record.json").read_text() == before and os.listdir(tmp_path) == ["record.json"]
