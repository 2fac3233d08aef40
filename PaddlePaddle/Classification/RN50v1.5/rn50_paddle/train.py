"""Train an image classifier in PaddlePaddle: one process or many, stopped and resumed at any step, dense or 2:4 sparse.

    ./dlx run rn50_paddle train -- --config quickstart
    ./dlx run rn50_paddle train -- --config resnet50 --data_dir /data/imagenet --output_dir runs/rn50
    ./dlx run rn50_paddle train -- --config quickstart_asp --init_from runs/paddle-quickstart
    NPROC=2 PaddlePaddle/Classification/RN50v1.5/scripts/train.sh --config quickstart

A run's folder holds dllogger.json (log), record.json (result), checkpoints/ and report.html.
"""

from __future__ import annotations

import sys
from typing import Any

from dlx import config as configs
from dlx import record as records

from . import framework
from .options import CONFIGS, TrainConfig


def run(config: TrainConfig, arguments: list[str]) -> dict[str, Any]:
    """What `run_scope` says; the fields of the record. `arguments` are those that made the configuration."""
    if config.asp and not framework.choose_old_ir():
        framework.run_with_old_ir("rn50_paddle.train", arguments)
        return records.load(config.output_dir).fields
    if config.run_scope == "eval_only":
        return _evaluate(config)
    from . import trainer  # it imports Paddle, whose flags are set by now

    return trainer.run(config)


def _evaluate(config: TrainConfig) -> dict[str, Any]:
    from dataclasses import fields

    from .evaluate import EvaluateConfig, measure
    from .options import DataOptions

    shared = {item.name: getattr(config, item.name) for item in fields(DataOptions)}
    source = config.checkpoint or config.output_dir
    target = f"{config.output_dir}/evaluate"
    return measure(EvaluateConfig(checkpoint=source, arch=config.arch, output_dir=target, **shared))


def main(args: list[str] | None = None) -> dict[str, Any]:
    arguments = sys.argv[1:] if args is None else args
    return run(configs.parse(TrainConfig, arguments, configs_dir=CONFIGS, prog="train"), arguments)


if __name__ == "__main__":
    main()
