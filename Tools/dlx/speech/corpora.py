"""Speech corpora on disk, one layout for all: a folder with WAV files and `metadata.tsv`, made once and shared.

    folder = prepare("flite-speech", utterances=3000)          # hours of speech in minutes
    splits = read(folder)                                      # {"train": [Utterance, ...], "val": ..., "test": ...}

`flite-speech`: WordNet's example sentences read by Flite's voices, with the end of every phone (but of kal16).
`asterisk-en`: the prompts of the Asterisk telephone system, studio recordings of one woman, 25 minutes with those over
`max_seconds`. Both are 16-bit WAV of 16 kHz.
"""

from __future__ import annotations

import csv
import gzip
import hashlib
import io
import json
import os
import re
import shutil
from collections.abc import Callable, Sequence
from concurrent.futures import ProcessPoolExecutor, ThreadPoolExecutor
from dataclasses import dataclass
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import numpy as np

from dlx import data, draws, files

from . import audio, flite, g722, sentences
from .sources import ASTERISK, FLITE, WORDNET

NAMES = ("flite-speech", "asterisk-en")
METADATA = "metadata.tsv"
STAMP = "corpus.json"
COLUMNS = ("id", "split", "file", "speaker", "seconds", "text", "phones")
FORMAT = 1  # of the folder: raised when a builder makes something else of the same request
STREAM = 42  # of the draws that split recordings


@dataclass(frozen=True)
class Utterance:
    """Something said: where its sound is, what was said by whom; phones as (name, end in seconds) where known."""

    id: str
    path: Path
    text: str
    speaker: str = ""
    seconds: float = 0.0
    phones: tuple[tuple[str, float], ...] = ()


def prepare(
    name: str,
    *,
    home: str | os.PathLike[str] | None = None,
    folder: str | os.PathLike[str] | None = None,
    processes: int | None = None,
    progress: Callable[[int, int], None] | None = None,
    **options: Any,
) -> Path:
    """The folder of a corpus, made if it is not there: `folder`, or one below $DLX_HOME/speech that its options name.

    What an interrupted call has made is used by the next. `progress(done, total)`. Options of "flite-speech":
    `utterances`, `voices`, `seed`; of "asterisk-en": `max_seconds`, `seed`. ValueError for others.
    """
    builders = {"flite-speech": FliteSpeech, "asterisk-en": AsteriskEnglish}
    if name not in builders:
        raise ValueError(f"unknown speech corpus {name!r}; known are {', '.join(NAMES)}")
    try:
        builder = builders[name](**options)
    except TypeError as error:
        raise ValueError(f"corpus {name!r}: {str(error).partition('() ')[2]}") from None
    request = {"name": name, "format": FORMAT, **builder.request()}
    key = hashlib.sha256(json.dumps(request, sort_keys=True).encode()).hexdigest()
    target = Path(folder).absolute() if folder is not None else flite.cache_of(home) / f"{name}-{key[:10]}"
    if _is_made(target, key):
        return target
    with files.lock(target.with_name(target.name + ".lock"), message=f"waiting for another process to make {name}"):
        if _is_made(target, key):
            return target
        if target.exists() and not (target / STAMP).is_file():
            raise ValueError(f"{target}: exists and is no speech corpus; choose another folder or remove it")
        partial = target.with_name(f"{target.name}.{key[:10]}.partial")
        partial.mkdir(parents=True, exist_ok=True)
        rows = builder.build(partial, home, processes or os.cpu_count() or 1, progress or (lambda done, total: None))
        _finish(partial, target, rows, request, key, builder.terms)
    return target


def _is_made(folder: Path, key: str) -> bool:
    try:
        return json.loads((folder / STAMP).read_text())["key"] == key
    except (OSError, ValueError, KeyError):
        return False


def _finish(
    partial: Path, target: Path, rows: Sequence[dict[str, Any]], request: dict[str, Any], key: str, terms: str
) -> None:
    text = io.StringIO()
    writer = csv.DictWriter(text, COLUMNS, delimiter="\t", lineterminator="\n", quoting=csv.QUOTE_NONE, quotechar=None)
    writer.writeheader()
    writer.writerows(rows)
    files.atomic_write(partial / METADATA, text.getvalue())
    kept = {row["file"] for row in rows}
    for path in (partial / "wavs").rglob("*"):
        if path.is_file() and path.relative_to(partial).as_posix() not in kept:
            path.unlink()
    stamp = {
        "key": key,
        "request": request,
        "utterances": len(rows),
        "hours": round(sum(float(row["seconds"]) for row in rows) / 3600, 4),
        "terms": terms,
    }
    files.atomic_write(partial / STAMP, json.dumps(stamp, indent=1) + "\n")
    with files.atomic_path(target) as temporary:
        partial.rename(temporary)
    shutil.rmtree(target / "labels", ignore_errors=True)  # they were for a call that goes on


