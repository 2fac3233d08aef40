"""From texts to sound: parted, encoded, spoken in batches, vocoded, joined.

What a text sounds like does not depend on the others of its batch.
"""

from __future__ import annotations

import copy
import threading
import time
import warnings
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch

from dlx.speech.batching import pad
from dlx.speech.vocoder import Vocoder

from .cuda import engine as engines
from .cuda.build import BuildError
from .cuda.engine import Engine
from .markup import Piece, pieces
from .model import FastSpeech
from .pretrained import Found

CHUNK = 200  # characters that are said in one go
PAUSE = 0.15  # seconds of silence between pieces
SPEEDS = (0.25, 4.0)


@dataclass(frozen=True)
class Chunk:
    """A piece of a text as it is read, and the frames of each of its symbols (T,)."""

    text: str
    durations: np.ndarray

    @property
    def frames(self) -> int:
        return int(self.durations.sum())


@dataclass(frozen=True)
class Speech:
    """One text said: float32 sound (S,) in -1..1, spectrogram (M, F) of its chunks one after the other."""

    text: str
    audio: np.ndarray
    mel: np.ndarray
    chunks: list[Chunk]
    sample_rate: int

    @property
    def seconds(self) -> float:
        return len(self.audio) / self.sample_rate


@dataclass(frozen=True)
class Job:
    """A text, or a part of one, that can be said as it is."""

    text: str
    pieces: list[Piece]
    speed: float = 1.0


@dataclass
class Timing:
    """Seconds that the stages took, and seconds of sound they made."""

    acoustic: float = 0.0
    vocoder: float = 0.0
    sound: float = 0.0

    @property
    def real_time_factor(self) -> float:
        """Seconds of sound made in a second."""
        return self.sound / max(self.acoustic + self.vocoder, 1e-9)


def engine_of(model: FastSpeech, form: str, batch_size: int = 8) -> Engine:
    """The model in a form, for batches up to a size; "auto" does without the kernels where their compiler is missing,
    and says so."""
    try:
        return engines.build(model, form, **({"batch": batch_size} if form == "tensorrt" else {}))
    except ImportError as error:
        raise ValueError(f"form {form}: {error}") from None
    except BuildError as error:
        if form != "auto":
            raise ValueError(f"form {form}: {error}") from None
        warnings.warn(f"speaking in the plain form: {error}", stacklevel=2)
        return engines.build(model, "plain")


def _check_speed(speed: float) -> None:
    if not SPEEDS[0] <= speed <= SPEEDS[1]:
        raise ValueError(f"a speed lies between {SPEEDS[0]:g} and {SPEEDS[1]:g}, got {speed:g}")


