"""Training end to end on made-up molecules: learning, resume, two processes, recipes, evaluation, CUDA graphs."""

from __future__ import annotations

import copy
import importlib.util
import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch

import dlx
import se3_transformer
from dlx import checkpoint as checkpoints
from dlx import config as configs
from dlx import golden, optim
from dlx import record as records
from dlx.loading import Plan
from dlx.precision import LossScaler
from dlx.step import TrainState
from se3_transformer import buckets, evaluate, infer, options, pretrained, qm9, train
from se3_transformer.loading import MoleculeLoader
from se3_transformer.options import CONFIGS, build_model
from se3_transformer.recipe import TrainConfig
from se3_transformer.step import GraphedSteps, absolute_error, train_step

TESTS = Path(__file__).resolve().parent
PATHS = [str(Path(package.__file__).resolve().parents[1]) for package in (dlx, se3_transformer)]
SMALL = (
    "--num_layers 1 --num_degrees 2 --num_channels 8 --num_heads 2 --batch_size 8 --lr 0.03 --end_lr 0.002"
    " --device cpu --log_every 1 --ema_decay 0.8 --weight_decay 0.01"
).split()


def _script(name: str):
    spec = importlib.util.spec_from_file_location(name, TESTS / f"{name}.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


small_run = _script("small_run")


@pytest.fixture(autouse=True)
def molecules(monkeypatch):
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    made = small_run.make_molecules()
    monkeypatch.setattr(qm9, "load", lambda *args, **kwargs: made)
    monkeypatch.setattr(options.MoleculeOptions, "identity", lambda self: {})
    yield made
    torch.set_num_threads(threads)


@pytest.fixture
def whole_run(tmp_path) -> Path:
    output = tmp_path / "whole"
    train.main([*SMALL, "--epochs", "14", "--save_steps", "7", "--keep_checkpoints", "99", "--output_dir", str(output)])
    return output


def weights_of(output: Path, name: str = "model") -> dict[str, torch.Tensor]:
    return checkpoints.load(checkpoints.Checkpoints(output / "checkpoints").latest()).model[name]


def test_it_learns_and_the_record_is_whole(whole_run):
    record = records.load(whole_run).fields
    errors = [error for _, error in record["curve"]["val.mae"]]
    assert len(errors) == 14 and min(errors) < 0.8 * errors[0]
    losses = [loss for _, loss in record["curve"]["train.loss"]]
    assert np.mean(losses[-5:]) < 0.6 * np.mean(losses[:5])
    assert record["metrics"]["val.best_mae"] == {"value": min(errors), "unit": "eV", "goal": "MINIMIZE"}
    assert record["status"] == "finished" and len(record["curve"]["train.loss"]) == 70
    shown = record["attachments"]["samples"]
    assert len(shown) == 2 and all((whole_run / entry["image"]).is_file() for entry in shown)
    assert (whole_run / "report.html").stat().st_size > 10_000
    best = checkpoints.Checkpoints(whole_run / "checkpoints").best()
    assert checkpoints.load(best).meta["metric"] == min(errors)


def test_resumed_in_the_middle_of_an_epoch_is_the_uninterrupted_run(whole_run, tmp_path):
    middle = next(
        path for path in (whole_run / "checkpoints").iterdir() if path.is_dir() and checkpoints.load(path).step == 7
    )
    output = tmp_path / "resumed"
    shutil.copytree(middle, output / "checkpoints" / middle.name)
    train.main([*SMALL, "--epochs", "14", "--output_dir", str(output)])
    for name in ("model", "ema"):
        ours, theirs = weights_of(output, name), weights_of(whole_run, name)
        assert all(torch.equal(ours[key], theirs[key]) for key in theirs)


def test_evaluate_and_infer_use_what_was_trained(whole_run, tmp_path, molecules):
    result = evaluate.main(
        ["--checkpoint", str(whole_run), "--split", "val", "--device", "cpu", "--output_dir", str(tmp_path / "e")]
    )
    record = records.load(whole_run).fields
    assert result["mae"] == pytest.approx(record["metrics"]["val.best_mae"]["value"], rel=1e-5)
    found = pretrained.load(whole_run)
    # By hand: the predictor's own way from molecules to values of the target's unit.
    config = configs.parse(evaluate.EvaluateConfig, ["--checkpoint", str(whole_run)], configs_dir=CONFIGS)
    assert config.split_seed is None
    config.split_seed = found.split_seed
    split = config.open()["val"]
    collate = options.DataOptions().collator(split, found.targets[0], "cpu")
    with torch.no_grad():
        batch = collate(np.arange(len(split)))
        outputs = found.model(batch.graph, batch.node_feats, batch.edge_feats).numpy()
    errors = found.targets[0].restore(outputs, split.composition()) - options.target_values(split, "homo")
    assert np.abs(errors).mean() == pytest.approx(result["mae"], rel=1e-5)
    with pytest.raises(ValueError, match="split_seed 5: .* was trained with 0"):
        evaluate.main(["--checkpoint", str(whole_run), "--split_seed", "5", "--device", "cpu"])
    content = infer.main(
        ["--checkpoint", str(whole_run), "--smiles", "CCO", "--device", "cpu", "--output_dir", str(tmp_path / "i")]
    )
    assert content["predictions"][0]["predictions"]["homo"]["unit"] == "eV"


def test_other_targets_are_refused(whole_run):
    with pytest.raises(ValueError, match=r"other classes \(homo \.\.\.\) than the data's \(gap \.\.\.\)"):
        train.main([*SMALL, "--task", "gap", "--epochs", "14", "--output_dir", str(whole_run)])


def test_another_split_or_graph_is_no_way_to_go_on(whole_run):
    for option, message in (("--split_seed=3", "split_seed 0, not 3"), ("--graph=full", "graph bonds, not full")):
        with pytest.raises(ValueError, match=f"was trained with {message}; give --resume none"):
            train.main([*SMALL, option, "--epochs", "14", "--output_dir", str(whole_run)])


def test_two_processes_are_one_with_accumulation(tmp_path):
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(PATHS), "OMP_NUM_THREADS": "1"}
    arguments = [*SMALL, "--epochs", "2", "--batch_size", "4"]
    jobs = [
        ["train", [*arguments, "--output_dir", str(tmp_path / "two")]],
        [
            "evaluate",
            ["--checkpoint", str(tmp_path / "two"), "--output_dir", str(tmp_path / "test"), "--device", "cpu"],
        ],
    ]
    launcher = "-m dlx.entry torch.distributed.run --standalone --local-addr 127.0.0.1 --nproc-per-node 2".split()
    done = subprocess.run(
        [sys.executable, *launcher, str(TESTS / "small_run.py"), json.dumps(jobs)],
        env=environment, capture_output=True, text=True, timeout=240,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-3000:]
    train.main([*arguments, "--global_batch_size", "8", "--output_dir", str(tmp_path / "one")])
    one, two = (records.load(tmp_path / name).fields for name in ("one", "two"))
    for curve in ("train.loss", "val.mae"):
        np.testing.assert_allclose(np.array(one["curve"][curve]), np.array(two["curve"][curve]), rtol=2e-3)
    alone = evaluate.main(
        ["--checkpoint", str(tmp_path / "two"), "--output_dir", str(tmp_path / "alone"), "--device", "cpu"]
    )
    together = records.load(tmp_path / "test").fields["metrics"]
    assert together["test.molecules"]["value"] == alone["molecules"] == 6
    assert together["test.mae"]["value"] == pytest.approx(alone["mae"], rel=1e-6)


