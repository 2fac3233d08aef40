"""Kaldi's data folders: wav.scp, text, utt2spk, spk2utt and, where utterances are parts of recordings, segments.

    data = read("data/train")                  # ValueError: file, line, value
    for fault in check("data/train"): print(fault)
    fix("data/train")                          # sorts, completes, drops what cannot be used; says what it did

Each file has a line per key, `KEY VALUE...`, sorted as C strings, keys unique (Kaldi, "Data preparation").
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np

from dlx.files import atomic_write
from dlx.speech import audio

FILES = ("wav.scp", "text", "utt2spk")
TOLERANCE = 0.05  # seconds that a segment may end after its recording


@dataclass(frozen=True)
class Utterance:
    """What one speaker says, from `start` to `end` seconds of a sound file (None: its end)."""

    id: str
    path: Path
    words: tuple[str, ...] = ()
    speaker: str = ""
    recording: str = ""
    start: float = 0.0
    end: float | None = None

    @property
    def text(self) -> str:
        return " ".join(self.words)


@dataclass(frozen=True)
class Fault:
    """Something wrong in a data folder: file, line from 1 (0: the whole file), what."""

    file: Path
    line: int
    what: str

    def __str__(self) -> str:
        return f"{self.file}:{self.line}: {self.what}" if self.line else f"{self.file}: {self.what}"


@dataclass
class Table:
    """A file of keys and values with the line of each key."""

    path: Path
    rows: dict[str, str] = field(default_factory=dict)
    lines: dict[str, int] = field(default_factory=dict)
    faults: list[Fault] = field(default_factory=list)

    def fault(self, key: str, what: str) -> Fault:
        return Fault(self.path, self.lines.get(key, 0), what)


def read_table(path: Path, empty_values: bool = False) -> Table:
    """Read a file of `KEY VALUE...` lines; what is wrong with a line is among its faults, and the line is left out."""
    table = Table(path)
    try:
        content = path.read_bytes()
    except FileNotFoundError:
        table.faults.append(Fault(path, 0, "is missing"))
        return table
    before = ""
    for number, raw in enumerate(content.split(b"\n"), 1):
        try:
            line = raw.decode("utf-8").rstrip("\r")
        except UnicodeDecodeError as error:
            table.faults.append(Fault(path, number, f"is not UTF-8 ({error.reason} at byte {error.start})"))
            continue
        if not line.strip():
            if number <= content.count(b"\n"):
                table.faults.append(Fault(path, number, "is an empty line"))
            continue
        key, _, value = line.strip().partition(" ")
        key, _, rest = key.partition("\t")
        value = f"{rest} {value}".strip() if rest else value.strip()
        if key in table.rows:
            table.faults.append(Fault(path, number, f"{key!r} is already on line {table.lines[key]}"))
            continue
        if not value and not empty_values:
            table.faults.append(Fault(path, number, f"{key!r} has no value"))
            continue
        if key.encode() < before.encode():
            table.faults.append(Fault(path, number, f"{key!r} comes after {before!r}: not sorted"))
        before = key
        table.rows[key], table.lines[key] = value, number
    if not table.rows:
        table.faults.append(Fault(path, 0, "holds no line that can be used"))
    return table


def write_table(path: Path, rows: dict[str, str]) -> None:
    """Write `KEY VALUE` lines sorted as C strings."""
    keys = sorted(rows, key=str.encode)
    atomic_write(path, "".join(f"{key} {rows[key]}".rstrip() + "\n" for key in keys))


def read(folder: str | os.PathLike[str]) -> list[Utterance]:
    """The utterances of a data folder in their order. ValueError with the first fault, and how many more there are."""
    faults = check(folder, sounds=False)
    if faults:
        more = f" (and {len(faults) - 1} more: run prepare --action validate)" if len(faults) > 1 else ""
        raise ValueError(f"{faults[0]}{more}")
    return list(_utterances(Path(folder)))


def _utterances(folder: Path) -> Iterator[Utterance]:
    scp = read_table(folder / "wav.scp").rows
    text = read_table(folder / "text", empty_values=True).rows
    speakers = read_table(folder / "utt2spk").rows
    segments = read_table(folder / "segments").rows if (folder / "segments").is_file() else None
    for name in sorted(text, key=str.encode):
        recording, start, end = name, 0.0, None
        if segments is not None:
            recording, first, last = segments[name].split()
            start, end = float(first), float(last) if float(last) >= 0 else None
        path = folder / scp[recording]  # an absolute path stays
        yield Utterance(name, path, tuple(text[name].split()), speakers[name], recording, start, end)


def write(folder: str | os.PathLike[str], utterances: Iterable[Utterance]) -> None:
    """Write a data folder. Paths below the folder's parent become relative, so that both can be moved together."""
    folder = Path(folder)
    utterances = list(utterances)
    names = [utterance.id for utterance in utterances]
    if len(set(names)) != len(names):
        twice = next(name for name in names if names.count(name) > 1)
        raise ValueError(f"{folder}: two utterances are called {twice!r}")
    bad = next((u for u in utterances if not u.id or any(c.isspace() for c in u.id + u.speaker)), None)
    if bad is not None:
        raise ValueError(f"{folder}: utterance {bad.id!r} of speaker {bad.speaker!r}: names have no spaces")
    parts = any(u.recording not in ("", u.id) or u.start or u.end is not None for u in utterances)
    write_table(folder / "wav.scp", {u.recording or u.id: _relative(u.path, folder) for u in utterances})
    write_table(folder / "text", {u.id: u.text for u in utterances})
    write_table(folder / "utt2spk", {u.id: u.speaker or u.id for u in utterances})
    write_table(folder / "spk2utt", invert({u.id: u.speaker or u.id for u in utterances}))
    if parts:
        ends = {u.id: f"{u.end:.3f}" if u.end is not None else "-1" for u in utterances}
        write_table(
            folder / "segments", {u.id: f"{u.recording or u.id} {u.start:.3f} {ends[u.id]}" for u in utterances}
        )


