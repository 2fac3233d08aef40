"""Pictures of spectrograms and alignments, for people who look for what they hear."""

from __future__ import annotations

import os
from collections.abc import Sequence

import numpy as np

from dlx.files import atomic_path


def draw_speech(
    path: str | os.PathLike[str], mel: np.ndarray, alignments: Sequence[np.ndarray], title: str = ""
) -> None:
    """Write a PNG file: a spectrogram (M, F) over the alignments (frames, symbols) of its chunks, side by side."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(10, 6), layout="constrained")
    upper, lower = figure.subplots(2, 1, sharex=True)
    upper.imshow(mel, origin="lower", aspect="auto", interpolation="nearest", cmap="magma")
    upper.set(ylabel="mel band", title=title if len(title) <= 90 else title[:87] + "...")
    frames, symbols = sum(map(len, alignments)), sum(chunk.shape[1] for chunk in alignments)
    whole = np.zeros((symbols, frames), np.float32)
    frame = symbol = 0
    for chunk in alignments:
        whole[symbol : symbol + chunk.shape[1], frame : frame + len(chunk)] = chunk.T
        frame, symbol = frame + len(chunk), symbol + chunk.shape[1]
    lower.imshow(whole, origin="lower", aspect="auto", interpolation="nearest", cmap="viridis", vmin=0)
    lower.set(xlabel="frame", ylabel="symbol")
    with atomic_path(path) as temporary:
        figure.savefig(temporary, format="png", dpi=80)
