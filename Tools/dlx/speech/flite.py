"""Speech from Flite with the exact times of its phones: four voices of Carnegie Mellon University, 16 kHz.

The program of the package is used if this is a Linux on x86-64, without installing it; elsewhere one on PATH is.
"""

from __future__ import annotations

import functools
import os
import platform
import re
import shutil
import subprocess
import tempfile
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from dlx import data, paths

from . import audio
from .sources import FLITE

VOICES = (
    "rms",
    "slt",
    "awb",
    "kal16",
)  # an American man, an American woman, a Scottish man, an American man (diphones)
UNTIMED = ("kal16",)  # the sound that comes of diphones is up to a twentieth shorter than the times that are printed
SAMPLE_RATE = 16000
_PHONE = re.compile(r"([a-z]+):(\d+\.\d+)")


@dataclass(frozen=True)
class Spoken:
    """A waveform with its phones: (name, end in seconds) in their order, `pau` a pause; none of the voice kal16."""

    audio: np.ndarray
    sample_rate: int
    phones: tuple[tuple[str, float], ...]


@dataclass(frozen=True)
class Flite:
    """The program, and the folder of its libraries where they are not the system's."""

    program: Path
    libraries: Path | None = None

    def speak(self, text: str, voice: str = "rms", sample_rate: int = SAMPLE_RATE) -> Spoken:
        """Read `text` aloud. ValueError for an unknown voice, or when the program says nothing."""
        with tempfile.TemporaryDirectory() as folder:
            target = Path(folder) / "speech.wav"
            phones = self.speak_to(target, text, voice)
            sound, rate = audio.read(target, sample_rate)
        return Spoken(sound, rate, phones)

    def speak_to(self, path: Path, text: str, voice: str) -> tuple[tuple[str, float], ...]:
        """Write a WAV file of 16 kHz and 16 bits; returns the phones, see `Spoken`."""
        if voice not in VOICES:
            raise ValueError(f"flite has no voice {voice!r}, only {', '.join(VOICES)}")
        environment = dict(os.environ)
        if self.libraries is not None:
            environment["LD_LIBRARY_PATH"] = str(self.libraries)
        command = [str(self.program), "-voice", voice, "-t", text, "-o", str(path), "-psdur"]
        done = subprocess.run(
            command, env=environment, stdin=subprocess.DEVNULL, capture_output=True, text=True, errors="replace",
            check=False,
        )  # fmt: skip
        phones = tuple((name, float(end)) for name, end in _PHONE.findall(done.stdout))
        if done.returncode or not phones or not path.is_file():
            reason = (done.stderr or done.stdout).strip() or "it printed no phones"
            raise ValueError(f"flite did not read {text!r} aloud (status {done.returncode}): {reason}")
        return () if voice in UNTIMED else phones


@functools.lru_cache(4)
def open_flite(home: str | os.PathLike[str] | None = None) -> Flite:
    """The synthesiser, fetched if need be (13 MB)."""
    if platform.system() != "Linux" or platform.machine() not in ("x86_64", "AMD64"):
        installed = shutil.which("flite")
        if installed is None:
            raise ValueError(
                f"the packaged flite is for Linux on x86-64, not {platform.system()} on {platform.machine()}: "
                "install flite 2.2 so that it is on PATH"
            )
        return Flite(Path(installed))
    folder = data.prepare(FLITE, home=home)
    program = folder / "bin" / "flite"
    if not os.access(program, os.X_OK):
        program.chmod(program.stat().st_mode | 0o111)
    return Flite(program, folder / "lib")


def cache_of(home: str | os.PathLike[str] | None) -> Path:
    """Where corpora are kept."""
    return (Path(home).absolute() if home is not None else paths.home()) / "speech"
