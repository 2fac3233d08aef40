"""ZeroAdamW in two and three processes against AdamW in one."""

from __future__ import annotations

import importlib.util
import json
import os
import socket
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from fusedops.optim import AdamW

WORKER = Path(__file__).with_name("zero_worker.py")
_spec = importlib.util.spec_from_file_location("zero_worker", WORKER)
worker = importlib.util.module_from_spec(_spec)
_spec.loader.exec_module(worker)


def job(name, steps=(0, 4), dtype="float32", weights="", overflow=-1, schedule=False, scaler=None, **options):
    return {
        "name": name, "steps": steps, "dtype": dtype, "weights": str(weights), "overflow": overflow,
        "schedule": schedule, "scaler": scaler, "options": options,
    }  # fmt: skip


def run(folder, world, *jobs, cuda=False):
    """Train all jobs in one set of processes; -> by name the results of each process."""
    folder.mkdir(exist_ok=True)
    for each in jobs:
        each["output"] = str(folder / f"{each['name']}_{world}")
    meeting = {"world": world, "rendezvous": str(folder / f"meet_{world}"), "jobs": jobs, "cuda": cuda}
    (folder / f"jobs_{world}.json").write_text(json.dumps(meeting))
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "FUSEDOPS_BACKEND": "triton" if cuda else "plain"}
    if any(name == "lo" for _, name in socket.if_nameindex()):
        environment["GLOO_SOCKET_IFNAME"] = "lo"  # all processes are here, and no other interface need be there
    processes = [
        subprocess.Popen(
            [sys.executable, str(WORKER), str(folder / f"jobs_{world}.json"), str(rank)],
            env=environment,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        for rank in range(world)
    ]
    outputs = [process.communicate(timeout=120)[0] for process in processes]
    assert all(process.returncode == 0 for process in processes), "\n".join(outputs)
    paths = {each["name"]: [f"{each['output']}.{rank}" for rank in range(world)] for each in jobs}
    return {name: [torch.load(path, weights_only=True) for path in of_job] for name, of_job in paths.items()}


@pytest.fixture(scope="module")
def results(tmp_path_factory):
    """Trainings by two processes, then by three, which take up states of the two."""
    folder = tmp_path_factory.mktemp("zero")
    masters = {
        m: {"master_weights": m, "gradient_dtype": "float32", "dtype": "bfloat16"} for m in ("fp32", "remainder")
    }
    two = run(
        folder,
        2,
        job("clipped", schedule=True, max_grad_norm=0.7),
        job("overflow", overflow=1, skip_nonfinite=True),
        job("scaled", overflow=1, scaler=8.0),
        *(job(m, (0, 2), **options) for m, options in masters.items()),
    )
    for m in masters:
        torch.save(two[m][0], folder / f"{m}.pt")
    three = run(
        folder,
        3,
        job("clipped", schedule=True, max_grad_norm=0.7),
        *(job(m, (2, 4), weights=folder / f"{m}.pt", **options) for m, options in masters.items()),
        *(job(f"{m} through", **options) for m, options in masters.items()),
    )
    return {2: two, 3: three}


def alone(steps=(0, 4), dtype=torch.float32, schedule=False, skip=(), weights=None, **options):
    generator = torch.Generator().manual_seed(0)
    parameters = [torch.nn.Parameter(torch.randn(s, generator=generator).to(dtype)) for s in worker.SHAPES]
    groups = [{"params": parameters[:2]}, {"params": parameters[2:], "weight_decay": 0.0}]
    optimizer = AdamW(groups, lr=0.05, **options)
    if weights:
        for p, saved in zip(parameters, weights["parameters"], strict=True):
            p.data.copy_(saved)
        optimizer.load_state_dict(weights["state"])
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 2, 0.5) if schedule else None
    for step in range(*steps):
        for index, p in enumerate(parameters):
            p.grad = torch.stack([worker.gradient(p.shape, step, r, index) for r in range(6)]).mean(0).to(dtype)
        if step not in skip:
            optimizer.step()
        if scheduler:
            scheduler.step()
    return parameters, optimizer


@pytest.mark.parametrize("world", [2, 3])
def test_as_one_process(results, world):
    found = results[world]["clipped"]
    parameters, optimizer = alone(schedule=True, max_grad_norm=0.7)
    for result in found:
        for mine, expected in zip(result["parameters"], parameters, strict=True):
            torch.testing.assert_close(mine, expected.detach(), rtol=1e-5, atol=1e-5)
    assert all(torch.equal(a, b) for a, b in zip(found[0]["parameters"], found[1]["parameters"], strict=True))
    expected = optimizer.state_dict()
    for number, entries in expected["state"].items():
        for name, value in entries.items():
            torch.testing.assert_close(found[0]["state"]["state"][number][name], value, rtol=1e-4, atol=1e-6)
    assert [g["lr"] for g in found[0]["state"]["param_groups"]] == [g["lr"] for g in expected["param_groups"]]
    total = sum(torch.Size(s).numel() for s in worker.SHAPES)
    assert max(result["own"] for result in found) < total, "no process keeps the whole state"


@pytest.mark.parametrize("master", ["fp32", "remainder"])
def test_state_goes_from_two_processes_to_three_and_to_one(results, master):
    """bfloat16 parameters with masters: four steps by 2, 3 or 2 + 3 processes differ only in the order of a sum."""
    first, resumed, through = results[2][master][0], results[3][master][0], results[3][f"{master} through"][0]
    single, _ = alone((2, 4), torch.bfloat16, weights=first, master_weights=master)
    for a, b, c in zip(resumed["parameters"], through["parameters"], single, strict=True):
        torch.testing.assert_close(a.float(), b.float(), rtol=1e-2, atol=1e-3)
        torch.testing.assert_close(a.float(), c.detach().float(), rtol=2e-2, atol=2e-2)
    key = "master" if master == "fp32" else "remainder"
    assert first["state"]["state"][0][key].shape == worker.SHAPES[0]
    assert resumed["state"]["state"][3]["step"] == 4
    if master == "fp32":
        for number in range(4):
            a, b = (r["state"]["state"][number]["master"] for r in (resumed, through))
            torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("name", ["overflow", "scaled"])
def test_an_overflow_anywhere_is_skipped_everywhere(results, name):
    parameters, _ = alone(skip=(1,))
    for result in results[2][name]:
        assert result["skipped"] == [0.0, 1.0, 0.0, 0.0]
        for mine, expected in zip(result["parameters"], parameters, strict=True):
            torch.testing.assert_close(mine, expected.detach(), rtol=1e-5, atol=1e-5)


@pytest.mark.multigpu
def test_on_two_gpus(tmp_path):
    options = {"dtype": "bfloat16", "master_weights": "remainder", "gradient_dtype": "float32", "max_grad_norm": 0.7}
    found = run(tmp_path, 2, job("gpus", schedule=True, **options), cuda=True)["gpus"]
    expected = run(tmp_path / "cpu", 2, job("gpus", schedule=True, **options))["gpus"]
    for a, b in zip(found[0]["parameters"], expected[0]["parameters"], strict=True):
        torch.testing.assert_close(a.float(), b.float(), rtol=2e-2, atol=1e-3)
    assert all(torch.equal(a, b) for a, b in zip(found[0]["parameters"], found[1]["parameters"], strict=True))
