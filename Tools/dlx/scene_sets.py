"""Two sets of scenes from pictures that package registries carry, for detection without an account.

`fashion-scenes`: items of Fashion-MNIST, cut out where they are not black and tinted, on textures made up from noise;
training items come from its training set, validation items from its test set. Light: for quick starts.
`stamp-scenes`: Tux Paint's stamps on Plasma's wallpapers. A fifth of each class's stamps, and of the wallpapers, is
seen in validation only; stamps that show one thing twice (same folder, same first word of the name) stay together.
Both are copyleft (see the sets' terms), so they are fetched when asked for and never part of the repository.
"""

from __future__ import annotations

import fnmatch
import functools
import hashlib
import json
import os
import re
from collections import defaultdict
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
from PIL import Image

from . import data, files, paths, scenes
from .scenes import Item, SceneOptions

NAMES = ("fashion-scenes", "stamp-scenes")
DEFAULTS = {
    "fashion-scenes": SceneOptions(min_objects=1, max_objects=6, min_scale=0.15, max_scale=0.55, rotation=20),
    "stamp-scenes": SceneOptions(train=20000, val=2000, min_side=300, max_side=500),
}


def options_of(name: str, *, train: int | None = None, val: int | None = None, seed: int | None = None) -> SceneOptions:
    """The set's own options with other numbers of scenes or another seed."""
    if name not in DEFAULTS:
        raise ValueError(f"unknown set of scenes {name!r}; known are {', '.join(NAMES)}")
    given = {key: value for key, value in (("train", train), ("val", val), ("seed", seed)) if value is not None}
    return SceneOptions(**{**vars(DEFAULTS[name]), **given})


def prepare(
    name: str,
    *,
    home: str | os.PathLike[str] | None = None,
    train: int | None = None,
    val: int | None = None,
    seed: int | None = None,
    folder: str | os.PathLike[str] | None = None,
    processes: int | None = None,
) -> Path:
    """The folder of a set in COCO's layout, made if it is not there: `folder`, or one below $DLX_HOME/scenes."""
    options = options_of(name, train=train, val=val, seed=seed)
    source = FashionSource.open(home) if name == "fashion-scenes" else StampSource.open(home)
    if folder is None:
        digest = hashlib.sha256(json.dumps(scenes.request(source, options), sort_keys=True).encode()).hexdigest()
        root = Path(home).absolute() if home is not None else paths.home()
        folder = root / "scenes" / f"{name}-{digest[:10]}"
    return scenes.generate(folder, source, options, processes)


# Fashion-MNIST

FASHION_CLASSES = [
    "T-shirt/top", "Trouser", "Pullover", "Dress", "Coat", "Sandal", "Shirt", "Sneaker", "Bag", "Ankle boot",
]  # fmt: skip
THRESHOLD = 16  # brighter pixels, and what they enclose, are the item
OPAQUE = 96  # pixels of the rim are less opaque the darker they are: their grey is that of item and black together


@functools.lru_cache(2)
def _fashion(folder: Path, split: str) -> tuple[np.ndarray, np.ndarray]:
    prefix = {"train": "train", "val": "t10k"}[split]
    images = data.read_idx(folder / f"{prefix}-images-idx3-ubyte.gz")
    return images, data.read_idx(folder / f"{prefix}-labels-idx1-ubyte.gz")


@dataclass
class FashionSource:
    folder: Path
    identity: str
    name: str = "fashion-scenes"
    classes: list[str] = field(default_factory=lambda: list(FASHION_CLASSES))

    @classmethod
    def open(cls, home: str | os.PathLike[str] | None = None) -> FashionSource:
        folder = data.prepare("fashion-mnist", home=home)
        return cls(folder, data.identity("fashion-mnist", home))

    def background(self, split: str, width: int, height: int, generator: np.random.Generator) -> np.ndarray:
        return texture(width, height, generator)

    def item(self, split: str, generator: np.random.Generator) -> Item:
        images, labels = _fashion(self.folder, split)
        number = int(generator.integers(len(images)))
        grey = images[number]
        alpha = soft_mask(grey)
        pixels = np.concatenate([_tint(grey, generator), alpha[..., None]], 2)
        rows, columns = (np.flatnonzero((alpha > 0).any(axis)) for axis in (1, 0))
        pixels = pixels[rows[0] : rows[-1] + 1, columns[0] : columns[-1] + 1]
        return Item(int(labels[number]), f"{split}/{number}", pixels)


