"""Mel spectrograms and resampled sound on disk, by the content of the sound file and what was made of it.

A file that changes, or another configuration, gives another entry; entries are plain .npy arrays, written whole or not
at all, and read without unpickling. A damaged entry is made again.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import sys
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np

from dlx import files, paths

from . import audio


class FeatureCache:
    """Arrays below `folder` ($DLX_HOME/speech/features by default), each `make(path)` for a sound file.

    `recipe` (JSON values) names what `make` makes: it must change when that does. `dtype`: how arrays are kept;
    float16 comes back as float32.
    """

    def __init__(
        self,
        recipe: dict[str, Any],
        make: Callable[[Path], np.ndarray],
        *,
        dtype: str = "float32",
        folder: str | os.PathLike[str] | None = None,
        home: str | os.PathLike[str] | None = None,
    ) -> None:
        if dtype not in ("float16", "float32", "int16"):
            raise ValueError(f"features cannot be kept as {dtype!r}, only as float16, float32 or int16")
        root = Path(home).absolute() if home is not None else paths.home()
        self.folder = Path(folder).absolute() if folder is not None else root / "speech" / "features"
        self.make, self.dtype = make, np.dtype(dtype)
        described = json.dumps({**recipe, "dtype": dtype}, sort_keys=True)
        self.recipe = hashlib.sha256(described.encode()).hexdigest()[:16]
        self._keys: dict[Path, tuple[int, int, str]] = {}

    def entry(self, path: str | os.PathLike[str]) -> Path:
        """Where the array of a sound file lies or would lie. AudioError when there is no such file."""
        path = Path(path)
        try:
            status = path.stat()
        except OSError:
            raise audio.AudioError(f"{path}: there is no such file") from None
        known = self._keys.get(path)
        if known is None or known[:2] != (status.st_size, status.st_mtime_ns):
            known = (status.st_size, status.st_mtime_ns, files.sha256(path))
            self._keys[path] = known
        return self.folder / self.recipe / known[2][:2] / f"{known[2][2:]}.npy"

    def get(self, path: str | os.PathLike[str]) -> np.ndarray:
        """The array, made if it is not there."""
        entry = self.entry(path)
        found = _load(entry, self.dtype)
        if found is None:
            found = np.ascontiguousarray(self.make(Path(path)).astype(self.dtype))
            with files.atomic_path(entry) as temporary, open(temporary, "wb") as stream:
                np.save(stream, found, allow_pickle=False)
        return found.astype(np.float32) if self.dtype == np.float16 else found

    def shape(self, path: str | os.PathLike[str]) -> tuple[int, ...]:
        """The array's shape, from its header when it is there."""
        found = _load(self.entry(path), self.dtype, "r")
        return found.shape if found is not None else self.get(path).shape

    def fill(
        self,
        sound_files: Iterable[str | os.PathLike[str]],
        *,
        threads: int | None = None,
        progress: Callable[[int, int], None] | None = None,
    ) -> list[tuple[int, ...]]:
        """Make what is missing; the shapes, in the order of `sound_files`. `threads`: by default one for each core."""
        listed = list(sound_files)
        shapes = []
        with _single_threaded() as initializer, ThreadPoolExecutor(threads or os.cpu_count(), "", initializer) as pool:
            for shape in pool.map(self.shape, listed):
                shapes.append(shape)
                if progress is not None:
                    progress(len(shapes), len(listed))
        return shapes


@contextlib.contextmanager
def _single_threaded() -> Iterator[Callable[[], None]]:
    """Gives what a thread calls first so that PyTorch, where it is in use, starts no threads of its own in each."""
    torch = sys.modules.get("torch")
    if torch is None:
        yield lambda: None
        return
    before = torch.get_num_threads()
    try:
        yield lambda: torch.set_num_threads(1)
    finally:
        torch.set_num_threads(before)


def _load(entry: Path, dtype: np.dtype, mmap_mode: str | None = None) -> np.ndarray | None:
    """None for an entry that is missing or damaged."""
    try:
        found = np.load(entry, mmap_mode=mmap_mode, allow_pickle=False)
    except (OSError, ValueError, EOFError):
        return None
    return found if found.dtype == dtype and found.size else None


def mel_cache(config: Any, *, dtype: str = "float16", **options: Any) -> FeatureCache:
    """Log-mel spectrograms (M, F) by a `mel.MelConfig`; sound of another rate is resampled."""
    import torch

    from .mel import MelSpectrogram

    spectrogram = MelSpectrogram(config)

    def make(path: Path) -> np.ndarray:
        sound, _ = audio.read(path, config.sample_rate)
        with torch.inference_mode():
            return spectrogram(torch.from_numpy(sound)[None])[0].numpy()

    return FeatureCache({"kind": "log-mel", **config.to_dict()}, make, dtype=dtype, **options)


def sound_cache(sample_rate: int, **options: Any) -> FeatureCache:
    """Sound (T,) as 16-bit integers at `sample_rate`; values above full scale are clipped."""

    def make(path: Path) -> np.ndarray:
        sound, _ = audio.read(path, sample_rate)
        return np.rint(np.clip(sound, -1, 1) * 32767)

    return FeatureCache({"kind": "sound", "sample_rate": sample_rate}, make, dtype="int16", **options)