def _relative(path: Path, folder: Path) -> str:
    path, root = Path(os.path.abspath(path)), Path(os.path.abspath(folder)).parent
    return os.path.relpath(path, os.path.abspath(folder)) if path.is_relative_to(root) else str(path)


def invert(utt2spk: dict[str, str]) -> dict[str, str]:
    """spk2utt: each speaker with the sorted names of its utterances."""
    found: dict[str, list[str]] = {}
    for name in sorted(utt2spk, key=str.encode):
        found.setdefault(utt2spk[name], []).append(name)
    return {speaker: " ".join(names) for speaker, names in found.items()}


def load(utterance: Utterance, sample_rate: int) -> np.ndarray:
    """The utterance's waveform, float32 (T,) in -1..1, resampled to `sample_rate`."""
    wave, rate = audio.read(utterance.path, sample_rate)
    last = len(wave) if utterance.end is None else min(len(wave), round(utterance.end * rate))
    first = round(utterance.start * rate)
    if first >= last:
        raise ValueError(f"{utterance.path}: utterance {utterance.id!r} begins at {utterance.start} s, after its end")
    return wave[first:last]


# Checking


def check(folder: str | os.PathLike[str], sounds: bool = True) -> list[Fault]:
    """Every fault of a data folder; with `sounds` each file's header is read, too."""
    folder = Path(folder)
    if not folder.is_dir():
        return [Fault(folder, 0, "there is no such data folder")]
    scp, text, speakers = (read_table(folder / name, empty_values=name == "text") for name in FILES)
    faults = [*scp.faults, *text.faults, *speakers.faults]
    if any(not (folder / name).is_file() for name in FILES):
        return faults
    segments = read_table(folder / "segments") if (folder / "segments").is_file() else None
    if segments is not None:
        faults += segments.faults
    seconds = {}
    for key, value in scp.rows.items():
        what, seconds[key] = _recording_fault(folder, value, sounds)
        faults += [scp.fault(key, what)] if what else []
    faults += _segment_faults(scp, segments, seconds) if segments is not None else []
    owner = segments if segments is not None else scp
    faults += _keys_missing(text, speakers) + _keys_missing(text, owner)
    faults += _keys_missing(speakers, text) + (_keys_missing(owner, text) if owner is not scp else [])
    for key, value in speakers.rows.items():
        if len(value.split()) != 1:
            faults.append(speakers.fault(key, f"{key!r} has the speaker {value!r}, expected one word"))
    return faults + _inverse_faults(folder, speakers)


