"""One static HTML page per run, from its record: metrics, curves, confusions, pictures, sounds, command, conditions.

    python -m dlx.report RUN_DIR        # writes RUN_DIR/report.html

The page is a single file that needs no script, no network and no other file: pictures and sounds are data URIs, curves
are SVG. It follows the reader's light or dark setting and fits a phone. Only files in the run's folder are embedded.
"""

from __future__ import annotations

import base64
import json
import math
import os
import sys
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from typing import Any

from . import record as run_record
from .files import atomic_write, human_bytes

__all__ = ["render"]

MAX_SAMPLES = 60
MAX_POINTS = 400
MAX_LABELLED_CLASSES = 40
_MIME = {
    ".png": "image/png", ".jpg": "image/jpeg", ".jpeg": "image/jpeg", ".gif": "image/gif", ".webp": "image/webp",
    ".svg": "image/svg+xml", ".wav": "audio/wav", ".flac": "audio/flac", ".mp3": "audio/mpeg", ".ogg": "audio/ogg",
}  # fmt: skip


def render(run_dir: str | os.PathLike) -> Path:
    """Write `report.html` into `run_dir` from the `record.json` there and the files that it names; return its path."""
    import jinja2

    run_dir = Path(run_dir)
    if not run_dir.is_dir():
        raise ValueError(f"{run_dir}: no such run folder")
    fields = run_record.load(run_dir).fields
    attachments = fields["attachments"]
    environment = jinja2.Environment(
        autoescape=True, trim_blocks=True, lstrip_blocks=True, undefined=jinja2.StrictUndefined
    )
    environment.filters.update(number=_number, plain=_plain_text)
    template = environment.from_string(Path(__file__).with_name("report.html").read_text(encoding="utf-8"))
    metrics = [{"name": name, **metric} for name, metric in fields["metrics"].items()]
    samples = attachments.get("samples") or []
    page = template.render(
        record=fields,
        started=_local_time(fields["started"]),
        duration=_duration(fields["seconds"]),
        headline=[metric for metric in metrics if metric["goal"]][:4] or metrics[:4],
        metrics=metrics,
        charts=_charts(fields["curve"]),
        confusion=_confusion(attachments.get("confusion")),
        samples=[_sample(run_dir, sample) for sample in samples[:MAX_SAMPLES]],
        sample_count=len(samples),
        audio=[_sound(run_dir, item) for item in attachments.get("audio") or []],
        files=[_file(run_dir, item) for item in attachments.get("files") or []],
        environment=_environment(fields),
        others={
            key: json.dumps(value, indent=1, ensure_ascii=False)
            for key, value in attachments.items()
            if key not in ("confusion", "samples", "audio", "files")
        },
    )
    target = run_dir / "report.html"
    atomic_write(target, page)
    return target


# ---------------------------------------------------------------------------------------------------------- curves


@dataclass(frozen=True)
class _Axis:
    """Maps values to pixels between `start` and `end`, linearly or by logarithm, with ticks at round values."""

    low: float
    high: float
    start: float
    end: float
    log: bool = False

    def __call__(self, value: float) -> float:
        low, high = (math.log10(self.low), math.log10(self.high)) if self.log else (self.low, self.high)
        value = math.log10(value) if self.log else value
        return round(self.start + (value - low) / (high - low) * (self.end - self.start), 1)

    def ticks(self, count: int = 5) -> list[float]:
        if self.log:
            exponents = range(math.floor(math.log10(self.low)), math.ceil(math.log10(self.high)) + 1)
            leading = (1, 2, 5) if len(exponents) <= 3 else (1,)
            candidates = [digit * 10.0**exponent for exponent in exponents for digit in leading]
        else:
            rough = (self.high - self.low) / count
            unit = 10.0 ** math.floor(math.log10(rough))
            step = next(unit * digit for digit in (1, 2, 2.5, 5, 10) if unit * digit >= rough * 0.999)
            first = math.ceil(self.low / step - 1e-9)
            candidates = [step * number for number in range(first, first + 2 * count + 2)]
        margin = (self.high - self.low) * 1e-9
        return [tick for tick in candidates if self.low - margin <= tick <= self.high + margin]


def _charts(curves: dict[str, list[list[Any]]]) -> list[dict[str, Any]]:
    """One chart per quantity: train.loss and val.loss share one, val.top1 has its own."""
    groups: dict[str, dict[str, list[tuple[float, float]]]] = {}
    for name, points in curves.items():
        numbers = sorted((float(step), float(value)) for step, value in points)
        if any(math.isfinite(value) for _, value in numbers):
            groups.setdefault(name.rsplit(".", 1)[-1], {})[name] = numbers
    return [_chart(title, series) for title, series in groups.items()]


