"""Masks as COCO writes them: the lengths of runs down the columns, beginning with zeros, and its text form of them.

In the text a run is written as its difference to the run two before (from the fourth on), in groups of five bits, low
ones first, one character (48 + value) a group; bit 5 says that another group follows, bit 4 of the last is the sign.
"""

from __future__ import annotations

from typing import Any

import numpy as np

GROUPS = 7  # five bits each: enough for the pixels of any picture


def run_lengths(mask: np.ndarray) -> np.ndarray:
    """int64: lengths of the runs of a (height, width) mask, column by column; the first counts zeros (perhaps none)."""
    values = np.asarray(mask, bool).ravel(order="F")
    if not values.size:
        return np.zeros(0, np.int64)
    edges = np.flatnonzero(values[1:] != values[:-1]) + 1
    runs = np.diff(np.concatenate([[0], edges, [values.size]]))
    return np.concatenate([[0], runs]) if values[0] else runs


def encode(mask: np.ndarray) -> dict[str, Any]:
    """A (height, width) mask as COCO's compressed run-length encoding: {"size": [height, width], "counts": text}."""
    runs = run_lengths(mask)
    rest = runs.copy()
    rest[3:] -= runs[1:-2]
    groups = np.zeros((len(rest), GROUPS), np.uint8)
    used = np.zeros((len(rest), GROUPS), bool)
    open_rows = np.ones(len(rest), bool)
    for group in range(GROUPS):
        low = rest & 31
        rest = rest >> 5
        more = open_rows & np.where(low & 16, rest != -1, rest != 0)
        groups[:, group] = 48 + low + 32 * more
        used[:, group] = open_rows
        open_rows = more
    return {"size": [int(side) for side in np.shape(mask)], "counts": groups[used].tobytes().decode("ascii")}


def decode(encoded: dict[str, Any]) -> np.ndarray:
    """The bool (height, width) mask of a compressed or plain ("counts" is a list) encoding; ValueError for others."""
    try:
        height, width = (int(side) for side in encoded["size"])
        counts = encoded["counts"]
    except (KeyError, TypeError, ValueError):
        raise ValueError(f"not a run-length encoding: {str(encoded)[:80]}") from None
    runs = _from_text(counts) if isinstance(counts, str | bytes) else np.asarray(counts, np.int64)
    if (runs < 0).any() or runs.sum() != height * width:
        raise ValueError(f"run lengths add up to {runs.sum()}, not to {height} x {width} pixels")
    values = np.repeat(np.arange(len(runs)) % 2 == 1, runs)
    return values.reshape(height, width, order="F")


def _from_text(text: str | bytes) -> np.ndarray:
    codes = np.frombuffer(text.encode("ascii") if isinstance(text, str) else text, np.uint8).astype(np.int64) - 48
    if len(codes) and (codes.min() < 0 or codes.max() > 63 or codes[-1] & 32):
        raise ValueError("run lengths hold a character that is none of theirs, or end too early")
    runs: list[int] = []
    value, shift = 0, 0
    for code in codes.tolist():
        value |= (code & 31) << shift
        shift += 5
        if code & 32:
            continue
        if code & 16:
            value -= 1 << shift
        runs.append(value + (runs[-2] if len(runs) > 2 else 0))
        value, shift = 0, 0
    return np.array(runs, np.int64)
