"""Train a voice (Tacotron 2) or a vocoder (WaveGlow): one process or many, stopped and resumed at any step.

    ./dlx run Tacotron2 train -- --config quickstart
    ./dlx run Tacotron2 train -- --config tacotron2 --train_list train.txt --val_list val.txt --output_dir runs/voice
    ./dlx run Tacotron2 train --nproc gpu -- --config waveglow --output_dir runs/waveglow

Recipes: configs/*.yaml. A run's folder holds dllogger.json (log), record.json (result), checkpoints/, report.html.
"""

from __future__ import annotations

import warnings
from pathlib import Path
from typing import Any

from torch import Tensor, nn

from dlx import config as configs
from dlx import dist, optim, trainer, training, weights
from dlx.precision import LossScaler
from dlx.record import Record
from dlx.speech.mel import MelSpectrogram
from dlx.speech.vocoder import GriffinLim
from dlx.step import GraphedStep, wrap

from . import pretrained, registry, samples
from .data import Split
from .evaluate import VOICE, evaluate
from .loss import Tacotron2Loss
from .model import Tacotron2
from .options import CONFIGS, TASK
from .recipe import TrainConfig
from .step import TrainState, VocoderState, capture, train_step, train_vocoder_step

BLIND = 0.35  # attention that is less sharp than this after so many steps has not learnt to read
BLIND_STEPS = 3000


class Trainer(trainer.Trainer):
    """Builds everything of a run. The steps themselves know nothing of it."""

    task, score, maximize, items = TASK, "loss", False, "utterances"

    def __init__(self, config: TrainConfig, world: dist.World):
        self.config, self.world = config, world
        with world.main_first():  # one process makes the corpus and its spectrograms
            self.splits = config.open()
        self.front_end, self.mel = config.front_end(), config.mel()
        dist.seed_everything(config.seed)  # equal weights on every process
        model = registry.build(config.arch, len(self.front_end.symbols))
        self.voice = isinstance(model, Tacotron2)
        names = VOICE if self.voice else ("loss",)
        better = {"focus": "MAXIMIZE", "diagonal": "MAXIMIZE"}
        self.metrics = {name: {"unit": "", "goal": better.get(name, "MINIMIZE"), "format": ":.4f"} for name in names}
        kind = "text-mel" if self.voice else "audio"
        self.train_loader = config.loader("train", self.splits, True, world, kind)
        self.val_loader = config.loader("val", self.splits, False, world, kind) if "val" in self.splits else None
        self.plan()
        if config.init_from:
            found = pretrained.load(config.init_from, arch=config.arch)
            weights.load_into(model, found.model.state_dict())
        dist.seed_everything(config.seed, world.rank)
        self.state = self._build_state(model.to(world.device).train())
        self.graphed: dict[tuple, GraphedStep] = {}

    def _build_state(self, model: nn.Module) -> TrainState | VocoderState:
        config, world = self.config, self.world
        optimizer = optim.build_optimizer(
            model, config.optimizer, lr=self.peak_lr, momentum=config.momentum, weight_decay=config.weight_decay
        )
        # A graph needs batches of few shapes: pieces of sound have one, utterances have those of the buckets.
        self.engine = self.resolve_engine(graphs=not self.voice or bool(config.text_buckets and config.mel_buckets))
        if self.config.engine == "auto" and self.engine == "compile":
            self.engine = "eager"
        options: dict[str, Any] = {
            "forward": wrap(model, self.world, self.engine == "compile"),
            "precision": config.precision,
            "scaler": LossScaler(model.named_parameters(), enabled=config.precision == "fp16"),
            "ema": optim.ModelEma(model, config.ema_decay) if config.ema_decay else None,
            "max_norm": config.gradient_clip,
        }
        if self.voice:
            loss = Tacotron2Loss(gate_positive=config.gate_positive, guide=config.guide)
            return TrainState(model, optimizer, loss=loss, hide=config.hide, hide_run=config.hide_run, **options)
        mel = MelSpectrogram(self.mel).to(world.device)
        return VocoderState(model, optimizer, mel=mel, sigma=config.sigma, **options)

    def step(self, batch: list[Any], epoch: int, index: int) -> Tensor:
        optim.set_learning_rate(self.state.optimizer, self.learning_rate(self.state.step))
        if self.engine != "graph":
            return train_step(self.state, batch) if self.voice else train_vocoder_step(self.state, batch)
        shapes = tuple(tensor.shape for micro in batch for tensor in micro)
        if shapes not in self.graphed:
            self.graphed[shapes] = capture(self.state, batch)
        return self.graphed[shapes](batch)

    def evaluate(self) -> dict[str, Any]:
        result = evaluate(
            self.evaluated,
            self.val_loader,
            world=self.world,
            precision=self.config.precision,
            mel=None if self.voice else self.state.mel,
            sigma=self.config.sigma,
            seed=self.config.seed,
        )
        if self.voice and self.state.step >= BLIND_STEPS and result["focus"] < BLIND and self.world.is_main:
            warnings.warn(
                f"after {self.state.step} steps the attention does not align (focus {result['focus']:.2f}): a voice "
                "that babbles. Raise --guide (1 to 10), look for texts that do not fit their recordings, trim silences",
                stacklevel=2,
            )
        return result

    def identity(self) -> dict[str, Any]:
        front_end = self.front_end if self.voice else None
        return pretrained.describe(self.config.arch, self.mel, front_end)

    def data_identity(self) -> dict[str, str]:
        return self.config.identity(self.splits)

    def finish(self, record: Record, output: Path) -> None:
        split = self.splits.get("val")
        if not (self.voice and self.config.listen and isinstance(split, Split)):
            return
        voice = pretrained.Found(self.evaluated, self.config.arch, self.mel, self.front_end, str(output))
        vocoder = GriffinLim(self.mel).to(self.world.device)
        where = (output / "samples", self.config.listen, self.world.device)
        pictures, sounds = samples.say(voice, vocoder, split, *where)
        if self.config.init_from:
            first = pretrained.load(self.config.init_from, arch=self.config.arch)
            first.model.to(self.world.device)
            more = samples.say(first, vocoder, split, *where, before=True)
            pictures, sounds = pictures + more[0], sounds + more[1]
        record.attach("samples", pictures)
        record.attach("audio", sounds)


def run(config: TrainConfig) -> dict[str, Any]:
    """Train by a configuration; returns the run record's fields. Raises Stopped after a signal, when all is saved."""
    return training.run(config, Trainer)


def main(args: list[str] | None = None) -> dict[str, Any]:
    return run(configs.parse(TrainConfig, args, configs_dir=CONFIGS, prog="train"))


if __name__ == "__main__":
    main()
