"""How near a voice comes to utterances it was not trained on, exact for any number of processes; who understands it.

    ./dlx run FastSpeech evaluate -- --checkpoint runs/fastspeech_quickstart --config quickstart
    ./dlx run FastSpeech evaluate -- --checkpoint runs/flite --config flite --judge whisper

`mel` is with true durations, so that frames can be compared; `duration_frames` and `length_percent` tell how far the
predicted ones are off. `--config` takes a recipe of training for its data alone.
"""

from __future__ import annotations

import sys
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor

from dlx import config as configs
from dlx import dist
from dlx.precision import autocast
from dlx.record import Record
from dlx.runlog import RunLog
from dlx.speech import intelligibility
from dlx.speech import vocoder as vocoders
from dlx.speech.judge import NEEDS, Whisper

from . import pretrained
from .data import Batch, TimedSplit
from .loss import FastSpeechLoss
from .model import FastSpeech, length_mask, round_durations
from .options import CONFIGS, TASK, DataOptions
from .recipe import TrainConfig
from .synthesis import Synthesizer

# Of `evaluate`, with their units; all are better when lower.
METRICS = {"loss": "", "mel": "", "mel_l1": "", "duration": "", "duration_frames": "frames", "length_percent": "%"}


UTTERANCES = ("data", "train_list", "val_list", "utterances", "voices", "min_seconds", "max_seconds")  # which there are


@dataclass
class EvaluateConfig(DataOptions):
    """Measure a voice on the validation utterances."""

    checkpoint: str = configs.field(help="a run's folder, a checkpoint, a file or a published name")
    precision: Literal["fp32", "tf32", "bf16", "fp16"] = configs.field("fp32", help="arithmetic of the products")
    judge: Literal["none", "whisper"] = configs.field(
        "none", help=f"who listens and writes down what is heard; whisper needs {NEEDS}"
    )
    judged: int = configs.field(25, help="validation texts that are listened to", ge=1)
    vocoder: str = configs.field("hifigan_v1.universal", help="makes the sound that is judged, see infer")
    output_dir: str = configs.field("runs/evaluate", help="where log, record and what was said go")


def _sums(found: Any, batch: Batch) -> tuple[Tensor, Tensor]:
    """Sums over frames, symbols and utterances of each measure, and how many of these there are."""
    losses = FastSpeechLoss()(found, batch.mel, batch.mel_lengths, batch.durations, batch.text_lengths)
    real = batch.mel_lengths > 0
    frames, symbols = batch.mel_lengths.sum(), batch.text_lengths[real].sum()
    mask = length_mask(batch.mel_lengths, batch.mel.shape[2])
    distance = torch.where(mask, (found.mel.float() - batch.mel).abs().mean(1), 0).sum()
    predicted = round_durations(found.log_durations, batch.text_lengths)
    off = torch.where(real[:, None], (predicted - batch.durations).abs(), 0).sum()
    length = 100 * (predicted.sum(1) / batch.mel_lengths.clamp(min=1) - 1).abs()[real].sum()
    sums = torch.stack([losses.mel * frames, distance, losses.duration * symbols, off, length]).double()
    return sums, torch.stack([frames, frames, symbols, symbols, real.sum()]).double()


@torch.no_grad()
def evaluate(
    model: FastSpeech, batches: Iterable[Batch], *, world: dist.World, precision: str = "fp32"
) -> dict[str, float]:
    """METRICS, means over all frames, symbols (durations) or utterances (length). Same on every process."""
    training = model.training
    model.eval()
    totals = torch.zeros(2, len(METRICS) - 1, dtype=torch.float64, device=world.device)
    for batch in batches:
        with autocast(precision, world.device):
            found = model(batch.text, batch.text_lengths, batch.durations, batch.mel.shape[2])
        totals += torch.stack(_sums(found, batch))
    model.train(training)
    sums, counts = world.sum(totals)
    if not counts[0]:
        raise ValueError("there is no utterance to evaluate")
    values = (sums / counts).tolist()
    return dict(zip(METRICS, [values[0] + values[2], *values], strict=True))


def listen(config: EvaluateConfig, voice: pretrained.Found, split: Any, device: torch.device) -> tuple[Any, Any]:
    """Measures and rows of `intelligibility.judge`. ValueError before anything is said where it cannot be judged."""
    if not isinstance(split, TimedSplit):
        raise ValueError("a judge listens to real utterances, not to synthetic data")
    listener = Whisper.open()
    synthesizer = Synthesizer(voice, vocoders.load(config.vocoder, device=device, mel=voice.mel), device)
    utterances = split.utterances[: config.judged]
    speeches = synthesizer([utterance.text for utterance in utterances])
    return intelligibility.judge(utterances, speeches, listener, Path(config.output_dir) / "said")


def other_utterances(config: EvaluateConfig, voice: pretrained.Found) -> list[str]:
    """Options of which utterances there are that a run was trained with otherwise, as words."""
    trained = voice.extra.get("trained", {})
    own = configs.to_dict(config)
    return [
        f"{name} {trained[name]!r} instead of {own[name]!r}"
        for name in UTTERANCES
        if name in trained and trained[name] != own[name]
    ]


def options_of(args: list[str] | None) -> EvaluateConfig:
    """The options of a command line, whose `--config` may be a recipe of training: of that, the data."""
    return configs.parse(
        EvaluateConfig, args, configs_dir=CONFIGS, prog="evaluate", recipe=TrainConfig, shared=DataOptions
    )


def main(args: list[str] | None = None) -> dict[str, Any]:
    config = options_of(args)
    with dist.init(config.device) as world:
        voice = pretrained.load(config.checkpoint, device=world.device)
        if (other := other_utterances(config, voice)) and world.is_main:
            print(
                f"note: the voice was trained with {', '.join(other)}: some of what is measured may have been "
                "learnt from; --config takes the recipe of its training",
                file=sys.stderr,
            )
        for name, value in voice.mel.to_dict().items():
            if hasattr(config, name):
                setattr(config, name, value)
        with world.main_first():
            splits = config.open_timed(world.device)
        voice.front_end.require_same(config.front_end())
        loader = config.loader("val", splits, False, world)
        log = RunLog(config.output_dir, enabled=world.is_main)
        record = Record.start(
            TASK, "evaluate", configs.to_dict(config), seed=config.seed, data=config.identity(splits), run_id=log.run_id
        )
        batches = log.progress(iter(loader), len(loader), "evaluate")
        result = evaluate(voice.model, batches, world=world, precision=config.precision)
        loader.close()
        rows: list[dict[str, Any]] = []
        if config.judge != "none" and world.is_main:
            measures, rows = listen(config, voice, splits["val"], world.device)
            result |= measures
        log.log((), {f"val.{name}": value for name, value in result.items()})
        if world.is_main:
            for name, value in result.items():
                record.metric(f"val.{name}", value, METRICS.get(name, ""))
            record.attach("judged", rows)
            record.attach("model", voice.describe() | {"source": voice.source})
            record.finish().save(Path(config.output_dir))
        log.close()
    return result


if __name__ == "__main__":
    main()