def read(folder: str | os.PathLike[str]) -> dict[str, list[Utterance]]:
    """The splits of a corpus' folder. ValueError names file and line of what is wrong."""
    folder = Path(folder)
    path = folder / METADATA
    if not path.is_file():
        raise ValueError(f"{folder}: holds no {METADATA}, so it is no speech corpus")
    splits: dict[str, list[Utterance]] = {}
    with open(path, encoding="utf-8", newline="") as stream:
        header = stream.readline().rstrip("\n").split("\t")
        if header != list(COLUMNS):
            raise ValueError(f"{path}:1: its columns are {header}, not {list(COLUMNS)}")
        for number, line in enumerate(stream, 2):
            cells = line.rstrip("\n").split("\t")
            if len(cells) != len(COLUMNS):
                raise ValueError(f"{path}:{number}: {len(cells)} columns, expected {len(COLUMNS)}")
            row = dict(zip(COLUMNS, cells, strict=True))
            phones = tuple((name, float(end)) for name, _, end in (p.partition(":") for p in row["phones"].split()))
            found = Utterance(
                row["id"], folder / row["file"], row["text"], row["speaker"], float(row["seconds"]), phones
            )
            splits.setdefault(row["split"], []).append(found)
    return splits


def identity(folder: str | os.PathLike[str]) -> str:
    """A SHA-256 for run records: of what was asked for and of the list of what was made."""
    folder = Path(folder)
    key = json.loads((folder / STAMP).read_text())["key"]
    return hashlib.sha256(f"{key} {files.sha256(folder / METADATA)}".encode()).hexdigest()


def folder_of(path: Path) -> Path | None:
    """The corpus that a sound file is part of."""
    return next((folder for folder in path.parents if (folder / STAMP).is_file()), None)


# flite-speech


@dataclass(frozen=True)
class FliteSpeech:
    """`utterances` texts, read in turn by `voices`."""

    utterances: int = 3000
    voices: tuple[str, ...] = ("rms",)
    seed: int = 1
    terms: str = "Sentences of WordNet 3.0, copyright Princeton University; voices of Flite, copyright CMU."

    def __post_init__(self) -> None:
        unknown = [voice for voice in self.voices if voice not in flite.VOICES]
        if unknown or not self.voices:
            raise ValueError(f"voices {list(self.voices)} are not all among {', '.join(flite.VOICES)}")
        object.__setattr__(self, "voices", tuple(self.voices))

    def request(self) -> dict[str, Any]:
        sources = [f"{source.name} {source.version}" for source in (FLITE, WORDNET)]
        return {"utterances": self.utterances, "voices": list(self.voices), "seed": self.seed, "sources": sources}

    def build(
        self, folder: Path, home: Any, processes: int, progress: Callable[[int, int], None]
    ) -> list[dict[str, Any]]:
        texts = sentences.choose(sentences.read_wordnet(home), self.utterances, self.seed)
        program = flite.open_flite(home)
        rows: list[dict[str, Any]] = []
        for voice in self.voices:
            (folder / "wavs" / voice).mkdir(parents=True, exist_ok=True)
        # Threads do: the work is done by the programs that they start.
        with ThreadPoolExecutor(processes) as pool:
            jobs = [
                pool.submit(_speak, program, folder, number, text, self.voices[number % len(self.voices)])
                for number, text in enumerate(texts)
            ]
            try:
                for job in jobs:
                    rows.append(job.result())
                    progress(len(rows), len(texts))
            except BaseException:
                pool.shutdown(cancel_futures=True)
                raise
        return rows


