"""Pictures for reports: which phone each frame is, and the lattice of what else might have been said."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import numpy as np

from dlx.files import atomic_path

from .features import FRAME_SHIFT
from .fst import Arcs


def draw_alignment(
    path: Path,
    energies: np.ndarray,
    phones: Sequence[tuple[str, int, int]],
    words: Sequence[tuple[str, float, float]],
) -> None:
    """Log mel energies (T, M) with the borders of phones (name, first frame, frames) and words (start, seconds)."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(max(5.0, len(energies) / 28), 3.2), layout="constrained")
    axes = figure.subplots()
    end = len(energies) * FRAME_SHIFT
    axes.imshow(energies.T, origin="lower", aspect="auto", extent=(0, end, 0, energies.shape[1]), cmap="magma")
    top = energies.shape[1]
    for name, first, frames in phones:
        axes.axvline(first * FRAME_SHIFT, color="white", linewidth=0.6, alpha=0.7)
        middle = (first + frames / 2) * FRAME_SHIFT
        axes.text(middle, top * 0.02, name, color="white", ha="center", va="bottom", fontsize=7)
    for word, start, seconds in words:
        axes.text(start + seconds / 2, top * 1.02, word, ha="center", va="bottom", fontsize=9)
    axes.set(xlabel="seconds", yticks=[], ylim=(0, top))
    with atomic_path(path) as temporary:
        figure.savefig(temporary, dpi=110)


def draw_lattice(path: Path, arcs: Arcs, names: Sequence[str], most: int = 60) -> None:
    """The word lattice from left to right; the arcs of the best path are thick, others carry how much worse they are.

    At most `most` arcs, those on the best paths.
    """
    from matplotlib.figure import Figure

    count = arcs.num_states
    order = _topological(arcs, count)
    forward, backward = np.full(count, np.inf), np.full(count, np.inf)
    forward[0], backward[arcs.final_states] = 0.0, arcs.final_costs
    by_source = np.argsort(arcs.source, kind="stable")
    bounds = np.searchsorted(arcs.source[by_source], np.arange(count + 1))
    depth = np.zeros(count, int)
    for state in order:
        for arc in by_source[bounds[state] : bounds[state + 1]]:
            target = arcs.target[arc]
            forward[target] = min(forward[target], forward[state] + arcs.cost[arc])
            depth[target] = max(depth[target], depth[state] + 1)
    for state in reversed(order):
        for arc in by_source[bounds[state] : bounds[state + 1]]:
            backward[state] = min(backward[state], arcs.cost[arc] + backward[arcs.target[arc]])
    through = forward[arcs.source] + arcs.cost + backward[arcs.target] - backward[0]
    shown = np.argsort(through, kind="stable")[:most]
    ends = np.stack([arcs.source[shown], arcs.target[shown]], 1).reshape(-1)
    used = list(dict.fromkeys([0, *ends.tolist()]))  # those of the best path first: they lie on the middle line
    rows: dict[int, int] = {}
    place = {}
    for state in used:
        row = rows.get(depth[state], 0)
        rows[depth[state]] = row + 1
        place[state] = (depth[state], (-1) ** row * ((row + 1) // 2))
    figure = Figure(figsize=(max(5.0, 1.5 * (1 + max(x for x, _ in place.values()))), 3.2), layout="constrained")
    axes = figure.subplots()
    for arc in shown[::-1]:
        (x, y), (u, v) = place[int(arcs.source[arc])], place[int(arcs.target[arc])]
        best = through[arc] < 1e-3
        axes.plot((x, u), (y, v), color="tab:red" if best else "0.6", linewidth=2.2 if best else 0.8, zorder=1)
        label = names[arcs.ilabel[arc]] + ("" if best else f" +{through[arc]:.1f}")
        axes.text((x + u) / 2, (y + v) / 2, label, ha="center", va="bottom", fontsize=8 if best else 6)
    axes.scatter(*zip(*place.values(), strict=True), s=18, color="black", zorder=2)
    axes.set_axis_off()
    with atomic_path(path) as temporary:
        figure.savefig(temporary, dpi=110)


def _topological(arcs: Arcs, count: int) -> list[int]:
    """The states so that arcs lead forward only. ValueError for an acceptor with a cycle."""
    incoming = np.bincount(arcs.target, minlength=count)
    following: dict[int, list[int]] = {}
    for source, target in zip(arcs.source.tolist(), arcs.target.tolist(), strict=True):
        following.setdefault(source, []).append(target)
    waiting = [state for state in range(count) if not incoming[state]]
    order = []
    while waiting:
        state = waiting.pop()
        order.append(state)
        for target in following.get(state, ()):
            incoming[target] -= 1
            if not incoming[target]:
                waiting.append(target)
    if len(order) != count:
        raise ValueError(f"the lattice has a cycle: {len(order)} of {count} states can be ordered")
    return order
