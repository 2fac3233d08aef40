"""Options that several verbs share, as dataclasses to inherit from."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from dlx import data as datasets
from dlx.config import field
from dlx.loading import Loader, Split

from .data import BACKENDS, build_loader, open_data

TASK = "PyTorch/Classification/ConvNets"
CONFIGS = Path(__file__).resolve().parent.parent / "configs"


@dataclass
class DataOptions:
    """Which pictures, and how they are read."""

    data: str = field("fashion-mnist", help="fashion-mnist, foolbox-images, synthetic or a folder", group="data")
    data_dir: str | None = field(
        None,
        help="your own pictures: a folder with train/CLASS/*.jpg and val/CLASS/*.jpg (instead of data)",
        group="data",
    )
    data_backend: Literal["pytorch", "dali-cpu", "dali-gpu", "synthetic"] = field(
        "pytorch", help="who decodes: Pillow in worker processes, DALI, or nobody", group="data", choices=BACKENDS
    )
    image_size: int | None = field(None, help="side in pixels; the architecture's own by default", ge=8, group="data")
    resize: int | None = field(None, help="short side before the evaluation crop", ge=8, group="data")
    interpolation: Literal["bilinear", "bicubic"] = field("bilinear", help="of every resize", group="data")
    workers: int = field(2, help="processes (Pillow) or threads (DALI) per device", ge=0, group="data")
    tolerant: bool = field(False, help="skip and count unreadable pictures instead of stopping", group="data")
    batch_size: int = field(64, help="images per device and micro-batch", ge=1, group="data")
    seed: int = field(1, help="of weights, order and augmentation", ge=0)
    device: str = field("auto", help="auto, cpu, cuda or cuda:N")

    def __post_init__(self) -> None:
        if self.data_dir:
            self.data = self.data_dir  # so that logs and records name what was read, not the default

    def open(self, **synthetic: Any) -> dict[str, Split]:
        """Read and validate the data, all problems reported at once."""
        return open_data(self.data_dir or self.data, tolerant=self.tolerant, **synthetic)

    def identity(self) -> dict[str, str]:
        """Hashes of registered data for the run record; a user's own folder has none."""
        named = self.data if self.data_dir is None else None
        try:
            return {named: datasets.identity(named)} if named in datasets.names() else {}
        except ValueError:  # not prepared: the pictures came from elsewhere
            return {}

    def loader(self, split: str, splits: dict[str, Split], train: bool, world: Any, **options: Any) -> Loader:
        """The loader of a split on this process."""
        backend = self.data_backend
        if not (self.data_dir or self.data not in ("fashion-mnist", "synthetic")) and backend.startswith("dali"):
            raise ValueError(f"data_backend {backend} reads picture files; {self.data} has none: use pytorch")
        return build_loader(
            split,
            data=splits,
            backend=backend,
            batch_size=self.batch_size,
            train=train,
            seed=self.seed,
            workers=self.workers,
            world_rank=world.rank,
            world_size=world.size,
            device=world.device,
            interpolation=self.interpolation,
            resize=self.resize,
            tolerant=self.tolerant,
            **options,
        )
