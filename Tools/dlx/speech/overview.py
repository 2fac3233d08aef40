"""What a speech corpus holds, before anything is trained on it: as a dictionary, as text, as a picture.

report = measure(corpora.read(folder), FrontEnd())
print(describe(report))
draw(report, "data.png")
"""

from __future__ import annotations

import os
import warnings
from collections import Counter
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np

from dlx import draws, files

from . import audio
from .corpora import Utterance
from .frontend import FrontEnd

STREAM = 43  # of the draws that pick the files to listen to
BELOW_PEAK = 40.0  # dB under its loudest frame from which a frame is silence
FULL_SCALE = 0.999
CLIPPED_RUN = 3  # samples in a row at full scale that are no accident


def measure(
    splits: Mapping[str, Sequence[Utterance]],
    front_end: FrontEnd | None = None,
    *,
    sample: int = 500,
    seed: int = 0,
    threads: int | None = None,
) -> dict[str, Any]:
    """Numbers of a corpus; JSON values. Sound is measured on `sample` utterances drawn from all, 0 for every one."""
    everything = [utterance for utterances in splits.values() for utterance in utterances]
    if not everything:
        raise ValueError("there are no utterances to measure")
    order = draws.permutation(seed, 0, len(everything), STREAM)
    chosen = [everything[index] for index in (order[:sample] if sample else order)]
    edges = _edges([utterance.seconds for utterance in everything])
    return {
        "splits": {name: _numbers(found, edges) for name, found in splits.items() if found},
        "edges": edges,
        "sound": _sound(chosen, threads),
        "text": _text(everything, front_end),
    }


def _edges(seconds: list[float]) -> list[float]:
    """Of at most 24 bins of lengths, whole or half seconds wide, or more."""
    longest = max(max(seconds), 0.5)
    width = next(w for w in (0.5, 1, 2, 5, 10, 30, 60, 600, 1e9) if longest / w <= 24)
    return [round(width * number, 3) for number in range(int(np.ceil(longest / width)) + 1)]


def _numbers(utterances: Sequence[Utterance], edges: list[float]) -> dict[str, Any]:
    seconds = np.array([utterance.seconds for utterance in utterances])
    speakers: Counter[str] = Counter()
    for utterance in utterances:
        speakers[utterance.speaker or "(unnamed)"] += utterance.seconds / 3600
    characters = sum(len(utterance.text) for utterance in utterances)
    return {
        "utterances": len(utterances),
        "hours": round(float(seconds.sum()) / 3600, 4),
        "seconds": {
            "min": round(float(seconds.min()), 3),
            "median": round(float(np.median(seconds)), 3),
            "mean": round(float(seconds.mean()), 3),
            "max": round(float(seconds.max()), 3),
        },
        "histogram": np.histogram(seconds, edges)[0].tolist(),
        "speakers": {name: round(hours, 4) for name, hours in sorted(speakers.items())},
        "characters_per_second": round(characters / max(float(seconds.sum()), 1e-9), 2),
    }


def _sound(chosen: list[Utterance], threads: int | None) -> dict[str, Any]:
    with ThreadPoolExecutor(threads or os.cpu_count() or 1) as pool:
        rows = list(pool.map(_listen, chosen))
    values = np.array([row[1:] for row in rows])
    rates = Counter(row[0] for row in rows)
    clipped = values[:, 2] > 0
    finite = values[np.isfinite(values[:, 3]), 3]
    return {
        "measured": len(chosen),
        "sample_rates": {str(rate): count for rate, count in sorted(rates.items())},
        "silence_share": round(float(values[:, 0].sum() / values[:, 1].sum()), 4),
        "clipped_files": int(clipped.sum()),
        "clipped_examples": [str(utterance.path) for utterance, bad in zip(chosen, clipped, strict=True) if bad][:5],
        "silent_files": int((~np.isfinite(values[:, 3])).sum()),
        "loudness": {
            "median": round(float(np.median(finite)), 2) if len(finite) else None,
            "spread": round(float(np.std(finite)), 2) if len(finite) else None,
        },
        "edge_silence_seconds": round(float(np.median(values[:, 4])), 3),
    }