def _chart(title: str, series: dict[str, list[tuple[float, float]]]) -> dict[str, Any]:
    width, height, left, right, top, bottom = 520, 270, 58, 14, 12, 30
    finite = [(x, y) for points in series.values() for x, y in points if math.isfinite(y)]
    xs, ys = [x for x, _ in finite], [y for _, y in finite]
    low, high = min(ys), max(ys)
    log = low > 0 and high / low > 50
    if high - low < 1e-12 * max(1.0, abs(high)):
        low, high, log = low - (abs(low) * 0.1 or 1), high + (abs(high) * 0.1 or 1), False
    elif log:
        low, high = low / 1.1, high * 1.1
    else:
        pad = (high - low) * 0.06
        low, high = (0.0 if low >= 0 and low - pad < 0 else low - pad), high + pad
    x_low, x_high = min(xs), max(xs)
    if x_low == x_high:
        x_low, x_high = x_low - 1, x_high + 1
    x_axis, y_axis = _Axis(x_low, x_high, left, width - right), _Axis(low, high, height - bottom, top, log)
    lines = []
    for number, (name, points) in enumerate(series.items()):
        known = [value for _, value in points if math.isfinite(value)]
        thinned = _thin(points)
        dots = [(x_axis(x), y_axis(y), x, y) for x, y in thinned if math.isfinite(y)]
        lines.append({
            "name": name, "color": number % 6 + 1, "path": _path(thinned, x_axis, y_axis), "last": known[-1],
            "dots": dots if len(dots) <= 120 else dots[-1:], "visible": len(dots) <= 30,
        })  # fmt: skip
    y_ticks = y_axis.ticks()
    return {
        "title": title, "width": width, "height": height, "left": left, "right": width - right, "base": height - bottom,
        "x_ticks": [(x_axis(tick), _tick(tick)) for tick in x_axis.ticks(5) if not tick % 1],
        "y_ticks": [(y_axis(tick), _tick(tick)) for tick in y_ticks], "lines": lines, "log": log,
    }  # fmt: skip


def _thin(points: list[tuple[float, float]]) -> list[tuple[float, float]]:
    """At most MAX_POINTS points; of each stretch the lowest and the highest stay, so that spikes are not hidden."""
    if len(points) <= MAX_POINTS:
        return points
    size = math.ceil(2 * len(points) / MAX_POINTS)
    kept = [points[0]]
    for start in range(0, len(points), size):
        stretch = points[start : start + size]
        finite = [point for point in stretch if math.isfinite(point[1])]
        if finite:
            kept += sorted({min(finite, key=lambda point: point[1]), max(finite, key=lambda point: point[1])})
        else:
            kept.append(stretch[0])
    return [*kept, points[-1]]


def _path(points: list[tuple[float, float]], x_axis: _Axis, y_axis: _Axis) -> str:
    """SVG path; a value that is not finite interrupts the line."""
    commands, pen_down = [], False
    for x, y in points:
        if not math.isfinite(y):
            pen_down = False
            continue
        commands.append(f"{'L' if pen_down else 'M'}{x_axis(x)} {y_axis(y)}")
        pen_down = True
    return "".join(commands)


# ------------------------------------------------------------------------------------------------------- attachments


def _confusion(content: dict[str, Any] | None) -> dict[str, Any] | None:
    """Rows are the truth: shares of each row for the shading, recall and precision, the most frequent mistakes."""
    if not content:
        return None
    labels, matrix = [str(label) for label in content["labels"]], content["matrix"]
    if len(matrix) != len(labels) or any(len(row) != len(labels) for row in matrix):
        raise ValueError(f"confusion: {len(labels)} labels need a square matrix of that size")
    columns = [sum(column) for column in zip(*matrix, strict=True)]
    rows = []
    for index, (label, row) in enumerate(zip(labels, matrix, strict=True)):
        total = sum(row)
        cells = [{"count": n, "share": n / total if total else 0.0, "diagonal": i == index} for i, n in enumerate(row)]
        rows.append({"label": label, "cells": cells, "recall": row[index] / total if total else None})
    precision = [matrix[i][i] / column if column else None for i, column in enumerate(columns)]
    pairs = [
        (matrix[i][j], labels[i], labels[j], rows[i]["cells"][j]["share"])
        for i in range(len(labels))
        for j in range(len(labels))
        if i != j and matrix[i][j]
    ]
    pairs.sort(key=lambda pair: -pair[0])
    return {"labels": labels, "rows": rows, "precision": precision, "pairs": pairs[:5],
            "small": len(labels) > MAX_LABELLED_CLASSES}  # fmt: skip


def _sample(run_dir: Path, sample: dict[str, Any]) -> dict[str, Any]:
    truth, prediction = sample.get("truth"), sample.get("prediction")
    return {
        "image": sample.get("image"), "uri": _data_uri(run_dir, sample.get("image")), "caption": sample.get("caption"),
        "tiny": _is_tiny(run_dir, sample.get("image")),
        "truth": truth, "prediction": prediction, "right": None if truth is None else truth == prediction,
        "top": [(label, float(share)) for label, share in (sample.get("top") or [])[:5]],
    }  # fmt: skip