def fill_holes(mask: np.ndarray) -> np.ndarray:
    """A mask with everything that it encloses."""
    outside = np.zeros(np.add(mask.shape, 2), bool)
    free = np.pad(~mask, 1, constant_values=True)
    outside[0], outside[-1], outside[:, 0], outside[:, -1] = True, True, True, True
    while True:
        grown = outside.copy()
        grown[1:] |= outside[:-1]
        grown[:-1] |= outside[1:]
        grown[:, 1:] |= outside[:, :-1]
        grown[:, :-1] |= outside[:, 1:]
        grown &= free
        if (grown == outside).all():
            return ~outside[1:-1, 1:-1]
        outside = grown


def soft_mask(grey: np.ndarray) -> np.ndarray:
    """uint8 alpha of an item on black: opaque inside, softer along its rim."""
    solid = fill_holes(grey > THRESHOLD)
    framed = np.pad(solid, 1)
    inside = framed[:-2, 1:-1] & framed[2:, 1:-1] & framed[1:-1, :-2] & framed[1:-1, 2:]
    rim = np.minimum(grey.astype(np.float32) * (255 / OPAQUE), 255)
    return np.rint(np.where(inside, 255, rim) * solid).astype(np.uint8)


def _colour(generator: np.random.Generator, low: float, high: float) -> np.ndarray:
    """A colour, 0 to 255, of any hue, whose brightest channel is between `low` and `high`."""
    colour = generator.uniform(0, 1, 3)
    saturation = generator.uniform(0, 1)
    colour = 1 - saturation * (1 - colour / colour.max())
    return 255 * generator.uniform(low, high) * colour


def _tint(grey: np.ndarray, generator: np.random.Generator) -> np.ndarray:
    """uint8 (H, W, 3): dark parts in one colour, bright ones in another."""
    dark, bright = _colour(generator, 0.05, 0.35), _colour(generator, 0.65, 1.0)
    share = grey[..., None] / 255
    return np.rint(dark * (1 - share) + bright * share).astype(np.uint8)


def texture(width: int, height: int, generator: np.random.Generator) -> np.ndarray:
    """uint8 (height, width, 3): noise at some scales, perhaps with stripes, in three colours, with grain."""
    total = np.zeros((height, width), np.float32)
    roughness = generator.uniform(0.35, 0.8)
    for octave in range(5):
        cells = 3 * 2**octave
        noise = generator.normal(0, 1, (cells, cells)).astype(np.float32)
        layer = Image.fromarray(noise).resize((width, height), Image.Resampling.BICUBIC)
        total += np.asarray(layer) * np.float32(roughness**octave)
    if generator.random() < 0.4:
        across, down = generator.uniform(-0.25, 0.25, 2)
        waves = np.add.outer(np.arange(height) * down, np.arange(width) * across + generator.uniform(0, 6.3))
        total += np.float32(generator.uniform(0.5, 1.5)) * np.sin(waves).astype(np.float32)
    total = (total - total.min()) / max(float(np.ptp(total)), 1e-6)
    colours = [_colour(generator, 0.2, 1.0) for _ in range(3)]
    stops = [0.0, generator.uniform(0.3, 0.7), 1.0]
    table = np.stack([np.interp(np.linspace(0, 1, 256), stops, c) for c in np.transpose(colours)], 1)
    pixels = table[np.rint(total * 255).astype(np.uint8)]
    pixels += generator.normal(0, generator.uniform(0, 8), (height, width, 1))
    return np.clip(np.rint(pixels), 0, 255).astype(np.uint8)


# Tux Paint stamps on wallpapers

# Class: folders (with what is below) and pictures of them that show something else. Of the stamps' ~60 folders, those
# that hold at least a dozen cut-out objects of one kind; drawn letters, digits, holidays, single things are left out.
STAMP_CLASSES: dict[str, tuple[tuple[str, ...], tuple[str, ...]]] = {
    "mammal": (("animals/mammals", "animals/marsupials"), ("*/aquatic/*",)),
    "bird": (("animals/birds",), ()),
    "sea animal": (("animals/fish", "animals/shellfish", "animals/mammals/aquatic"), ()),
    "insect": (("animals/insects",), ("*slug*", "*snail*", "*[Ww]oodlouse*", "*spider*", "*wings*")),
    "fruit or vegetable": (("food/fruit", "food/vegetables"), ()),
    "flower": (("plants/flowers",), ()),
    "clothing": (("clothes",), ("*button*", "*clothespin*")),
    "tool": (("household/tools", "household/arttools"), ()),
    "building": (("town/houses",), ()),
    "road sign": (("town/roadsigns",), ("*traffic_cone*",)),
    "coin": (("symbols/money",), ("*/00_symbols/*",)),
    "vehicle": (("vehicles",), ("*7spoke*", "*wheel_tractor*", "*trainSign*")),
    "planet": (("space/planets", "space/moon"), ("*sun*",)),
}
VAL_SHARE = 0.2
SPLIT_SEED = 2022
STAMP_SIDE = 384  # pixels to which larger stamps are reduced
SMALLEST_STAMP = 60
# Wallpapers that show objects of the classes: a dragon, a rocket and a castle, boats.
LEFT_OUT = ("FlyingKonqui", "SafeLanding", "EveningGlow")
WALLPAPER_SIDE = 1600