def _listen(utterance: Utterance) -> tuple[float, ...]:
    """Sample rate, silent and all frames, clipped runs, loudness, seconds of silence at both ends."""
    sound, rate = audio.read(utterance.path)
    levels = audio.frame_levels(sound)
    quiet = int((levels < max(levels.max() - BELOW_PEAK, -90)).sum())
    at_limit = np.concatenate([[0], np.abs(sound) >= FULL_SCALE, [0]]).astype(np.int8)
    starts, ends = np.flatnonzero(np.diff(at_limit) == 1), np.flatnonzero(np.diff(at_limit) == -1)
    runs = int((ends - starts >= CLIPPED_RUN).sum())
    _, start, end = audio.trim_silence(sound, below_peak=BELOW_PEAK)
    return rate, quiet, len(levels), runs, audio.loudness(sound, rate), (start + len(sound) - end) / rate


def _text(utterances: list[Utterance], front_end: FrontEnd | None) -> dict[str, Any]:
    alphabet: Counter[str] = Counter()
    unknown: Counter[str] = Counter()
    words: set[str] = set()
    for utterance in utterances:
        text = utterance.text
        if front_end is not None:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")
                text = front_end.clean(text)
            unknown.update(front_end.symbols.unknown(text))
        alphabet.update(text)
        words.update(text.lower().split())
    return {
        "alphabet": dict(sorted(alphabet.items())),
        "unknown": dict(unknown.most_common()),
        "different_words": len(words),
        "different_texts": len({utterance.text for utterance in utterances}),
    }


def describe(report: Mapping[str, Any]) -> str:
    """The report in lines for a terminal."""
    lines = []
    for name, split in report["splits"].items():
        seconds = split["seconds"]
        lines.append(
            f"{name}: {split['utterances']:,} utterances, {split['hours']:.2f} h, "
            f"{seconds['min']:.1f} to {seconds['max']:.1f} s (median {seconds['median']:.1f}), "
            f"{split['characters_per_second']:.1f} characters/s"
        )
        if len(split["speakers"]) > 1:
            lines.append("  " + ", ".join(f"{speaker} {hours:.2f} h" for speaker, hours in split["speakers"].items()))
    sound, text = report["sound"], report["text"]
    rates = ", ".join(f"{rate} Hz" for rate in sound["sample_rates"])
    lines.append(
        f"sound ({sound['measured']:,} files listened to): {rates}, {100 * sound['silence_share']:.0f} % silence, "
        f"{sound['edge_silence_seconds']:.2f} s of it at the ends, loudness {sound['loudness']['median']} LUFS "
        f"(spread {sound['loudness']['spread']})"
    )
    for key, what in (("clipped_files", "clipped"), ("silent_files", "silent")):
        if sound[key]:
            lines.append(f"  {sound[key]} of them {what}" + _examples(sound, key))
    lines.append(f"text: {text['different_words']:,} different words, {len(text['alphabet'])} different characters")
    lines.append("  " + "".join(text["alphabet"]).strip())
    if text["unknown"]:
        lines.append("  not in the symbol table: " + ", ".join(f"{s!r} {n} x" for s, n in text["unknown"].items()))
    return "\n".join(lines)


def _examples(sound: Mapping[str, Any], key: str) -> str:
    return ", e.g. " + sound["clipped_examples"][0] if key == "clipped_files" else ""


def draw(report: Mapping[str, Any], path: str | os.PathLike[str]) -> Path:
    """A PNG: lengths by split, hours by speaker, characters by number."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(12, 3.6), layout="constrained")
    canvas = FigureCanvasAgg(figure)
    lengths, speakers, letters = figure.subplots(1, 3, width_ratios=(2, 1, 2))
    edges = report["edges"]
    below = np.zeros(len(edges) - 1)
    hours: Counter[str] = Counter()
    for name, split in report["splits"].items():
        counts = np.array(split["histogram"])
        lengths.bar(edges[:-1], counts, np.diff(edges), bottom=below, align="edge", label=name, edgecolor="white")
        below += counts
        hours.update(split["speakers"])
    lengths.set(xlabel="seconds", ylabel="utterances", title="Lengths")
    lengths.legend()
    names = [name for name, _ in hours.most_common(12)]
    speakers.barh(names[::-1], [hours[name] for name in names[::-1]])
    speakers.set(xlabel="hours", title="Speakers")
    alphabet = Counter(report["text"]["alphabet"]).most_common(48)
    letters.bar([repr(c)[1:-1] if c != " " else "\N{OPEN BOX}" for c, _ in alphabet], [count for _, count in alphabet])
    letters.set(yscale="log", title="Characters")
    letters.tick_params("x", labelsize=7, rotation=90 if any(len(c) > 1 for c, _ in alphabet) else 0)
    path = Path(path)
    with files.atomic_path(path) as temporary:
        canvas.print_png(str(temporary))
    return path