def _inside(run_dir: Path, name: Any) -> Path | None:
    """The file `name` of the run's folder; None if it is missing or lies elsewhere."""
    if not isinstance(name, str):
        return None
    path = (run_dir / name).resolve()
    return path if path.is_relative_to(run_dir.resolve()) and path.is_file() else None


def _data_uri(run_dir: Path, name: Any) -> str | None:
    path = _inside(run_dir, name)
    if path is None or path.suffix.lower() not in _MIME:
        return None
    return f"data:{_MIME[path.suffix.lower()]};base64,{base64.b64encode(path.read_bytes()).decode()}"


def _sound(run_dir: Path, item: dict[str, Any]) -> dict[str, Any]:
    name = item.get("file")
    return {"file": name, "caption": item.get("caption"), "uri": _data_uri(run_dir, name)}


def _is_tiny(run_dir: Path, name: Any) -> bool:
    """Whether a PNG is under 100 pixels wide: enlarged, its pixels should stay sharp."""
    path = _inside(run_dir, name)
    head = path.open("rb").read(24) if path else b""
    return head[:8] == b"\x89PNG\r\n\x1a\n" and int.from_bytes(head[16:20], "big") < 100


def _file(run_dir: Path, item: Any) -> dict[str, Any]:
    name = str(item.get("file", "")) if isinstance(item, dict) else str(item)
    path = _inside(run_dir, name)
    caption = item.get("caption") if isinstance(item, dict) else None
    return {"name": name, "caption": caption, "size": human_bytes(path.stat().st_size) if path else None}


def _environment(fields: dict[str, Any]) -> list[tuple[str, str]]:
    hardware, source = fields["hardware"], fields["source"]
    rows = [("CPU", f"{hardware.get('cpu')}, {hardware.get('cores')} cores, {hardware.get('memory_gib')} GiB")]
    gpus = hardware.get("gpus") or []
    for name in dict.fromkeys(gpu["name"] for gpu in gpus):
        same = [gpu for gpu in gpus if gpu["name"] == name]
        rows.append(("GPU", f"{len(same)} × {name}, {same[0].get('memory_gib')} GiB"))
    if hardware.get("driver"):
        rows.append(("Driver", hardware["driver"]))
    rows.append(("System", str(hardware.get("system"))))
    rows.append(("Versions", ", ".join(f"{name} {number}" for name, number in fields["versions"].items())))
    if source:
        rows.append(("Commit", source["commit"][:12] + (" with uncommitted changes" if source["dirty"] else "")))
    if fields["seed"] is not None:
        rows.append(("Seed", str(fields["seed"])))
    rows += [(f"Data: {name}", f"SHA-256 {digest}") for name, digest in fields["data"].items()]
    return rows


# ------------------------------------------------------------------------------------------------------------- words


def _number(value: Any) -> str:
    """A number as one reads it: 12,345 · 1,234.5 · 93.12 · 0.0123 · 1.2e-05."""
    if isinstance(value, bool) or not isinstance(value, int | float):
        return str(value)
    if isinstance(value, int) or (abs(value) >= 10_000 and math.isfinite(value)):
        return f"{value:,.0f}"
    if value and abs(value) < 1e-3:
        return f"{value:.3g}"
    digits = 1 if abs(value) >= 1000 else 2 if abs(value) >= 10 else 4
    text = f"{value:,.{digits}f}"
    return text.rstrip("0").rstrip(".") if "." in text else text


def _tick(value: float) -> str:
    if value and (abs(value) >= 1e6 or abs(value) < 1e-3):
        mantissa, exponent = f"{value:.1e}".split("e")
        return f"{float(mantissa):g}e{int(exponent)}"
    return f"{value:,.6g}" if abs(value) < 1000 else f"{value:,.0f}"


def _plain_text(value: Any) -> str:
    return value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)


def _duration(seconds: float | None) -> str | None:
    if seconds is None:
        return None
    if seconds < 60:
        return f"{seconds:.1f} s"
    minutes, rest = divmod(round(seconds), 60)
    return f"{minutes} min {rest} s" if minutes < 60 else f"{minutes // 60} h {minutes % 60} min"


def _local_time(text: str) -> str:
    return datetime.fromisoformat(text).strftime("%d %B %Y, %H:%M UTC").lstrip("0")


def _main() -> None:
    import argparse

    parser = argparse.ArgumentParser(prog="python -m dlx.report", description="Write report.html for a finished run.")
    parser.add_argument("run_dir", help="folder that holds record.json")
    options = parser.parse_args()
    try:
        print(render(options.run_dir))
    except (ValueError, OSError) as error:
        sys.exit(f"{parser.prog}: error: {error}")


if __name__ == "__main__":
    _main()
