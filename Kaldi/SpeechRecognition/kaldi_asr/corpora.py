"""Data folders made of what can be had: read digits, Asterisk's prompts, Flite's sentences, recordings of one's own.

    folder = prepare(SourceOptions(data="asterisk-en"))        # folder/{train,val,test}/{wav.scp,text,...}

Utterances of the same text are always in the same split, so that nothing of a test is in a language model.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict
from pathlib import Path

import numpy as np

from dlx import draws, files, paths
from dlx.speech import audio, corpora, flite

from . import augment, datadir
from .options import SAMPLE_RATE, SourceOptions
from .words import words_of

NAMES = ("digits", "asterisk-en", "flite-speech", "own")
SPLITS = ("train", "val", "test")
STAMP = "data.json"
FORMAT = 1
DIGITS = "zero one two three four five six seven eight nine oh".split()
SPLIT_STREAM, DIGIT_STREAM = 52, 53  # of the draws
NOISE_FLOOR = (25.0, 40.0)  # dB under the voice: synthetic speech is followed by digital silence, real speech never is
Progress = Callable[[int, int], None]


def folder_of(options: SourceOptions) -> Path:
    """Where the data of these options lies or would lie."""
    if options.data not in NAMES:
        raise ValueError(f"unknown data {options.data!r}; known are {', '.join(NAMES)}")
    if options.data_dir is not None:
        return Path(options.data_dir)
    return paths.home() / "kaldi" / f"{options.data}-{_key(options)[:10]}"


def _key(options: SourceOptions) -> str:
    chosen = {name: getattr(options, name) for name in ("data", "recordings", "utterances", "voices", "max_seconds")}
    chosen |= {name: getattr(options, name) for name in ("test_share", "val_share", "seed")} | {"format": FORMAT}
    if options.data == "own" and options.recordings is not None and Path(options.recordings).is_file():
        chosen["list"] = files.sha256(options.recordings)
    return hashlib.sha256(json.dumps(chosen, sort_keys=True).encode()).hexdigest()


def identity(folder: Path) -> str:
    """A SHA-256 for run records: over the texts and lists of all splits."""
    digest = hashlib.sha256()
    for path in sorted(folder.glob("*/text")) + sorted(folder.glob("*/wav.scp")):
        digest.update(f"{path.relative_to(folder)} {files.sha256(path)}\n".encode())
    return digest.hexdigest()


def prepare(options: SourceOptions, progress: Progress | None = None) -> Path:
    """The folder with train, val and test, made if it is not there."""
    folder = folder_of(options)
    key = _key(options)
    if _is_made(folder, key):
        return folder
    if folder.exists() and not (folder / STAMP).is_file():
        raise ValueError(f"{folder}: exists and is none of this program's data folders; choose another --data_dir")
    makers = {"digits": _digits, "asterisk-en": _asterisk, "flite-speech": _flite_speech, "own": _own}
    with files.lock(folder.with_name(folder.name + ".lock"), message=f"waiting for another process to make {folder}"):
        if _is_made(folder, key):
            return folder
        with files.atomic_path(folder) as temporary:
            temporary.mkdir()
            splits = makers[options.data](options, temporary, progress or (lambda done, total: None))
            for name in SPLITS:
                if splits.get(name):
                    datadir.write(temporary / name, splits[name])
            stamp = {"key": key, "options": asdict(options), "utterances": {k: len(v) for k, v in splits.items()}}
            files.atomic_write(temporary / STAMP, json.dumps(stamp, indent=1) + "\n")
    return folder


def _is_made(folder: Path, key: str) -> bool:
    try:
        return json.loads((folder / STAMP).read_text())["key"] == key
    except (OSError, ValueError, KeyError):
        return False


def split_by_text(texts: Sequence[str], options: SourceOptions) -> list[str]:
    """The split of each utterance; those of one text are together. Shares are of the different texts."""
    different = sorted(set(texts))
    order = draws.permutation(options.seed, 0, len(different), SPLIT_STREAM)
    tests = max(1, round(len(different) * options.test_share))
    tuning = max(1, round(len(different) * options.val_share))
    place = {different[index]: rank for rank, index in enumerate(np.asarray(order).tolist())}
    return ["test" if place[text] < tests else "val" if place[text] < tests + tuning else "train" for text in texts]


def _grouped(utterances: Sequence[datadir.Utterance], names: Sequence[str]) -> dict[str, list[datadir.Utterance]]:
    found: dict[str, list[datadir.Utterance]] = {name: [] for name in SPLITS}
    for utterance, name in zip(utterances, names, strict=True):
        found[name].append(utterance)
    empty = [name for name in ("train", "test") if not found[name]]
    if empty:
        raise ValueError(f"{len(utterances)} utterances are too few: none is left for {empty[0]}")
    return found


def _asterisk(options: SourceOptions, folder: Path, progress: Progress) -> dict[str, list[datadir.Utterance]]:
    source = corpora.prepare("asterisk-en", max_seconds=options.max_seconds, progress=progress)
    found = []
    for item in sorted((u for split in corpora.read(source).values() for u in split), key=lambda u: u.id):
        words = words_of(item.text)
        if words:
            name = f"allison-{re.sub(r'[^a-z0-9-]', '-', item.id.lower())}"
            found.append(datadir.Utterance(name, item.path, tuple(words), "allison"))
    return _grouped(found, split_by_text([item.text for item in found], options))


def _flite_speech(options: SourceOptions, folder: Path, progress: Progress) -> dict[str, list[datadir.Utterance]]:
    source = corpora.prepare(
        "flite-speech", utterances=options.utterances, voices=tuple(options.voices), progress=progress
    )
    items = sorted((u for split in corpora.read(source).values() for u in split), key=lambda u: u.id)
    found = [datadir.Utterance(u.id, u.path, tuple(words_of(u.text)), u.speaker) for u in items]
    return _grouped(found, split_by_text([item.text for item in found], options))


def _digits(options: SourceOptions, folder: Path, progress: Progress) -> dict[str, list[datadir.Utterance]]:
    """Strings of 1 to 7 digits, read by Flite's voices at three speeds, each of which counts as a speaker."""
    program = flite.open_flite()
    lengths = draws.draws(options.seed, 0, np.arange(options.utterances), 8, DIGIT_STREAM)
    texts = [[DIGITS[int(value * len(DIGITS))] for value in row[1 : 2 + int(row[0] * 7)]] for row in lengths.tolist()]
    splits = split_by_text([" ".join(words) for words in texts], options)

    def make(index: int) -> datadir.Utterance:
        voice = options.voices[index % len(options.voices)]
        speed = augment.SPEEDS[index // len(options.voices) % len(augment.SPEEDS)]
        spoken = program.speak(", ".join(texts[index]) + ".", voice, SAMPLE_RATE)
        rng = np.random.Generator(np.random.Philox(key=np.uint64(options.seed * 2**32 + index)))
        below = NOISE_FLOOR[0] + (NOISE_FLOOR[1] - NOISE_FLOOR[0]) * rng.random()
        wave = augment.apply(spoken.audio, augment.Change(speed, below, -6 * rng.random()), rng)
        speaker = f"{voice}-{round(100 * speed):03d}"
        path = folder / "wavs" / f"{speaker}-{index:05d}.wav"
        audio.write_wav(path, wave, SAMPLE_RATE)
        return datadir.Utterance(f"{speaker}-{index:05d}", path, tuple(texts[index]), speaker)

    found = []
    with ThreadPoolExecutor(os.cpu_count() or 1) as pool:
        for utterance in pool.map(make, range(len(texts))):
            found.append(utterance)
            progress(len(found), len(texts))
    return _grouped(found, splits)


def _own(options: SourceOptions, folder: Path, progress: Progress) -> dict[str, list[datadir.Utterance]]:
    """A list of PATH|TEXT or PATH|TEXT|SPEAKER lines; every fault is reported with its line."""
    if options.recordings is None:
        raise ValueError("data own needs --recordings, a list with PATH|TEXT|SPEAKER a line")
    source = Path(options.recordings)
    if not source.is_file():
        raise ValueError(f"{source}: there is no such list")
    faults, found = [], []
    for number, line in enumerate(source.read_text(encoding="utf-8-sig").splitlines(), 1):
        if not line.strip():
            continue
        cells = [cell.strip() for cell in line.split("|")]
        words = words_of(cells[1]) if len(cells) > 1 else []
        path = source.parent / cells[0]
        if len(cells) not in (2, 3) or not words:
            faults.append(f"{source}:{number}: {line!r} is not PATH|TEXT or PATH|TEXT|SPEAKER with words in TEXT")
            continue
        try:
            seconds, _ = audio.duration(path)
        except ValueError as error:
            faults.append(f"{source}:{number}: {error}")
            continue
        if seconds > options.max_seconds:
            faults.append(f"{source}:{number}: {path} lasts {seconds:.1f} s, more than {options.max_seconds:g}")
            continue
        speaker = re.sub(r"\s+", "-", cells[2]) if len(cells) == 3 and cells[2] else "speaker"
        found.append(datadir.Utterance(f"{speaker}-{number:05d}", path.absolute(), tuple(words), speaker))
        progress(len(found), len(found))
    if faults:
        raise ValueError(f"{len(faults)} faults:\n" + "\n".join(faults[:100]))
    return _grouped(found, split_by_text([item.text for item in found], options))


def augmented(utterances: Sequence[datadir.Utterance], copies: int, target: Path, seed: int) -> list[datadir.Utterance]:
    """`copies` changed copies of each utterance, as WAV files below `target`; the originals are not among them."""
    found = []
    for index, utterance in enumerate(utterances):
        wave = datadir.load(utterance, SAMPLE_RATE)
        for copy in range(copies):
            change, rng = augment.draw(seed, index, copy)
            speaker = f"{utterance.speaker}-s{round(100 * change.speed):03d}"
            name = f"{speaker}-{utterance.id}-c{copy}"
            path = target / f"{name}.wav"
            audio.write_wav(path, augment.apply(wave, change, rng), SAMPLE_RATE)
            found.append(datadir.Utterance(name, path, utterance.words, speaker))
    return found