@dataclass
class Synthesizer:
    """A voice and a vocoder that agree on spectrograms (ValueError with the differences if not), ready to speak.

    `form`: of the network, in `dtype`, see `cuda.engine`; "auto" is the fastest that can run here. `strict`: texts with
    characters that cannot be said are refused. Threads may share one: they take turns, a batch each.
    """

    voice: Found
    vocoder: Vocoder
    device: torch.device = field(default_factory=lambda: torch.device("cpu"))
    dtype: torch.dtype = torch.float32
    batch_size: int = 8
    chunk: int = CHUNK
    pause: float = PAUSE
    strict: bool = False
    form: str = "auto"

    def __post_init__(self) -> None:
        self.voice.mel.require_same(self.vocoder.mel)
        model = copy.deepcopy(self.voice.model).eval().requires_grad_(False).to(self.device, self.dtype)
        self.engine = engine_of(model, self.form, self.batch_size)
        self.timing = Timing()
        self._turn = threading.Lock()  # engine and vocoder write results where the next call writes, too

    def plan(self, texts: Sequence[str], names: Sequence[str] | None = None) -> list[list[Piece]]:
        """The pieces of each text. One ValueError tells of all that cannot be said, by their names."""
        planned, faults = [], []
        for number, text in enumerate(texts):
            try:
                planned.append(pieces(self.voice.front_end, text, self.chunk, self.strict, self.voice.leads))
            except ValueError as error:
                faults.append(f"{names[number] if names else f'text {number + 1}'}: {error}")
        if faults:
            raise ValueError("\n".join(faults))
        return planned

    def parts(self, text: str, speed: float = 1.0, chunk: int | None = None) -> list[Job]:
        """The pieces of a text, of at most `chunk` characters, to be said one by one; ValueError as `plan`."""
        _check_speed(speed)
        front_end = self.voice.front_end
        found = pieces(front_end, text, chunk or self.chunk, self.strict, self.voice.leads)
        return [Job(piece.text, [piece], speed) for piece in found]

    def job(self, text: str, speed: float = 1.0) -> Job:
        """A text ready to be said; ValueError as `plan`."""
        return Job(text, [part.pieces[0] for part in self.parts(text, speed)], speed)

    def __call__(
        self, texts: Sequence[str], names: Sequence[str] | None = None, speed: float | Sequence[float] = 1.0
    ) -> list[Speech]:
        """Each text said, in their order; all are checked before the first is. `speed`: of all, or of each."""
        speeds = [float(speed)] * len(texts) if isinstance(speed, int | float) else [float(value) for value in speed]
        for value in speeds:
            _check_speed(value)
        return self.say(list(map(Job, texts, self.plan(texts, names), speeds)))

    def say(self, jobs: Sequence[Job]) -> list[Speech]:
        """Each job said, in their order; their pieces go together, those of like length first."""
        rows = [(row, piece) for row, job in enumerate(jobs) for piece in job.pieces]
        order = sorted(range(len(rows)), key=lambda place: -len(rows[place][1].symbols))
        done: dict[int, tuple[Chunk, np.ndarray, np.ndarray]] = {}
        for first in range(0, len(order), self.batch_size):
            batch = order[first : first + self.batch_size]
            with self._turn:
                said = self._say([rows[place][1] for place in batch], [jobs[rows[place][0]].speed for place in batch])
            done |= zip(batch, said, strict=True)
        parts: list[list[Any]] = [[] for _ in jobs]
        for place, (row, _) in enumerate(rows):
            parts[row].append(done[place])
        return [self._join(job.text, found) for job, found in zip(jobs, parts, strict=True)]

    def joined(self, text: str, speeches: Sequence[Speech]) -> Speech:
        """The parts of a text, said one by one, as one."""
        sound = [piece for speech in speeches for piece in (speech.audio, self.silence())][:-1]
        mel = np.concatenate([speech.mel for speech in speeches], 1)
        chunks = [chunk for speech in speeches for chunk in speech.chunks]
        return Speech(text, np.concatenate(sound), mel, chunks, self.voice.mel.sample_rate)

    def silence(self) -> np.ndarray:
        """What is heard between two pieces."""
        return np.zeros(round(self.pause * self.voice.mel.sample_rate), np.float32)

    @torch.no_grad()
    def _say(self, batch: list[Piece], speeds: list[float]) -> list[tuple[Chunk, np.ndarray, np.ndarray]]:
        """(chunk, spectrogram (M, F), sound) of each piece."""
        mel = self.voice.mel
        started = self._now()
        symbols = [np.array(piece.symbols, np.int64) for piece in batch]
        lengths = torch.tensor([len(row) for row in symbols])
        frames = [
            np.rint(np.array(piece.pauses) * mel.sample_rate / mel.hop_length).astype(np.int64) for piece in batch
        ]
        inputs = (
            pad(symbols, int(lengths.max())),
            lengths,
            torch.tensor(speeds),
            pad([np.array(piece.emphasis, np.float32) for piece in batch], int(lengths.max()), 1.0),
            pad(frames, int(lengths.max())),
        )
        found = self.engine(*inputs[:2], None, None, *inputs[2:])
        spoken = self._now()
        audio = self.vocoder(found.mel.float(), found.mel_lengths).float().cpu().numpy()
        self.timing.acoustic += spoken - started
        self.timing.vocoder += self._now() - spoken
        mels, durations = found.mel.float().cpu().numpy(), found.durations.cpu().numpy()
        results = []
        for item, total in enumerate(found.mel_lengths.tolist()):
            sound = audio[item, : total * mel.hop_length]
            self.timing.sound += len(sound) / mel.sample_rate
            chunk = Chunk(batch[item].text, durations[item, : len(symbols[item])])
            results.append((chunk, mels[item, :, :total], sound))
        return results

    def _join(self, text: str, parts: list[tuple[Chunk, np.ndarray, np.ndarray]]) -> Speech:
        rate, silence = self.voice.mel.sample_rate, self.silence()
        sound = np.concatenate([piece for part in parts for piece in (part[2], silence)][:-1])
        return Speech(text, sound, np.concatenate([part[1] for part in parts], 1), [part[0] for part in parts], rate)

    def _now(self) -> float:
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)
        return time.perf_counter()