@dataclass
class StampSource:
    """`stamps`: by split and class, files of (H, W, 4) arrays; `wallpapers`: by split, files of (H, W, 3) arrays."""

    folder: Path
    identity: str
    stamps: dict[str, list[list[str]]]
    wallpapers: dict[str, list[str]]
    name: str = "stamp-scenes"
    classes: list[str] = field(default_factory=lambda: list(STAMP_CLASSES))

    @classmethod
    def open(cls, home: str | os.PathLike[str] | None = None) -> StampSource:
        """Fetches both packages if need be, and keeps their pictures decoded and reduced beside them."""
        stamps = data.prepare("tuxpaint-stamps", home=home) / "stamps"
        wallpapers = data.prepare("plasma-workspace-wallpapers", home=home) / "wallpapers"
        identities = [data.identity(name, home) for name in ("tuxpaint-stamps", "plasma-workspace-wallpapers")]
        root = Path(home).absolute() if home is not None else paths.home()
        return cls.reduce(stamps, wallpapers, root / "scenes" / "stamp-parts", "+".join(identities))

    @classmethod
    def reduce(cls, stamps: Path, wallpapers: Path, folder: Path, identity: str) -> StampSource:
        """From folders like those of the packages; arrays go to `folder`, unless they are there for this identity."""
        listing = folder / "parts.json"
        recipe = [identity, STAMP_SIDE, SMALLEST_STAMP, WALLPAPER_SIDE, list(LEFT_OUT), VAL_SHARE, SPLIT_SEED]
        recipe += [[name, *map(list, rule)] for name, rule in STAMP_CLASSES.items()]
        key = hashlib.sha256(json.dumps(recipe).encode()).hexdigest()
        with files.lock(folder.with_name(folder.name + ".lock"), message="waiting for another process to read stamps"):
            try:
                found = json.loads(listing.read_text())
            except (OSError, ValueError):
                found = {}
            if found.get("key") != key:
                found = {"key": key} | _reduce(stamps, wallpapers, folder)
                files.atomic_write(listing, json.dumps(found, indent=1))
        return cls(folder, key, found["stamps"], found["wallpapers"])

    def background(self, split: str, width: int, height: int, generator: np.random.Generator) -> np.ndarray:
        """A part of a wallpaper, perhaps mirrored, in slightly other colours."""
        names = self.wallpapers[split]
        wall = _array(self.folder / names[int(generator.integers(len(names)))])
        scale = generator.uniform(0.35, 1.0) * min(wall.shape[1] / width, wall.shape[0] / height)
        across, down = max(1, int(width * scale)), max(1, int(height * scale))
        left = int(generator.integers(wall.shape[1] - across + 1))
        top = int(generator.integers(wall.shape[0] - down + 1))
        part = Image.fromarray(wall[top : top + down, left : left + across])
        pixels = np.asarray(part.resize((width, height), Image.Resampling.BILINEAR, reducing_gap=2.0))
        if generator.random() < 0.5:
            pixels = pixels[:, ::-1]
        gains = generator.uniform(0.85, 1.15) * generator.uniform(0.9, 1.1, 3)
        return np.clip(np.rint(pixels * gains), 0, 255).astype(np.uint8)

    def item(self, split: str, generator: np.random.Generator) -> Item:
        """Classes are equally likely, and so are the stamps of one."""
        label = int(generator.integers(len(self.classes)))
        names = self.stamps[split][label]
        name = names[int(generator.integers(len(names)))]
        return Item(label, name.removesuffix(".npy"), _array(self.folder / name))


@functools.lru_cache(2048)
def _array(path: Path) -> np.ndarray:
    """Mapped, so that all processes share one copy."""
    return np.load(path, mmap_mode="r", allow_pickle=False)


