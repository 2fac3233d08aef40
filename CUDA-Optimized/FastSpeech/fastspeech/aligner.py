"""Durations of any recordings: a small network learns which frames go with which symbols, and is then forced through.

Badlani et al. 2021, "One TTS Alignment To Rule Them All" (https://arxiv.org/abs/2108.10447): symbols and frames become
vectors, near ones go together, and what is maximised is the likelihood of all monotonic alignments. A diagonal prior
in place of the paper's beta-binomial one.

B batch, T symbols, F frames, M mels, C channels.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from dlx import draws
from dlx.speech.batching import pad
from dlx.speech.datasets import Split, read_mels

from .durations import monotonic_durations
from .model import length_mask

CHANNELS = 64
WIDTH = 0.2  # of the diagonal, relative to the text and to the sound
BLANK = -1.0  # log score of saying nothing, which the likelihood of CTC needs
SCALE = 0.05  # of squared distances
LOW = -1e4
STREAM = 47  # of the draws that choose batches


class Aligner(nn.Module):
    """log p(symbol | frame), (B, F, T), of symbols (B, T) and spectrograms (B, M, F)."""

    def __init__(self, num_symbols: int, num_mels: int, channels: int = CHANNELS) -> None:
        super().__init__()
        self.embedding = nn.Embedding(num_symbols, channels, padding_idx=0)
        self.keys = nn.Sequential(
            nn.Conv1d(channels, 2 * channels, 3, padding=1), nn.ReLU(), nn.Conv1d(2 * channels, channels, 1)
        )
        self.queries = nn.Sequential(
            nn.Conv1d(num_mels, 2 * channels, 3, padding=1), nn.ReLU(), nn.Conv1d(2 * channels, channels, 1)
        )

    def forward(self, text: Tensor, text_lengths: Tensor, mel: Tensor, mel_lengths: Tensor) -> Tensor:
        keys = self.keys(self.embedding(text).transpose(1, 2)).transpose(1, 2)
        queries = self.queries((mel + 5) / 3).transpose(1, 2)  # log mels, about -11..2
        scores = -SCALE * torch.cdist(queries, keys).square()
        across = torch.arange(text.shape[1], device=text.device) / text_lengths[:, None]
        down = torch.arange(mel.shape[2], device=text.device) / mel_lengths.clamp(min=1)[:, None]
        prior = -((across[:, None] - down[:, :, None]) ** 2) / (2 * WIDTH**2)
        within = length_mask(text_lengths, text.shape[1])[:, None]
        return F.log_softmax(torch.where(within, scores + prior, LOW), 2)


def forward_sum_loss(log_weights: Tensor, text_lengths: Tensor, mel_lengths: Tensor) -> Tensor:
    """Negative log likelihood per frame of all monotonic alignments of log weights (B, F, T), by CTC."""
    scores = F.pad(log_weights, (1, 0), value=BLANK).log_softmax(2).transpose(0, 1)
    targets = torch.arange(1, log_weights.shape[2] + 1, device=log_weights.device).expand(len(log_weights), -1)
    losses = F.ctc_loss(scores, targets, mel_lengths, text_lengths, reduction="none", zero_infinity=True)
    return losses.sum() / mel_lengths.sum()


def _batch(split: Split, indices: np.ndarray, device: torch.device) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    text, mels = [split.text[index] for index in indices], read_mels(split, indices)
    symbols, frames = (torch.tensor([row.shape[-1] for row in rows], device=device) for rows in (text, mels))
    return (
        pad(text, max(map(len, text))).to(device),
        symbols,
        pad(mels, max(mel.shape[1] for mel in mels)).to(device),
        frames,
    )


def learn(
    split: Split,
    *,
    steps: int = 600,
    batch_size: int = 16,
    lr: float = 2e-3,
    seed: int = 1,
    device: str | torch.device = "cpu",
    progress: Callable[[int, int], None] | None = None,
) -> Aligner:
    """An aligner of the split's utterances; the global random state is left as it was."""
    device = torch.device(device)
    with torch.random.fork_rng([device] if device.type == "cuda" else []):
        torch.manual_seed(seed)
        aligner = Aligner(len(split.front_end.symbols), split.mel.num_mels).to(device)
    optimizer = torch.optim.Adam(aligner.parameters(), lr)
    order = np.zeros(0, np.int64)
    epoch = 0
    for step in range(steps):
        while len(order) < min(batch_size, len(split)):
            order = np.concatenate([order, draws.permutation(seed, epoch, len(split), STREAM)])
            epoch += 1
        indices, order = order[:batch_size], order[batch_size:]
        text, symbols, mel, frames = _batch(split, indices, device)
        loss = forward_sum_loss(aligner(text, symbols, mel, frames), symbols, frames)
        optimizer.zero_grad()
        loss.backward()
        nn.utils.clip_grad_norm_(aligner.parameters(), 1.0)
        optimizer.step()
        if progress is not None:
            progress(step + 1, steps)
    return aligner.eval()


@torch.no_grad()
def durations_of(
    aligner: Aligner, split: Split, batch_size: int = 16, device: str | torch.device = "cpu"
) -> list[np.ndarray]:
    """Frames of every symbol of the split's utterances, int64 (T,): the best monotonic path of each."""
    found: list[np.ndarray] = []
    for first in range(0, len(split), batch_size):
        indices = np.arange(first, min(first + batch_size, len(split)))
        text, symbols, mel, frames = _batch(split, indices, torch.device(device))
        scores = aligner(text, symbols, mel, frames).double().cpu().numpy()
        for row, index in enumerate(indices):
            try:
                found.append(monotonic_durations(scores[row, : int(frames[row]), : int(symbols[row])]))
            except ValueError as error:
                raise ValueError(f"{split.utterances[index].path}: {error}") from None
    return found
