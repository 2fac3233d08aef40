"""Losses of a voice or a vocoder on utterances it was not trained on, exact for any number of processes.

    ./dlx run Tacotron2 evaluate -- --checkpoint runs/tacotron2_quickstart --utterances 300
    ./dlx run Tacotron2 evaluate -- --checkpoint runs/flite --config flite --judge whisper

For a voice also how sharp its attention is (the mean over frames of the largest weight) and how near to the diagonal:
both are near 1 for a voice that speaks, and low for one that did not learn to read. With a judge it is listened to.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor, nn

from dlx import config as configs
from dlx import dist
from dlx.precision import autocast
from dlx.record import Record
from dlx.runlog import RunLog
from dlx.speech.judge import NEEDS, Whisper
from dlx.speech.mel import MelSpectrogram

from . import pretrained
from .data import AudioBatch, Split, TextMelBatch
from .intelligibility import judge_voice
from .loss import Tacotron2Loss, attention_focus, guided_attention, likelihood_loss
from .masking import length_mask
from .model import Tacotron2
from .options import CONFIGS, TASK, DataOptions
from .recipe import TrainConfig

VOICE = ("loss", "mel", "gate", "focus", "diagonal")


@dataclass
class EvaluateConfig(DataOptions):
    """Measure a voice or a vocoder on the validation utterances."""

    checkpoint: str = configs.field(help="a run's folder, a checkpoint, a file or a published name")
    precision: Literal["fp32", "tf32", "bf16", "fp16"] = configs.field("fp32", help="arithmetic of the products")
    judge: Literal["none", "whisper"] = configs.field(
        "none", help=f"who listens to a voice and writes down what is heard; whisper needs {NEEDS}"
    )
    judged: int = configs.field(25, help="validation texts that are listened to", ge=1)
    vocoder: str = configs.field("hifigan_v1.universal", help="makes the sound that is judged, see infer")
    output_dir: str = configs.field("runs/evaluate", help="where log, record and what was said go")


def _sums(found: Any, batch: TextMelBatch) -> Tensor:
    """The measures of VOICE, each times the batch's frames, and the frames."""
    losses = Tacotron2Loss()(found, batch.mel, batch.gate, batch.text_lengths, batch.mel_lengths)
    mask = length_mask(batch.mel_lengths, batch.mel.shape[2])
    focus = attention_focus(found.alignments.float(), batch.mel_lengths)
    near = 1 - guided_attention(found.alignments.float(), batch.text_lengths, batch.mel_lengths)
    measures = torch.stack([losses.total, losses.refined, losses.gate, focus, near]).double()
    return torch.cat([measures, measures.new_ones(1)]) * mask.sum()


@torch.no_grad()
def evaluate(
    model: nn.Module,
    batches: Iterable[TextMelBatch] | Iterable[AudioBatch],
    *,
    world: dist.World,
    precision: str = "fp32",
    mel: MelSpectrogram | None = None,
    sigma: float = 1.0,
    seed: int = 0,
) -> dict[str, float]:
    """Means over all frames of a voice's measures (VOICE), or a vocoder's ``loss`` per sample. Same on every process.

    Dropout of the prenet, which is never off, is drawn from ``seed``, so that results can be compared.
    """
    training = model.training
    model.eval()
    voice = isinstance(model, Tacotron2)
    totals = torch.zeros(len(VOICE) + 1 if voice else 2, dtype=torch.float64, device=world.device)
    devices = [world.device] if world.device.type == "cuda" else []
    with torch.random.fork_rng(devices):
        torch.manual_seed(seed)
        for batch in batches:
            with autocast(precision, world.device):
                if voice:
                    found = model(batch.text, batch.text_lengths, batch.mel, batch.mel_lengths)
                else:
                    found = model(mel(batch.audio), batch.audio)
            if voice:
                totals += _sums(found, batch)
            else:
                count = (batch.lengths > 0).sum()
                totals += torch.stack([likelihood_loss(*found, sigma=sigma).double() * count, count.double()])
    model.train(training)
    *sums, count = world.sum(totals).tolist()
    if not count:
        raise ValueError("there is no utterance to evaluate")
    return dict(zip(VOICE if voice else ("loss",), (value / count for value in sums), strict=True))


def _listen(config: EvaluateConfig, found: pretrained.Found, split: Any, device: torch.device) -> tuple[Any, Any]:
    """Measures and rows of `judge_voice`. ValueError before anything is said where it cannot be judged."""
    if not isinstance(found.model, Tacotron2) or not isinstance(split, Split):
        raise ValueError("a judge listens to a voice on real utterances, not to a vocoder or synthetic data")
    judge = Whisper.open()
    vocoder = pretrained.load_vocoder(config.vocoder, mel=found.mel, device=device)
    return judge_voice(found, vocoder, split, judge, config.judged, Path(config.output_dir) / "said", device)


def options_of(args: list[str] | None) -> EvaluateConfig:
    """The options of a command line, whose `--config` may be a recipe of training: of that, the data."""
    return configs.parse(
        EvaluateConfig, args, configs_dir=CONFIGS, prog="evaluate", recipe=TrainConfig, shared=DataOptions
    )


def main(args: list[str] | None = None) -> dict[str, Any]:
    config = options_of(args)
    with dist.init(config.device) as world:
        found = pretrained.load(config.checkpoint, device=world.device)
        for name, value in found.mel.to_dict().items():
            if hasattr(config, name):
                setattr(config, name, value)
        splits = config.open()
        kind = "text-mel" if isinstance(found.model, Tacotron2) else "audio"
        loader = config.loader("val", splits, False, world, kind)
        log = RunLog(config.output_dir, enabled=world.is_main)
        record = Record.start(
            TASK, "evaluate", configs.to_dict(config), seed=config.seed, data=config.identity(splits), run_id=log.run_id
        )
        result = evaluate(
            found.model,
            log.progress(iter(loader), len(loader), "evaluate"),
            world=world,
            precision=config.precision,
            mel=MelSpectrogram(found.mel).to(world.device),
        )
        loader.close()
        rows: list[dict[str, Any]] = []
        if config.judge != "none" and world.is_main:
            measures, rows = _listen(config, found, splits["val"], world.device)
            result |= measures
        log.log((), {f"val.{name}": value for name, value in result.items()})
        if world.is_main:
            for name, value in result.items():
                record.metric(f"val.{name}", value, "")
            if rows:
                record.attach("judged", rows)
            record.attach("model", found.describe() | {"source": found.source})
            record.finish().save(Path(config.output_dir))
        log.close()
    return result


if __name__ == "__main__":
    main()
