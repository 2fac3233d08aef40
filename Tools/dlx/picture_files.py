"""Pictures on the way in and out of a verb: which files are meant, reading them in batches, where results are written.

A folder may hold the frames of a video: files are taken in the order of their names, numbers within them as numbers, so
that frame_2 comes before frame_10.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from PIL import Image

from . import vision


def natural_key(path: Path) -> list[tuple[int, str]]:
    """Sorts names as a person would: runs of digits by their value."""
    pieces = re.split(r"(\d+)", str(path))
    return [(int(piece), "") if place % 2 else (-1, piece) for place, piece in enumerate(pieces)]


@dataclass
class PictureFiles:
    """The pictures that `source` (a file or a folder) stands for, and `output` for what is made of them.

    Tolerant, unreadable files are noted in `skipped` as (path, reason) instead of ending the run. ValueError when
    there is no picture, or when a result would overwrite one.
    """

    source: str | os.PathLike[str]
    output: str | os.PathLike[str]
    tolerant: bool = False
    skipped: list[tuple[str, str]] = field(default_factory=list)

    def __post_init__(self) -> None:
        given, output = Path(self.source), Path(self.output)
        if given.is_dir():
            self.paths = sorted(vision.find_images(given), key=natural_key)
            base = given
        elif given.is_file():
            self.paths, base = [given], given.parent
        else:
            raise ValueError(f"{given}: there is no such picture or folder")
        if not self.paths:
            raise ValueError(f"{given}: this folder holds no picture ({' '.join(vision.IMAGE_SUFFIXES)})")
        self.targets = self._name_targets(base, output)

    def _name_targets(self, base: Path, output: Path) -> dict[Path, Path]:
        stems = [path.relative_to(base).with_suffix(".png") for path in self.paths]
        shared = {stem for stem in stems if stems.count(stem) > 1} if len(set(stems)) < len(stems) else set()
        targets = {
            # a.jpg beside a.png: both keep their suffix in the name
            path: output / (stem.with_name(f"{path.name}.png") if stem in shared else stem)
            for path, stem in zip(self.paths, stems, strict=True)
        }
        originals = {path.resolve() for path in self.paths}
        for path, target in targets.items():
            if target.resolve() in originals:
                raise ValueError(f"{target} is a picture itself and would be replaced by the result of {path}")
        return targets

    def batches(self, size: int) -> Iterator[tuple[Sequence[Path], Sequence[Image.Image]]]:
        """Paths and decoded RGB pictures, at most `size` at a time."""
        batch: list[tuple[Path, Image.Image]] = []
        for path in self.paths:
            try:
                batch.append((path, vision.decode_image(path)))
            except (ValueError, OSError) as error:
                if not self.tolerant:
                    raise
                self.skipped.append((str(path), str(error)))
            if len(batch) == size:
                yield tuple(zip(*batch, strict=True))
                batch = []
        if batch:
            yield tuple(zip(*batch, strict=True))

    def require_some(self) -> None:
        """ValueError where everything was skipped: a run that did nothing has failed."""
        if len(self.skipped) == len(self.paths):
            raise ValueError(f"not one of {len(self.paths)} pictures could be read; {self.skipped[0][1]}")
