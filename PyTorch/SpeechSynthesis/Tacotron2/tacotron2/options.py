"""Options that several verbs share, as dataclasses to inherit from."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from dlx.config import field
from dlx.loading import Loader
from dlx.speech import options

from .data import AnySplit, build_loader

TASK = "PyTorch/SpeechSynthesis/Tacotron2"
CONFIGS = Path(__file__).resolve().parent.parent / "configs"


@dataclass
class DataOptions(options.DataOptions):
    """Which utterances, and how they are read."""

    segment: int = field(8000, help="samples of a piece of sound (WaveGlow)", ge=1, group="data")

    def loader(
        self, split: str, splits: dict[str, AnySplit], train: bool, world: Any, kind: str = "text-mel"
    ) -> Loader:
        """The loader of a split on this process; `kind` "text-mel" or "audio"."""
        return build_loader(
            split,
            data=splits,
            batch_size=self.batch_size,
            train=train,
            kind=kind,
            seed=self.seed,
            window=self.bucket_window,
            text_buckets=self.text_buckets,
            mel_buckets=self.mel_buckets,
            segment=self.segment,
            workers=self.workers,
            world_rank=world.rank,
            world_size=world.size,
            device=world.device,
        )
