"""From texts to sound: cleaned, parted, decoded in batches, vocoded, joined; or piece by piece as it is decoded.

What a text sounds like depends on the seed and the text alone, not on the others of its batch.
"""

from __future__ import annotations

import copy
import time
import warnings
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

import numpy as np
import torch
from torch import Tensor

from dlx import draws
from dlx.speech.batching import pad
from dlx.speech.vocoder import Vocoder

from .decoding import FastDecoder, Stops, check_text, decode
from .pretrained import Found
from .streaming import Growing, growing_sound

SEED_STREAM = 46  # of the draws that seed the chunks' dropout
CHUNK = 200  # characters that are decoded in one go
PAUSE = 0.15  # seconds of silence between chunks
PIECE = 24  # frames in a piece of streamed sound, at least


@dataclass(frozen=True)
class Chunk:
    """A piece of a text as it is read, and how it came out."""

    text: str
    frames: int
    reached_limit: bool
    alignment: np.ndarray  # (frames, symbols)


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


@dataclass
class Synthesizer:
    """A voice and a vocoder that agree on spectrograms (ValueError with the differences if not), ready to speak.

    ``dtype``: of the acoustic model's weights and activations; ``limit``: frames of a chunk; ``engine``: of
    steps go through torch.compile; ``strict``: texts with characters that cannot be said are refused.
    """

    voice: Found
    vocoder: Vocoder
    device: torch.device = field(default_factory=lambda: torch.device("cpu"))
    dtype: torch.dtype = torch.float32
    batch_size: int = 8
    limit: int = 2000
    threshold: float = 0.5
    chunk: int = CHUNK
    pause: float = PAUSE
    seed: int = 0
    strict: bool = False
    engine: str = "auto"

    def __post_init__(self) -> None:
        self.voice.mel.require_same(self.vocoder.mel)
        self.model = copy.deepcopy(self.voice.model).eval().requires_grad_(False).to(self.device, self.dtype)
        self.decoder = FastDecoder(self.model, self.engine)
        self.timing = Timing()

    def plan(self, texts: Sequence[str], names: Sequence[str] | None = None) -> list[list[str]]:
        """The cleaned chunks of each text. One ValueError tells of all that cannot be said, by their names."""
        planned, faults = [], []
        for number, text in enumerate(texts):
            try:
                chunks = self.voice.front_end.chunks(text, self.chunk, self.strict)
                for piece in chunks:
                    self._encode(piece, quiet=True)
                planned.append(chunks)
            except ValueError as error:
                faults.append(f"{names[number] if names else f'text {number + 1}'}: {error}")
        if faults:
            raise ValueError("\n".join(faults))
        return planned

    def __call__(self, texts: Sequence[str], names: Sequence[str] | None = None) -> list[Speech]:
        """Each text said, in their order. All texts are checked before the first is read."""
        planned = self.plan(texts, names)
        jobs = [(row, place, piece) for row, chunks in enumerate(planned) for place, piece in enumerate(chunks)]
        symbols = [np.array(self._encode(piece), np.int64) for _, _, piece in jobs]
        order = sorted(range(len(jobs)), key=lambda job: -len(symbols[job]))
        done: dict[tuple[int, int], tuple[Chunk, np.ndarray, np.ndarray]] = {}
        for first in range(0, len(order), self.batch_size):
            batch = order[first : first + self.batch_size]
            for job, result in zip(
                batch, self._say([jobs[job] for job in batch], [symbols[job] for job in batch]), strict=True
            ):
                done[jobs[job][:2]] = result
        return [
            self._join(text, [done[row, place] for place in range(len(chunks))])
            for row, (text, chunks) in enumerate(zip(texts, planned, strict=True))
        ]

    @torch.no_grad()
    def _say(
        self, jobs: list[tuple[int, int, str]], symbols: list[np.ndarray]
    ) -> list[tuple[Chunk, np.ndarray, np.ndarray]]:
        """(chunk, spectrogram (M, F), sound) of a batch."""
        started = self._now()
        lengths = torch.tensor([len(row) for row in symbols], device=self.device)
        text = pad(symbols, max(map(len, symbols))).to(self.device)
        found = decode(
            self.decoder,
            text,
            lengths,
            generator=[self._generator(row, place) for row, place, _ in jobs],
            threshold=self.threshold,
            limit=self.limit,
        )
        decoded = self._now()
        audio = self.vocoder(found.refined.float(), found.lengths).float().cpu().numpy()
        self.timing.acoustic += decoded - started
        self.timing.vocoder += self._now() - decoded
        mels, alignments = found.refined.float().cpu().numpy(), found.alignments.float().cpu().numpy()
        results = []
        for item, (frames, reached) in enumerate(zip(found.lengths.tolist(), found.reached_limit, strict=True)):
            chunk = Chunk(jobs[item][2], frames, reached, alignments[item, :frames, : len(symbols[item])])
            sound = audio[item, : frames * self.voice.mel.hop_length]
            self.timing.sound += len(sound) / self.voice.mel.sample_rate
            results.append((chunk, mels[item, :, :frames], sound))
        return results

    def _join(self, text: str, parts: list[tuple[Chunk, np.ndarray, np.ndarray]]) -> Speech:
        silence = np.zeros(round(self.pause * self.voice.mel.sample_rate), np.float32)
        pieces = [parts[0][2]]
        for _, _, sound in parts[1:]:
            pieces += [silence, sound]
        mel = np.concatenate([part[1] for part in parts], 1)
        return Speech(text, np.concatenate(pieces), mel, [part[0] for part in parts], self.voice.mel.sample_rate)

    @torch.no_grad()
    def stream(self, text: str, row: int = 0) -> Iterator[np.ndarray]:
        """The sound of `__call__` in pieces, each as soon as it is certain; float32 (S,).

        A vocoder that needs the whole spectrogram (Griffin-Lim) gives one piece per chunk.
        """
        silence = np.zeros(round(self.pause * self.voice.mel.sample_rate), np.float32)
        for place, piece in enumerate(self.plan([text])[0]):
            if place:
                yield silence
            symbols = torch.tensor([self._encode(piece)], device=self.device)
            for sound in self._stream_chunk(symbols, self._generator(row, place)):
                yield sound[0].float().cpu().numpy()

    def _stream_chunk(self, text: Tensor, generator: torch.Generator) -> Iterator[Tensor]:
        model, lengths = self.model, torch.tensor([text.shape[1]], device=self.device)
        check_text(model, text, lengths)
        stops = Stops(1, self.threshold, self.limit)

        def refine(mel: Tensor, first: int) -> Tensor:
            return model.postnet(mel, torch.ones(1, 1, mel.shape[2], dtype=torch.bool, device=mel.device))

        refined = Growing(refine, model.postnet.reach)
        sound = growing_sound(self.vocoder, PIECE)
        whole: list[Tensor] = []
        for block in self.decoder.blocks(model.encoder(text, lengths), lengths, generator, self.limit):
            before = stops.frames
            last = stops.see(block.gates) or stops.frames >= self.limit
            frames = block.frames[: stops.lengths[0] - before].permute(1, 2, 0).clone()
            frames = refined.push(frames, last)
            frames = None if frames is None else frames.float()
            if sound is None:
                whole += [frames] if frames is not None else []
                piece = self.vocoder(torch.cat(whole, 2)) if last else None
            else:
                piece = sound.push(frames, last) if frames is not None or last else None
            if piece is not None:
                yield piece
            if last:
                break
        if any(stops.reached_limit):
            warnings.warn(f"cut at the limit of {self.limit} frames: the gate never fired", stacklevel=2)

    def _encode(self, piece: str, quiet: bool = False) -> list[int]:
        with warnings.catch_warnings():
            if quiet:
                warnings.simplefilter("ignore")
            return self.voice.front_end.symbols.encode(piece, self.strict)

    def _generator(self, row: int, place: int) -> torch.Generator:
        chosen = draws.draws(self.seed, row, place, 1, SEED_STREAM)[0, 0]
        return torch.Generator().manual_seed(int(chosen * 2**53))

    def _now(self) -> float:
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)
        return time.perf_counter()