def _recording_fault(folder: Path, value: str, sounds: bool) -> tuple[str, float | None]:
    if value.endswith("|"):
        return f"{value!r} is a command: only sound files are read, never programs run", None
    path = folder / value
    if not path.is_file():
        return f"there is no file {value!r}", None
    if not sounds:
        return "", None
    try:
        return "", audio.duration(path)[0]
    except ValueError as error:
        return str(error), None


def _segment_faults(scp: Table, segments: Table, seconds: dict[str, float | None]) -> list[Fault]:
    faults = []
    for key, value in segments.rows.items():
        cells = value.split()
        try:
            recording, start, end = cells[0], float(cells[1]), float(cells[2])
        except (IndexError, ValueError):
            faults.append(segments.fault(key, f"{value!r} is not RECORDING START END in seconds"))
            continue
        if recording not in scp.rows:
            faults.append(segments.fault(key, f"recording {recording!r} is not in {scp.path.name}"))
            continue
        total = seconds.get(recording)
        if start < 0 or (end != -1 and end <= start):
            faults.append(segments.fault(key, f"from {start} to {end} s is no stretch of time"))
        elif total is not None and max(start, end) > total + TOLERANCE:
            faults.append(segments.fault(key, f"ends at {max(start, end)} s, the recording at {total:.3f} s"))
    return faults


def _keys_missing(one: Table, other: Table) -> list[Fault]:
    return [one.fault(key, f"{key!r} is not in {other.path.name}") for key in one.rows if key not in other.rows]


def _inverse_faults(folder: Path, speakers: Table) -> list[Fault]:
    if not (folder / "spk2utt").is_file():
        return []
    inverse = read_table(folder / "spk2utt")
    expected, found = invert(speakers.rows), {key: " ".join(v.split()) for key, v in inverse.rows.items()}
    wrong = [key for key in found if found[key] != expected.get(key)] + [k for k in expected if k not in found]
    return [inverse.fault(key, f"speaker {key!r} has not the utterances that utt2spk gives") for key in wrong]


# Repairing


def fix(folder: str | os.PathLike[str]) -> list[str]:
    """Make a data folder valid: sort, drop utterances that lack sound, text or a right segment, write spk2utt anew.

    An utterance without a speaker becomes its own. The files as they were are kept in `.backup`. Returns a line for
    each change. ValueError where nothing would be left.
    """
    folder = Path(folder)
    scp, text, speakers = (read_table(folder / name, empty_values=name == "text") for name in FILES)
    done = [str(fault) for fault in (*scp.faults, *text.faults, *speakers.faults)]
    segments = read_table(folder / "segments") if (folder / "segments").is_file() else None
    seconds: dict[str, float | None] = {}
    bad_sound = set()
    for key, value in scp.rows.items():
        what, seconds[key] = _recording_fault(folder, value, True)
        if what:
            bad_sound.add(key)
            done.append(str(scp.fault(key, f"{what}: dropped")))
    owner = segments if segments is not None else scp
    bad = set()
    if segments is not None:
        # Faults carry lines, so that is how their keys are found.
        at_line = {number: key for key, number in segments.lines.items()}
        for fault in _segment_faults(scp, segments, seconds):
            bad.add(at_line[fault.line])
            done.append(f"{fault}: dropped")
    kept = []
    for key in text.rows:
        recording = segments.rows[key].split()[0] if segments is not None and key in segments.rows else key
        if key not in owner.rows or recording in bad_sound or key in bad:
            done.append(str(text.fault(key, f"{key!r} has no sound that can be used: dropped")))
        else:
            kept.append(key)
    if not kept:
        raise ValueError(f"{folder}: no utterance has both a text and a sound file that can be read")
    _backup(folder)
    names = {key: (speakers.rows[key].split() or [key])[0] if key in speakers.rows else key for key in kept}
    used = {segments.rows[key].split()[0] for key in kept} if segments is not None else set(kept)
    write_table(folder / "wav.scp", {key: value for key, value in scp.rows.items() if key in used})
    write_table(folder / "text", {key: " ".join(text.rows[key].split()) for key in kept})
    write_table(folder / "utt2spk", names)
    write_table(folder / "spk2utt", invert(names))
    if segments is not None:
        write_table(folder / "segments", {key: segments.rows[key] for key in kept})
    return done


def _backup(folder: Path) -> None:
    for name in (*FILES, "spk2utt", "segments"):
        if (folder / name).is_file():
            atomic_write(folder / ".backup" / name, (folder / name).read_bytes())
