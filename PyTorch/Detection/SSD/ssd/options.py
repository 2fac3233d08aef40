"""Options that several verbs share, as dataclasses to inherit from."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from dlx import files, scenes
from dlx.config import field
from dlx.loading import Loader

from .data import BACKENDS, build_loader
from .geometry import AUGMENTATIONS
from .splits import AnySplit, Split, open_data

TASK = "PyTorch/Detection/SSD"
CONFIGS = Path(__file__).resolve().parent.parent / "configs"


@dataclass
class DataOptions:
    """Which pictures, and how they are read."""

    data: str = field(
        "fashion-scenes", help="fashion-scenes, stamp-scenes, synthetic or a folder in COCO's layout", group="data"
    )
    data_dir: str | None = field(
        None,
        help="your own data: a folder with annotations/instances_train*.json, instances_val*.json and the pictures "
        "in train*, val* (instead of data)",
        group="data",
    )
    train_json: str | None = field(None, help="annotations of the training pictures, in another layout", group="data")
    train_images: str | None = field(None, help="folder of the training pictures", group="data")
    val_json: str | None = field(None, help="annotations of the validation pictures", group="data")
    val_images: str | None = field(None, help="folder of the validation pictures", group="data")
    train_scenes: int | None = field(None, help="training scenes of a generated set", ge=1, group="data")
    val_scenes: int | None = field(None, help="validation scenes of a generated set", ge=1, group="data")
    exif: Literal["auto", "upright", "stored"] = field(
        "auto",
        help="the frame that boxes of EXIF-turned pictures refer to; auto: by the sizes in the JSON",
        group="data",
    )
    keep_empty: bool = field(False, help="train on pictures without objects, too", group="data")
    data_backend: Literal["pytorch", "dali-cpu", "dali-gpu", "synthetic"] = field(
        "pytorch", help="who decodes: Pillow in worker processes, DALI, or nobody", group="data", choices=BACKENDS
    )
    image_size: int = field(300, help="side of the network's input in pixels", ge=8, group="data")
    augmentation: Literal["none", "flip", "crop", "ssd"] = field(
        "ssd", help="crop: random crop, flip and colours; ssd: zooms out before", group="data", choices=AUGMENTATIONS
    )
    workers: int = field(2, help="processes (Pillow) or threads (DALI) per device", ge=0, group="data")
    tolerant: bool = field(False, help="leave out and count bad entries and pictures instead of stopping", group="data")
    batch_size: int = field(32, help="images per device and micro-batch", ge=1, group="data")
    seed: int = field(1, help="of weights, order and augmentation", ge=0)
    device: str = field("auto", help="auto, cpu, cuda or cuda:N")

    def __post_init__(self) -> None:
        if self.data_dir:
            self.data = self.data_dir  # so that logs and records name what was read, not the default
        pairs = {"train": (self.train_json, self.train_images), "val": (self.val_json, self.val_images)}
        for split, pair in pairs.items():
            if bool(pair[0]) != bool(pair[1]):
                raise ValueError(f"{split}_json and {split}_images go together, got {pair[0]!r} and {pair[1]!r}")
        self._files = {split: pair for split, pair in pairs.items() if pair[0]}
        if self._files:
            self.data = ", ".join(pair[0] for pair in self._files.values())

    def open(self, **synthetic: Any) -> dict[str, AnySplit]:
        """Read and validate the data, all problems reported at once."""
        # DALI cannot pass over a bad file in the middle of a batch, so all must be known before.
        check = "full" if self.tolerant and self.data_backend.startswith("dali") else "headers"
        return open_data(
            self.data,
            files=self._files,
            tolerant=self.tolerant,
            check=check,
            exif=self.exif,
            keep_empty=self.keep_empty,
            train_scenes=self.train_scenes,
            val_scenes=self.val_scenes,
            **synthetic,
        )

    def identity(self, splits: dict[str, AnySplit]) -> dict[str, str]:
        """Hashes of what was read, for the run record: of a generated set, else of each split's annotation file."""
        found = {}
        for name, split in splits.items():
            if isinstance(split, Split):
                folder = split.annotations.path.parent.parent
                if (folder / scenes.STAMP).is_file():
                    return {self.data: scenes.identity(folder)}
                found[f"{self.data} {name}"] = files.sha256(split.annotations.path)
        return found

    def loader(self, split: str, splits: dict[str, AnySplit], train: bool, world: Any, **options: Any) -> Loader:
        """The loader of a split on this process."""
        return build_loader(
            split,
            data=splits,
            backend=self.data_backend,
            batch_size=self.batch_size,
            image_size=self.image_size,
            augmentation=self.augmentation,
            train=train,
            seed=self.seed,
            workers=self.workers,
            world_rank=world.rank,
            world_size=world.size,
            device=world.device,
            tolerant=self.tolerant,
            **options,
        )
