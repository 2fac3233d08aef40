"""Whether a voice is understood: a recogniser listens to what it says, and word errors are counted.

The recordings of the same texts are judged beside it, since the recogniser errs by itself.
"""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import Any, Protocol

import numpy as np

from . import audio
from .corpora import Utterance
from .judge import distance, word_error_rate, words

METRICS = ("wer", "wer_recordings", "wer_ratio")


class Judge(Protocol):
    """What listens, such as `dlx.speech.judge.Whisper`."""

    def transcribe(self, sound: np.ndarray, sample_rate: int) -> str: ...


class Said(Protocol):
    """One text said: float32 sound (S,)."""

    audio: np.ndarray
    sample_rate: int


def judge(
    utterances: Iterable[Utterance], speeches: Iterable[Said], listener: Judge, folder: Path
) -> tuple[dict[str, float], list[dict[str, Any]]]:
    """Measures of METRICS, and what was said and heard in each of the utterances, whose texts `speeches` say.

    `wer` is of the voice, `wer_recordings` of the recordings, `wer_ratio` the one over the other (0 where the
    recordings have no error). The sounds are written to `folder`.
    """
    folder.mkdir(parents=True, exist_ok=True)
    rows: list[dict[str, Any]] = []
    for number, (utterance, speech) in enumerate(zip(utterances, speeches, strict=True)):
        path = folder / f"{number:03d}.wav"
        sound = speech.audio / max(1.0, float(np.abs(speech.audio).max(initial=0.0)))
        audio.write_wav(path, sound, speech.sample_rate)
        heard = listener.transcribe(sound, speech.sample_rate)
        rows.append(
            {
                "text": utterance.text,
                "heard": heard,
                "heard_recording": listener.transcribe(*audio.read(utterance.path)),
                "errors": distance(words(utterance.text), words(heard)),
                "audio": f"{folder.name}/{path.name}",
            }
        )
    texts = [row["text"] for row in rows]
    own, recordings = (word_error_rate(texts, [row[key] for row in rows]) for key in ("heard", "heard_recording"))
    return dict(zip(METRICS, (own, recordings, own / recordings if recordings else 0.0), strict=True)), rows
