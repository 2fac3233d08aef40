"""Options that several verbs share, as dataclasses to inherit from."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from dlx.config import field
from dlx.loading import Loader
from dlx.speech import options
from dlx.speech.datasets import Synthetic

from .data import ALIGNER_STEPS, TimedSplit, add_durations, build_loader

TASK = "CUDA-Optimized/FastSpeech"
CONFIGS = Path(__file__).resolve().parent.parent / "configs"


@dataclass
class DataOptions(options.DataOptions):
    """Which utterances, how they are read, and where durations come from."""

    durations: str = field(
        "auto",
        help="of symbols: phones (times that the corpus knows), learned (an alignment), auto, or a folder of <id>.npy",
        group="data",
    )
    aligner_steps: int = field(ALIGNER_STEPS, help="steps in which an alignment is learnt", ge=1, group="data")
    resident: bool = field(False, help="keep spectrograms in memory once they are read", group="data")

    def open_timed(self, device: Any = "cpu", progress: Any = None, **sizes: int) -> dict[str, TimedSplit | Synthetic]:
        """`open`, with the durations of every symbol; an alignment is learnt on `device`."""
        splits = self.open(progress, **sizes)
        return add_durations(splits, self.durations, steps=self.aligner_steps, device=device, progress=progress)

    def loader(self, split: str, splits: dict[str, Any], train: bool, world: Any) -> Loader:
        """The loader of a split on this process."""
        return build_loader(
            split,
            data=splits,
            batch_size=self.batch_size,
            train=train,
            seed=self.seed,
            window=self.bucket_window,
            text_buckets=self.text_buckets,
            mel_buckets=self.mel_buckets,
            workers=self.workers,
            resident=self.resident,
            world_rank=world.rank,
            world_size=world.size,
            device=world.device,
        )
