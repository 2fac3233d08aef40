"""Data of the user's own: lists with one `sound file|text` (or `sound file|text|speaker`) a line, checked as a whole.

    splits = read_lists({"train": "train.txt", "val": "val.txt"}, front_end=FrontEnd(), sample_rate=22050)

Every fault of every list is found before training starts and reported in one DataError: lines that are no such line,
files that are missing, damaged, too short, too long or of another sample rate, texts that are empty or hold what the
symbol table lacks, sound that is listed twice or in two splits.
"""

from __future__ import annotations

import os
import warnings
from collections import Counter
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path

from . import audio
from .corpora import Utterance
from .frontend import FrontEnd

SHOWN = 100  # faults that an error spells out


class ListError(ValueError):
    """Lists that cannot be trained on. `faults` holds each, "file:line: what is wrong"."""

    def __init__(self, faults: list[str]) -> None:
        self.faults = faults
        more = f"\n... and {len(faults) - SHOWN} more" if len(faults) > SHOWN else ""
        shown = "\n".join(faults[:SHOWN])
        super().__init__(f"{len(faults)} faults in the lists:\n{shown}{more}")


@dataclass
class Listed:
    """The good entries of the lists by split, and in tolerant mode the faults of those left out."""

    splits: dict[str, list[Utterance]]
    faults: list[str] = field(default_factory=list)


@dataclass(frozen=True)
class _Line:
    """One line that has the right form."""

    where: str
    split: str
    path: Path
    text: str
    speaker: str


def read_lists(
    lists: Mapping[str, str | os.PathLike[str]],
    *,
    front_end: FrontEnd | None = None,
    root: str | os.PathLike[str] | None = None,
    speakers: bool = False,
    sample_rate: int | None = None,
    min_seconds: float = 0.1,
    max_seconds: float = 30.0,
    tolerant: bool = False,
) -> Listed:
    """The utterances of each list; sound files are relative to `root`, by default to the list's folder.

    Byte order mark, CRLF line ends and empty lines are accepted. `speakers`: lines have a third column.
    `sample_rate`: files of another rate are faults (None: they will be resampled). `tolerant` leaves out what is at
    fault, but not all of a split.
    """
    lines: list[_Line] = []
    faults: list[str] = []
    for split, path in lists.items():
        found, bad = _parse(split, Path(path), Path(root) if root is not None else Path(path).parent, speakers)
        lines += found
        faults += bad
    with ThreadPoolExecutor(8) as pool:
        checks = list(pool.map(lambda line: _check_sound(line, sample_rate, min_seconds, max_seconds), lines))
    splits: dict[str, list[Utterance]] = {split: [] for split in lists}
    seen: dict[Path, str] = {}
    for line, (seconds, problem) in zip(lines, checks, strict=True):
        problems = [problem] if problem else []
        problems += _check_text(line, front_end)
        first = seen.setdefault(line.path, line.where)
        if first != line.where:
            problems.append(f"{line.path} is listed before, in {first}")
        faults += [f"{line.where}: {problem}" for problem in problems]
        if not problems:
            name = f"{line.split}-{len(splits[line.split]):05d}"
            splits[line.split].append(Utterance(name, line.path, line.text, line.speaker, seconds))
    empty = [f"{lists[split]}: no usable line" for split, entries in splits.items() if not entries]
    if empty or faults and not tolerant:
        raise ListError(sorted(faults + empty, key=_by_place))
    return Listed(splits, sorted(faults, key=_by_place))


def _by_place(fault: str) -> tuple[str, int]:
    name, _, rest = fault.partition(":")
    number = rest.partition(":")[0]
    return name, int(number) if number.isdigit() else 0


def _parse(split: str, path: Path, root: Path, speakers: bool) -> tuple[list[_Line], list[str]]:
    if not path.is_file():
        return [], [f"{path}: there is no such list"]
    columns = 3 if speakers else 2
    lines, faults = [], []
    for number, raw in enumerate(path.read_bytes().removeprefix(b"\xef\xbb\xbf").split(b"\n"), 1):
        where = f"{path}:{number}"
        try:
            cells = [cell.strip() for cell in raw.decode("utf-8").strip().split("|")]
        except UnicodeDecodeError as error:
            faults.append(f"{where}: not UTF-8 ({error.reason} at byte {error.start})")
            continue
        if cells == [""]:
            continue
        if len(cells) != columns:
            expected = "file|text|speaker" if speakers else "file|text"
            faults.append(f"{where}: {len(cells) - 1} times '|', expected {expected}")
        elif speakers and not cells[2]:
            faults.append(f"{where}: the speaker is empty")
        else:
            lines.append(_Line(where, split, root / cells[0], cells[1], cells[2] if speakers else ""))
    return lines, faults


def _check_sound(line: _Line, rate: int | None, shortest: float, longest: float) -> tuple[float, str]:
    try:
        seconds, found = audio.duration(line.path)
    except audio.AudioError as error:
        return 0.0, str(error)
    if rate is not None and found != rate:
        return seconds, f"{line.path}: its sample rate is {found} Hz, not {rate} Hz"
    if not shortest <= seconds <= longest:
        return seconds, f"{line.path}: lasts {seconds:.2f} s, not between {shortest:g} and {longest:g} s"
    return seconds, ""


def _check_text(line: _Line, front_end: FrontEnd | None) -> list[str]:
    if not line.text:
        return ["the text is empty"]
    if front_end is None:
        return []
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        cleaned = front_end.clean(line.text)
    unknown = front_end.symbols.unknown(cleaned)
    try:
        front_end.clean(line.text, strict=True)
    except ValueError as error:
        return [str(error)]
    if unknown:
        return [f"the symbol table lacks {unknown} of {cleaned!r}"]
    if not any(c.isalnum() for c in cleaned):
        return [f"there is nothing to say in {line.text!r}"]
    return []


def summary(faults: list[str], count: int = 5) -> str:
    """A line on what tolerant reading left out."""
    kinds = Counter(fault.rpartition(": ")[2].split("(")[0][:60] for fault in faults)
    return "; ".join(f"{number} x {kind}" for kind, number in kinds.most_common(count))


def read_texts(text: str | None, text_file: str | os.PathLike[str] | None) -> tuple[list[str], list[str]]:
    """Texts to say, and where each is from: `text`, or the lines of a file that are not empty.

    ValueError for a file that is missing, not UTF-8, or holds no text.
    """
    if text:
        return [text], ["--text"]
    path = Path(text_file)
    if not path.is_file():
        raise ValueError(f"{path}: there is no such text file")
    try:
        lines = path.read_text(encoding="utf-8-sig").splitlines()
    except UnicodeDecodeError as error:
        raise ValueError(f"{path}: not UTF-8 ({error.reason} at byte {error.start})") from None
    found = [(line.strip(), f"{path}:{number}") for number, line in enumerate(lines, 1) if line.strip()]
    if not found:
        raise ValueError(f"{path}: holds no text")
    return [line for line, _ in found], [name for _, name in found]
