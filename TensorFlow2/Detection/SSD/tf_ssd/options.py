"""Options that several verbs share, as dataclasses to inherit from."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from dlx import coco, files, paths, scene_sets
from dlx.config import field

from .data import CACHES, TRAINING_STEPS, Source, Steps
from .preprocessing import load_steps
from .tfrecord import Records, write

TASK = "TensorFlow2/Detection/SSD"
CONFIGS = Path(__file__).resolve().parent.parent / "configs"
AUGMENTATIONS: dict[str, Steps] = {"ssd320": TRAINING_STEPS, "none": ()}


@dataclass
class DataOptions:
    """Which pictures, and how they are read."""

    data: str = field("fashion-scenes", help="fashion-scenes, stamp-scenes or a folder in COCO's layout", group="data")
    records_dir: str | None = field(
        None, help="where the TFRecords are, or are written; null: below $DLX_HOME/tfrecords", group="data"
    )
    shards: int = field(1, help="files of a split, when they are written", ge=1, group="data")
    train_scenes: int | None = field(None, help="training scenes of a generated set", ge=1, group="data")
    val_scenes: int | None = field(None, help="validation scenes of a generated set", ge=1, group="data")
    tolerant: bool = field(False, help="leave out bad entries and pictures instead of stopping", group="data")
    cache: str = field("none", help="what is kept in memory: none, encoded, decoded", choices=CACHES, group="data")
    augmentation: str = field("ssd320", help="ssd320, none, or a YAML file of preprocessing steps", group="data")
    workers: int | None = field(None, help="threads that read; null: as many as are good", ge=1, group="data")
    batch_size: int = field(32, help="pictures of all replicas together", ge=1, group="data")
    seed: int = field(1, help="of weights, order and augmentation", ge=0, lt=2**31)

    def steps(self) -> Steps:
        """The preprocessing steps of training. ValueError names file, step and key."""
        if self.augmentation in AUGMENTATIONS:
            return AUGMENTATIONS[self.augmentation]
        if not Path(self.augmentation).is_file():
            raise ValueError(f"augmentation {self.augmentation!r} is none of ssd320, none, and no file")
        return load_steps(self.augmentation)

    def open(self, *names: str) -> dict[str, Records]:
        """The splits of these names ("train", "val") as TFRecords, written if they are not there yet."""
        if self.data in scene_sets.NAMES:
            root = scene_sets.prepare(self.data, train=self.train_scenes, val=self.val_scenes)
        else:
            root = Path(self.data).expanduser().absolute()
        splits = coco.find_splits(root)
        missing = [name for name in names if name not in splits]
        if missing:
            raise ValueError(f"{root}: no split {', '.join(missing)}; there are: {', '.join(splits) or 'none'}")
        found, classes = {}, None
        for name in names:
            annotations, pictures = splits[name]
            digest = files.sha256(annotations)
            folder = Path(self.records_dir or paths.home() / "tfrecords" / digest[:16]).absolute() / name
            with files.lock(folder.with_name(f"{name}.lock"), message=f"waiting for another process to write {folder}"):
                if folder.exists():
                    records = Records.open(folder)
                    if records.manifest["source"]["sha256"] != digest:
                        raise ValueError(f"{folder}: was written from another file than {annotations}")
                else:
                    split = coco.read(annotations, pictures, tolerant=self.tolerant, classes=classes)
                    keep_empty = name != "train"
                    records = write(split, folder, self.shards, keep_empty)
            classes = classes or records.classes
            if records.classes != classes:
                raise ValueError(f"{folder}: classes {records.classes}, not {classes}")
            found[name] = records
        return found

    def source(self, records: Records) -> Source:
        """A split with this cache."""
        return Source(records, self.cache)


def identity(splits: dict[str, Records]) -> dict[str, str]:
    """Hashes of the annotation files that records were written from, for the run record."""
    return {name: records.manifest["source"]["sha256"] for name, records in splits.items()}