def _speak(program: flite.Flite, folder: Path, number: int, text: sentences.Text, voice: str) -> dict[str, Any]:
    name = f"{voice}-{number:05d}"
    target = folder / "wavs" / voice / f"{name}.wav"
    labels = folder / "labels" / f"{name}.json"
    row = _made_before(labels, target, text.text)
    if row is not None:
        return row
    labels.parent.mkdir(exist_ok=True)
    temporary = target.with_name(f"{name}.tmp.wav")
    phones = program.speak_to(temporary, text.text, voice)
    seconds, _ = audio.duration(temporary)
    os.replace(temporary, target)
    row = {
        "id": name,
        "split": text.split,
        "file": target.relative_to(folder).as_posix(),
        "speaker": voice,
        "seconds": f"{seconds:.4f}",
        "text": text.text,
        "phones": " ".join(f"{phone}:{end:.3f}" for phone, end in phones),
    }
    temporary = labels.with_suffix(".tmp")
    temporary.write_text(json.dumps({"row": row, "bytes": target.stat().st_size}))
    os.replace(temporary, labels)
    return row


def _made_before(labels: Path, target: Path, text: str) -> dict[str, Any] | None:
    """The row of an utterance that an interrupted call has finished; a file cut short by a crash has another size."""
    try:
        found = json.loads(labels.read_text())
        return found["row"] if found["row"]["text"] == text and target.stat().st_size == found["bytes"] else None
    except (OSError, ValueError, KeyError):
        return None


# asterisk-en


@dataclass(frozen=True)
class AsteriskEnglish:
    """Recordings of at most `max_seconds`, a twentieth each for validation and test.

    Of the packages' two kinds, G.722 is taken (16 kHz; `g722` decodes it): the WAV files are of 8 kHz, without what is
    under 250 Hz, and tell s from f no better than a telephone.
    """

    max_seconds: float = 20.0
    seed: int = 1
    terms: str = f"{ASTERISK.licence}. {ASTERISK.citation}. {ASTERISK.terms}"

    def request(self) -> dict[str, Any]:
        return {"max_seconds": self.max_seconds, "seed": self.seed, "sources": f"{ASTERISK.name} {ASTERISK.version}"}

    def build(
        self, folder: Path, home: Any, processes: int, progress: Callable[[int, int], None]
    ) -> list[dict[str, Any]]:
        source = data.prepare(ASTERISK, home=home)
        texts = read_prompts(source / "texts.txt.gz")
        found = {name: source / "sounds" / f"{name}.g722" for name in texts}
        names = [name for name, path in found.items() if path.is_file()]
        names = [name for name in names if found[name].stat().st_size <= self.max_seconds * 8000]
        splits = _split(names, self.seed)
        missing = [name for name in names if not _wav(folder, name).is_file()]
        missing.sort(key=lambda name: found[name].stat().st_size)
        groups = [missing[start : start + 48] for start in range(0, len(missing), 48)]
        done = len(names) - len(missing)
        with ProcessPoolExecutor(processes, mp_context=get_context("spawn")) as pool:
            jobs = [
                pool.submit(_decode, [found[name] for name in group], [_wav(folder, name) for name in group])
                for group in reversed(groups)  # the longest first, so that no process is left with them
            ]
            for job in jobs:
                done += job.result()
                progress(done, len(names))
        rows = []
        for name in names:
            seconds, _ = audio.duration(_wav(folder, name))
            values = (name, splits[name], f"wavs/{name}.wav", "allison", f"{seconds:.4f}", texts[name], "")
            rows.append(dict(zip(COLUMNS, values, strict=True)))
        return rows


def _wav(folder: Path, name: str) -> Path:
    return folder / "wavs" / f"{name}.wav"


def _decode(sources: list[Path], targets: list[Path]) -> int:
    for sound, target in zip(g722.decode([path.read_bytes() for path in sources]), targets, strict=True):
        audio.write_wav(target, sound, 16000)
    return len(targets)


def read_prompts(path: Path) -> dict[str, str]:
    """Name and text of each prompt that is speech alone: the list describes tones and silence in brackets.

    The keys * and # of a telephone are called star and pound.
    """
    found = {}
    for line in gzip.decompress(path.read_bytes()).decode("utf-8", "replace").splitlines():
        name, colon, text = line.partition(":")
        text = " ".join(text.replace("*", " star ").replace("#", " pound ").split())
        if not colon or line.startswith(";") or not text or re.search(r"[\[\]()<>{}|]", text):
            continue
        found.setdefault(name.strip(), text)
    return found


def _split(names: list[str], seed: int) -> dict[str, str]:
    held_out = max(1, len(names) // 20)
    order = draws.permutation(seed, 0, len(names), STREAM)
    places = {names[index]: place for place, index in enumerate(np.asarray(order).tolist())}
    return {
        name: "val" if place < held_out else "test" if place < 2 * held_out else "train"
        for name, place in places.items()
    }
