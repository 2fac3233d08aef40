"""Pictures of spectrograms with the borders of their symbols."""

from __future__ import annotations

import os
from collections.abc import Sequence

import numpy as np

from dlx.files import atomic_path

from .synthesis import Chunk

CROWDED = 90  # symbols above which a picture names none


def draw_speech(path: str | os.PathLike[str], mel: np.ndarray, chunks: Sequence[Chunk], title: str = "") -> None:
    """Write a PNG file: a spectrogram (M, F); below it how many frames each symbol of its chunks lasts."""
    from matplotlib.figure import Figure

    durations = np.concatenate([chunk.durations for chunk in chunks])
    ends = np.cumsum(durations)
    figure = Figure(figsize=(10, 5), layout="constrained")
    upper, lower = figure.subplots(2, 1, sharex=True, height_ratios=[3, 1])
    upper.imshow(mel, origin="lower", aspect="auto", interpolation="nearest", cmap="magma")
    upper.set(ylabel="mel band", title=title if len(title) <= 90 else title[:87] + "...")
    upper.vlines(ends[:-1], -0.5, len(mel) - 0.5, color="white", linewidth=0.3, alpha=0.5)
    lower.bar(ends - durations, durations, width=durations, align="edge", edgecolor="white", linewidth=0.3)
    lower.set(xlabel="frame", ylabel="frames", xlim=(-0.5, mel.shape[1] - 0.5))
    if len(durations) <= CROWDED and all(len(chunk.text) <= len(chunk.durations) for chunk in chunks):
        # A led-in piece has one symbol more than its text.
        names = "".join(chunk.text.rjust(len(chunk.durations)) for chunk in chunks)
        for name, end, frames in zip(names, ends, durations, strict=True):
            lower.text(end - frames / 2, frames, name, ha="center", va="bottom", fontsize=7)
    with atomic_path(path) as temporary:
        figure.savefig(temporary, format="png", dpi=80)
