"""Mean absolute error of a model on a split, in the target's unit, exact for any number of processes.

./dlx run SE3Transformer evaluate -- --checkpoint runs/se3_quickstart
./dlx run SE3Transformer evaluate -- --checkpoint runs/homo --split val
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch
from torch import nn

from dlx import config as configs
from dlx import dist
from dlx.loading import Plan
from dlx.precision import autocast
from dlx.record import Record
from dlx.runlog import RunLog

from . import pretrained, samples
from .loading import MoleculeLoader
from .molecules import Batch, Molecules, TargetScale
from .options import CONFIGS, TASK, DataOptions, MoleculeOptions, target_values


@dataclass
class EvaluateConfig(MoleculeOptions):
    """Measure a model on molecules that it was not trained on."""

    checkpoint: str = configs.field(help="a run's folder, a checkpoint, or a name of `./dlx weights list`")
    split: Literal["train", "val", "test"] = configs.field("test", help="which molecules", group="data")
    split_seed: int | None = configs.field(None, help="of the split; by default the model's own", ge=0, group="data")
    batch_size: int = configs.field(240, help="molecules at a time", ge=1, group="data")
    precision: Literal["fp32", "tf32", "bf16", "fp16"] = configs.field("fp32", help="arithmetic of the products")
    device: str = configs.field("auto", help="auto, cpu, cuda or cuda:N")
    output_dir: str = configs.field("runs/evaluate", help="where log, record and pictures go")


@torch.no_grad()
def predict(
    model: nn.Module, batches: Iterable[tuple[Batch, np.ndarray]], world: dist.World, precision: str = "fp32"
) -> tuple[np.ndarray, np.ndarray]:
    """Outputs (molecules, targets) in the model's scale and the molecules' rows, sorted; the same on every process."""
    training = model.training
    model.eval()
    outputs, rows = [], []
    for batch, indices in batches:
        with autocast(precision, world.device):
            found = model(batch.graph, batch.node_feats, batch.edge_feats)
        outputs.append(found.float().view(len(indices), -1))  # fetched together at the end
        rows.append(indices)
    model.train(training)
    mine = torch.cat(outputs).cpu().numpy() if outputs else np.zeros((0, 1), np.float32)
    parts = world.gather((mine, np.concatenate(rows) if rows else np.zeros(0, np.int64)))
    values, places = (np.concatenate([part[index] for part in parts]) for index in (0, 1))
    order = np.argsort(places, kind="stable")
    return values[order], places[order]


def measure(outputs: np.ndarray, molecules: Molecules, scale: TargetScale, task: str) -> dict[str, Any]:
    """Errors in the target's unit (mae, rmse), ``loss`` in the model's scale, and values and predictions."""
    values = target_values(molecules, task)
    predictions = scale.restore(outputs[:, 0], molecules.composition())
    errors = predictions - values
    mae = float(np.abs(errors).mean())
    return {
        "mae": mae,
        "rmse": float(np.sqrt((errors**2).mean())),
        "loss": mae / scale.std,
        "molecules": len(values),
        "values": values,
        "predictions": predictions,
    }


def record_results(record: Record, result: dict[str, Any], unit: str, prefix: str) -> None:
    """Write an evaluation into a run record."""
    record.metric(f"{prefix}.mae", result["mae"], unit, "MINIMIZE")
    record.metric(f"{prefix}.rmse", result["rmse"], unit, "MINIMIZE")
    record.metric(f"{prefix}.loss", result["loss"], "deviations", "MINIMIZE")
    record.metric(f"{prefix}.molecules", result["molecules"], "molecules")


def main(args: list[str] | None = None) -> dict[str, Any]:
    config = configs.parse(EvaluateConfig, args, configs_dir=CONFIGS, prog="evaluate")
    with dist.init(config.device) as world:
        found = pretrained.load(config.checkpoint, device=world.device)
        if len(found.targets) != 1:
            raise ValueError(f"{config.checkpoint} predicts {len(found.targets)} targets, evaluate measures one")
        scale = found.targets[0]
        source = DataOptions(task=scale.name, graph=found.graph, radius=found.radius)  # what the model was made for
        if config.split_seed is None:
            config.split_seed = found.split_seed
        elif config.split_seed != found.split_seed and config.split != "train":
            raise ValueError(
                f"split_seed {config.split_seed}: {config.checkpoint} was trained with {found.split_seed}, so it has "
                f"seen most molecules of this {config.split} split; leave split_seed out"
            )
        molecules = config.open()[config.split]
        collate = source.collator(molecules, scale, world.device)
        plan = Plan(len(molecules), config.batch_size, False, rank=world.rank, world_size=world.size)
        loader = MoleculeLoader(collate, plan)
        log = RunLog(config.output_dir, enabled=world.is_main)
        log.metadata(f"{config.split}.mae", unit=scale.unit, goal="MINIMIZE", stage="TEST", format=":.5f")
        record = Record.start(TASK, "evaluate", configs.to_dict(config), data=config.identity(), run_id=log.run_id)
        outputs, _ = predict(
            found.model, log.progress(iter(loader), len(loader), "evaluate"), world, config.precision
        )  # fmt: skip
        result = measure(outputs, molecules, scale, scale.name)
        log.log((), {f"{config.split}.mae": result["mae"], f"{config.split}.rmse": result["rmse"]})
        if world.is_main:
            output = Path(config.output_dir)
            record_results(record, result, scale.unit, config.split)
            record.attach("samples", samples.draw(result, scale, output / "samples", config.split))
            record.attach("model", found.describe() | {"source": found.source})
            record.finish().save(output)
        log.close()
    return result


if __name__ == "__main__":
    main()
