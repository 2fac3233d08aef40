"""Whether a voice is understood: it reads texts it was not trained on, a recogniser listens, word errors are counted.

The recordings of the same texts are judged beside it, since the recogniser errs by itself.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any, Protocol

import numpy as np
import torch

from dlx.speech import audio
from dlx.speech.judge import distance, word_error_rate, words
from dlx.speech.vocoder import Vocoder

from .data import Split
from .pretrained import Found
from .synthesis import Synthesizer

METRICS = ("wer", "wer_recordings", "wer_ratio", "unfinished")


class Judge(Protocol):
    """What listens, such as `dlx.speech.judge.Whisper`."""

    def transcribe(self, sound: np.ndarray, sample_rate: int) -> str: ...


def judge_voice(
    voice: Found, vocoder: Vocoder, split: Split, judge: Judge, count: int, folder: Path, device: torch.device
) -> tuple[dict[str, float], list[dict[str, Any]]]:
    """Measures of METRICS over the first ``count`` utterances, and what was said and heard in each.

    ``wer`` is of the voice, ``wer_recordings`` of the recordings, ``wer_ratio`` the one over the other (0 where the
    recordings have no error), ``unfinished`` how many did not find their end within twice the recordings' longest.
    The sounds are written to ``folder``.
    """
    utterances = split.utterances[:count]
    texts = [utterance.text for utterance in utterances]
    limit = int(2 * split.frames[:count].max()) + 50
    folder.mkdir(parents=True, exist_ok=True)
    rows, heard, copied = [], [], []
    for number, (utterance, speech) in enumerate(
        zip(utterances, Synthesizer(voice, vocoder, device, limit=limit)(texts), strict=True)
    ):
        path = folder / f"{number:03d}.wav"
        peak = max(1.0, float(np.abs(speech.audio).max(initial=0.0)))
        audio.write_wav(path, speech.audio / peak, speech.sample_rate)
        heard.append(judge.transcribe(speech.audio / peak, speech.sample_rate))
        copied.append(judge.transcribe(*audio.read(utterance.path)))
        rows.append(
            {
                "text": utterance.text,
                "heard": heard[-1],
                "heard_recording": copied[-1],
                "errors": distance(words(utterance.text), words(heard[-1])),
                "audio": f"{folder.name}/{path.name}",
                "unfinished": any(chunk.reached_limit for chunk in speech.chunks),
            }
        )
    own, recordings = word_error_rate(texts, heard), word_error_rate(texts, copied)
    values = (own, recordings, own / recordings if recordings else 0.0, float(sum(row["unfinished"] for row in rows)))
    return dict(zip(METRICS, values, strict=True)), rows
