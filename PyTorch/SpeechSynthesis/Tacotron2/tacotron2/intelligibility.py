"""Whether a voice is understood, see `dlx.speech.intelligibility`; and whether it finds the end of its texts."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

from dlx.speech import intelligibility
from dlx.speech.intelligibility import Judge
from dlx.speech.vocoder import Vocoder

from .data import Split
from .pretrained import Found
from .synthesis import Synthesizer

METRICS = (*intelligibility.METRICS, "unfinished")


def judge_voice(
    voice: Found, vocoder: Vocoder, split: Split, judge: Judge, count: int, folder: Path, device: torch.device
) -> tuple[dict[str, float], list[dict[str, Any]]]:
    """Measures of METRICS over the first ``count`` utterances, and what was said and heard in each.

    ``unfinished``: how many did not find their end within twice the recordings' longest.
    """
    utterances = split.utterances[:count]
    limit = int(2 * split.frames[:count].max()) + 50
    speeches = Synthesizer(voice, vocoder, device, limit=limit)([utterance.text for utterance in utterances])
    measures, rows = intelligibility.judge(utterances, speeches, judge, folder)
    for row, speech in zip(rows, speeches, strict=True):
        row["unfinished"] = any(chunk.reached_limit for chunk in speech.chunks)
    return measures | {"unfinished": float(sum(row["unfinished"] for row in rows))}, rows