def test_padding_changes_neither_loss_nor_gradients(molecules):
    config = configs.parse(TrainConfig, SMALL, configs_dir=CONFIGS)
    splits = config.open()
    collate = config.collator(splits["train"], config.scale(splits["train"]), "cpu")
    torch.manual_seed(0)
    model = build_model(config.model_options())
    other = copy.deepcopy(model)
    batch = collate(np.arange(8))
    for network, given in ((model, batch), (other, buckets.pad_to_bucket(batch))):
        absolute_error(network(given.graph, given.node_feats, given.edge_feats), given.targets).backward()
    for ours, theirs in zip(model.parameters(), other.parameters(), strict=True):
        if ours.grad is not None:
            torch.testing.assert_close(ours.grad, theirs.grad, rtol=1e-4, atol=1e-6)


def test_loader_shows_every_molecule_once(molecules):
    config = configs.parse(TrainConfig, SMALL, configs_dir=CONFIGS)
    splits = config.open()
    collate = config.collator(splits["val"], config.scale(splits["train"]), "cpu")
    count, seen = len(splits["val"]), []
    for rank in range(2):
        for batch, rows in MoleculeLoader(collate, Plan(count, 3, False, rank=rank, world_size=2)):
            assert batch.graph.num_graphs == len(rows)
            seen += rows.tolist()
    assert sorted(seen) == list(range(count))


@pytest.mark.parametrize("path", sorted(CONFIGS.glob("*.yaml")), ids=lambda path: path.stem)
def test_recipes_are_valid(path):
    config = configs.parse(TrainConfig, ["--config", str(path)], configs_dir=CONFIGS)
    assert build_model(config.model_options()) is not None


def test_the_published_model_and_our_recipe():
    config = configs.parse(TrainConfig, ["--config", "qm9"], configs_dir=CONFIGS)
    assert (config.num_layers, config.num_degrees, config.num_channels, config.num_heads) == (7, 4, 32, 8)
    recipe = (config.batch_size, config.epochs, config.lr, config.end_lr, config.weight_decay, config.ema_decay)
    assert recipe == (240, 110, 2e-3, 0.0, 0.1, 0.9995)
    with torch.device("meta"):
        model = build_model(config.model_options())
    assert sum(parameter.numel() for parameter in model.parameters()) == 9_275_425


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("precision", ["fp32", "bf16", "fp16"])
def test_graphs_equal_eager(precision, molecules):
    device = torch.device("cuda")
    config = configs.parse(TrainConfig, SMALL, configs_dir=CONFIGS)
    splits = config.open()
    collate = config.collator(splits["train"], config.scale(splits["train"]), device)

    def make() -> TrainState:
        torch.manual_seed(0)
        model = build_model(config.model_options()).to(device).train()
        return TrainState(
            model,
            optim.build_optimizer(model, "adamw", lr=1e-3, momentum=0.9, weight_decay=0.1, decays_norms=True),
            precision=precision,
            scaler=LossScaler(model.named_parameters(), enabled=precision == "fp16"),
        )

    eager, graphed = make(), make()
    steps = GraphedSteps(graphed, 8)
    for index in range(4):
        batch = [buckets.pad_to_bucket(collate(np.arange(8) + 8 * (index % 2)))]
        expected, found = train_step(eager, batch, 8), steps(batch)
        assert found.item() == pytest.approx(expected.item(), rel=1e-3 if precision == "fp32" else 5e-2)
    assert graphed.step == eager.step == 4


@pytest.mark.slow
def test_first_losses_of_the_quickstart(monkeypatch):
    """Exact on the machine that the file names, else within what other kernels may round differently. Fetches QM9."""
    monkeypatch.undo()
    make_quickstart = _script("golden/make_quickstart")
    assert golden.difference(make_quickstart.FILE, make_quickstart.first_losses()) == ""