def _reduce(stamps: Path, wallpapers: Path, folder: Path) -> dict[str, dict]:
    """Write the arrays and say which belong to which split."""
    found: dict[str, dict] = {"stamps": {"train": [], "val": []}, "wallpapers": {}}
    with files.atomic_path(folder) as temporary, ThreadPoolExecutor(os.cpu_count() or 1) as pool:
        temporary.mkdir()
        for label, name in enumerate(STAMP_CLASSES):
            chosen = stamp_files(stamps, name)
            targets = [f"stamps/{re.sub(r'[^A-Za-z0-9_-]+', '_', c.removesuffix('.png'))}.npy" for c in chosen]
            kept = list(pool.map(_reduce_stamp, [stamps / c for c in chosen], [temporary / t for t in targets]))
            groups = {t: stamp_group(c) for c, t, k in zip(chosen, targets, kept, strict=True) if k}
            for split, members in split_groups(groups, [SPLIT_SEED, label]).items():
                if not members:
                    raise ValueError(f"{stamps}: no stamps for class {name!r} in split {split}")
                found["stamps"][split].append(members)
        walls = wallpaper_files(wallpapers)
        targets = {name: f"wallpapers/{name}.npy" for name in walls}
        for _ in pool.map(_reduce_wallpaper, walls.values(), [temporary / targets[name] for name in walls]):
            pass
        found["wallpapers"] = split_groups({targets[name]: name for name in walls}, [SPLIT_SEED, len(STAMP_CLASSES)])
    return found


def stamp_files(folder: Path, name: str) -> list[str]:
    """The PNGs of a class below the stamps' folder, sorted."""
    places, left_out = STAMP_CLASSES[name]
    found = [p.relative_to(folder).as_posix() for place in places for p in (folder / place).rglob("*.png")]
    return sorted(path for path in found if not any(fnmatch.fnmatchcase(path, pattern) for pattern in left_out))


def stamp_group(path: str) -> str:
    """What stamps of one thing have in common: folder and first word of the name (cow, cow_white)."""
    where, _, name = path.removesuffix(".png").rpartition("/")
    name = re.sub(r"^(t_|\d+_|flower(?=\d))", "", name.lower())
    word = re.match(r"[a-z]*\d*", re.sub(r"^([a-z]+?)[-_]?\d$", r"\1", name)).group()
    return f"{where}/{word or name}"


def split_groups(groups: dict[str, str], seed: list[int]) -> dict[str, list[str]]:
    """Members by split, so that a group is on one side only and about `VAL_SHARE` of the members in validation."""
    members: dict[str, list[str]] = defaultdict(list)
    for member, group in groups.items():
        members[group].append(member)
    order = np.random.Generator(np.random.Philox(key=np.array(seed, np.uint64))).permutation(len(members))
    names = sorted(members)
    wanted = max(1, round(VAL_SHARE * len(groups)))
    split: dict[str, list[str]] = {"train": [], "val": []}
    for index in order.tolist():
        group = members[names[index]]
        fits = len(split["val"]) + len(group) <= wanted
        split["val" if fits else "train"] += group
    return {name: sorted(found) for name, found in split.items()}


def _reduce_stamp(path: Path, target: Path) -> bool:
    """False, and nothing written, for a picture without a mask or too small."""
    with Image.open(path) as image:
        if image.mode not in ("RGBA", "LA", "PA") and "transparency" not in image.info:
            return False
        image = image.convert("RGBA")
    image = image.crop(image.getchannel("A").point(lambda value: 255 * (value >= 16)).getbbox() or (0, 0, 1, 1))
    if max(image.size) < SMALLEST_STAMP:
        return False
    image.thumbnail((STAMP_SIDE, STAMP_SIDE), Image.Resampling.LANCZOS)
    _save(target, image)
    return True


def wallpaper_files(folder: Path) -> dict[str, Path]:
    """Of each wallpaper the smallest landscape file that is at least `WALLPAPER_SIDE` wide, or the largest."""
    found: dict[str, Path] = {}
    for place in sorted(p for p in folder.iterdir() if p.name not in LEFT_OUT):
        sizes = {}
        for path in sorted((place / "contents" / "images").glob("*x*.*")):
            width, height = (int(side) for side in path.stem.split("x"))
            if width > height:
                sizes[width] = path
        if sizes:
            wide = [width for width in sizes if width >= WALLPAPER_SIDE]
            found[place.name] = sizes[min(wide) if wide else max(sizes)]
    return found


def _reduce_wallpaper(path: Path, target: Path) -> None:
    with Image.open(path) as image:
        image.draft("RGB", (WALLPAPER_SIDE, WALLPAPER_SIDE))
        image = image.convert("RGB")
    image.thumbnail((WALLPAPER_SIDE, WALLPAPER_SIDE), Image.Resampling.LANCZOS)
    _save(target, image)


def _save(target: Path, image: Image.Image) -> None:
    target.parent.mkdir(exist_ok=True)
    np.save(target, np.asarray(image))
