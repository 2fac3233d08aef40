"""Pictures: one way to decode them for training, inference and hub; preprocessing that travels with weights; captions.

Every decoder of the repository gives what `decode_image` gives: 8-bit RGB, upright (the EXIF orientation is applied),
grey spread over three channels, an alpha channel dropped (not blended), 16-bit values divided by 257, only the first
frame of an animation. Only `to_tensor` and calling a `Preprocessing` import torch.
"""

from __future__ import annotations

import functools
import importlib.util
import io
import os
import unicodedata
import warnings
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any

import numpy as np
from PIL import Image, ImageDraw, ImageFont, ImageOps, UnidentifiedImageError

if TYPE_CHECKING:
    import torch

ImageSource = str | os.PathLike | bytes | IO[bytes] | Image.Image | np.ndarray

IMAGE_SUFFIXES = (".jpg", ".jpeg", ".png", ".bmp", ".webp", ".tif", ".tiff", ".gif", ".ppm", ".pgm")
INTERPOLATIONS = {
    "nearest": Image.Resampling.NEAREST,
    "bilinear": Image.Resampling.BILINEAR,
    "bicubic": Image.Resampling.BICUBIC,
    "lanczos": Image.Resampling.LANCZOS,
}
LONGEST = 16  # longer than so many short sides, a picture is not scaled as a whole
SHEET_LIMIT = 4096  # pixels of an annotated picture's longer side
LARGEST_FONT = 64

FONT_FOLDERS = ("~/.local/share/fonts", "~/.fonts", "/usr/local/share/fonts", "/usr/share/fonts", "/Library/Fonts")
FONT_NAMES = (
    "DejaVuSans.ttf",
    "NotoSans-Regular.ttf",
    "LiberationSans-Regular.ttf",
    "NotoSansCJK-Regular.ttc",
    "NotoSansArabic-Regular.ttf",
    "NotoSansHebrew-Regular.ttf",
    "NotoSansDevanagari-Regular.ttf",
    "NotoSansThai-Regular.ttf",
)


def decode_image(source: ImageSource) -> Image.Image:
    """An upright 8-bit RGB picture from a path, bytes, a binary file, a PIL image or an array.

    Arrays: HW, HW1, HW3 or HW4; uint8, bool, uint16 (0..65535) or float (0..1). Whatever cannot be read, wholly, is a
    ValueError that names the file.
    """
    if isinstance(source, np.ndarray):
        return _from_array(source)
    name = _describe(source)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", Image.DecompressionBombWarning)
            warnings.filterwarnings("ignore", message="Palette images with Transparency")
            warnings.filterwarnings("ignore", message="Corrupt EXIF data")
            if isinstance(source, Image.Image):
                return _to_rgb(ImageOps.exif_transpose(source))
            opened = io.BytesIO(source) if isinstance(source, bytes | bytearray) else source
            with Image.open(opened) as image:
                check_pixels(image)
                image.load()
                return _to_rgb(ImageOps.exif_transpose(image))
    except FileNotFoundError:
        raise ValueError(f"{name}: no such picture") from None
    except UnidentifiedImageError:
        raise ValueError(f"{name}: not a picture in a known format") from None
    except Image.DecompressionBombError as error:
        raise ValueError(f"{name}: refused, {error}") from error
    except (OSError, ValueError, SyntaxError, EOFError, IndexError, TypeError, AttributeError, KeyError) as error:
        # Pillow's readers let any of these through for a damaged file.
        raise ValueError(f"{name}: unreadable picture ({error})") from error


def check_pixels(image: Image.Image) -> None:
    """Raise Image.DecompressionBombError where an opened picture is larger than Pillow's limit (which only warns)."""
    limit = Image.MAX_IMAGE_PIXELS
    if limit is not None and image.width * image.height > limit:
        raise Image.DecompressionBombError(f"{image.width}x{image.height} are more than {limit} pixels")


def _describe(source: ImageSource) -> str:
    if isinstance(source, str | os.PathLike):
        return os.fspath(source)
    if isinstance(source, bytes | bytearray):
        return f"<{len(source)} bytes>"
    return str(getattr(source, "filename", None) or getattr(source, "name", None) or f"<{type(source).__name__}>")


def _to_rgb(image: Image.Image) -> Image.Image:
    if image.mode == "RGB":
        return image.copy() if image.readonly else image
    if image.mode in ("I;16", "I;16L", "I;16B", "I;16N"):
        return _from_array(np.asarray(image).astype(np.uint16))
    if image.mode == "I":  # 32 bits; in pictures it holds 16-bit grey
        values = np.asarray(image)
        if values.min() < 0 or values.max() > 65535:
            raise ValueError(f"32-bit values from {values.min()} to {values.max()}, expected 0 to 65535")
        return _from_array(values.astype(np.uint16))
    if image.mode == "F":
        values = np.asarray(image)
        return _from_array(values / 255 if values.max() > 1 else values)  # both scales are in use
    if image.mode in ("P", "PA"):
        # Straight to RGB a palette with transparency is the same, but Pillow warns.
        image = image.convert("RGBA")
    return image.convert("RGB")


def _from_array(values: np.ndarray) -> Image.Image:
    if values.ndim == 3 and values.shape[2] == 1:
        values = values[..., 0]
    if values.ndim not in (2, 3) or (values.ndim == 3 and values.shape[2] not in (3, 4)) or not values.size:
        raise ValueError(f"a picture array must be HW, HW1, HW3 or HW4, got shape {values.shape}")
    if values.dtype == bool:
        values = values.astype(np.uint8) * 255
    elif values.dtype == np.uint16:
        values = ((values.astype(np.uint32) + 128) // 257).astype(np.uint8)
    elif np.issubdtype(values.dtype, np.floating):
        if not np.isfinite(values).all():
            raise ValueError("the picture holds NaN or infinite values")
        if values.min() < 0 or values.max() > 1:
            raise ValueError(f"a float picture must be within 0 to 1, got {values.min():g} to {values.max():g}")
        values = np.floor(values.astype(np.float64) * 255 + 0.5).astype(np.uint8)
    elif values.dtype != np.uint8:
        raise ValueError(f"a picture array must be uint8, bool, uint16 or float, got {values.dtype}")
    if values.ndim == 2:
        values = np.repeat(values[..., None], 3, axis=2)
    return Image.fromarray(np.ascontiguousarray(values[..., :3]))


def to_tensor(image: Image.Image) -> torch.Tensor:
    """float32 CHW in [0, 1]; one channel for mode "L", else three."""
    import torch

    values = np.array(image if image.mode in ("L", "RGB") else image.convert("RGB"))
    if values.ndim == 2:
        values = values[..., None]
    return torch.from_numpy(values).permute(2, 0, 1).contiguous().float().div_(255)


@dataclass(frozen=True)
class Preprocessing:
    """From a picture to a model's input.

    The short side becomes `resize` (None leaves the size), the centre `crop` x `crop` is cut out, values in [0, 1] have
    `mean` subtracted and are divided by `std`. `channels` 1 is for models of grey pictures.
    """

    resize: int | None = 256
    crop: int = 224
    interpolation: str = "bilinear"
    mean: tuple[float, ...] = (0.485, 0.456, 0.406)
    std: tuple[float, ...] = (0.229, 0.224, 0.225)
    channels: int = 3

    def __post_init__(self) -> None:
        object.__setattr__(self, "mean", tuple(float(value) for value in self.mean))
        object.__setattr__(self, "std", tuple(float(value) for value in self.std))
        if self.interpolation not in INTERPOLATIONS:
            raise ValueError(f"interpolation {self.interpolation!r} is none of {', '.join(INTERPOLATIONS)}")
        if self.channels not in (1, 3):
            raise ValueError(f"channels must be 1 or 3, got {self.channels}")
        if len(self.mean) != self.channels or len(self.std) != self.channels:
            raise ValueError(f"mean and std need {self.channels} values, got {len(self.mean)} and {len(self.std)}")
        if min(self.std) <= 0:
            raise ValueError(f"std must be positive, got {self.std}")
        if self.crop < 1 or (self.resize is not None and self.resize < self.crop):
            raise ValueError(f"need resize >= crop >= 1, got resize {self.resize}, crop {self.crop}")

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> Preprocessing:
        """From a weights card. Unknown keys are errors."""
        unknown = set(values) - set(cls.__dataclass_fields__)
        if unknown:
            raise ValueError(f"preprocessing: unknown keys {', '.join(sorted(unknown))}")
        return cls(**values)

    def to_dict(self) -> dict[str, Any]:
        return {key: list(value) if isinstance(value, tuple) else value for key, value in asdict(self).items()}

    def crop_image(self, image: ImageSource) -> Image.Image:
        """Decoded, resized and cropped, in 8 bits: what the training loaders give for evaluation."""
        image = decode_image(image)
        if self.resize is not None:
            image = resize_and_crop(image, self.resize, self.crop, self.interpolation)
        else:
            image = centre_crop(image, self.crop)
        return image.convert("L") if self.channels == 1 else image

    def __call__(self, image: ImageSource) -> torch.Tensor:
        """float32 (channels, crop, crop), normalised."""
        import torch

        mean = torch.tensor(self.mean).view(-1, 1, 1)
        std = torch.tensor(self.std).view(-1, 1, 1)
        return (to_tensor(self.crop_image(image)) - mean) / std


def short_side_sizes(width: int, height: int, size: int) -> tuple[int, int]:
    """Width and height once the shorter side is `size`; the longer one is rounded down, at least `size`."""
    if width <= height:
        return size, max(size, size * height // width)
    return max(size, size * width // height), size


def resize_short(image: Image.Image, size: int, interpolation: str = "bilinear") -> Image.Image:
    """Scale so that the shorter side is `size` pixels; the longer one is rounded down, at least `size`."""
    target = short_side_sizes(*image.size, size)
    return image if target == image.size else image.resize(target, INTERPOLATIONS[interpolation])


def resize_and_crop(image: Image.Image, size: int, crop: int, interpolation: str = "bilinear") -> Image.Image:
    """The centre `crop` x `crop` of the picture scaled to a shorter side of `size`: evaluation's way.

    Of a very long picture only that part is computed: all of a line of 20000 pixels would be gigabytes.
    """
    width, height = short_side_sizes(*image.size, size)
    if max(width, height) <= LONGEST * size:
        return centre_crop(resize_short(image, size, interpolation), crop)
    left, top = (width - crop) // 2, (height - crop) // 2
    across, down = image.width / width, image.height / height
    box = (left * across, top * down, (left + crop) * across, (top + crop) * down)
    return image.resize((crop, crop), INTERPOLATIONS[interpolation], box=box)


def centre_crop(image: Image.Image, size: int) -> Image.Image:
    width, height = image.size
    if width < size or height < size:
        raise ValueError(f"a picture of {width}x{height} is too small for a crop of {size}x{size}")
    left, top = (width - size) // 2, (height - size) // 2
    return image.crop((left, top, left + size, top + size))


# Captions


def annotate(image: Image.Image, lines: Sequence[str], *, minimum_width: int = 320) -> Image.Image:
    """The picture with a block of text lines below it, in a size that can be read.

    Small pictures are enlarged, those with a side beyond SHEET_LIMIT reduced.
    """
    picture = _enlarge(image.convert("RGB"), minimum_width)
    if max(picture.size) > SHEET_LIMIT:
        share = SHEET_LIMIT / max(picture.size)
        picture = picture.resize([max(1, round(side * share)) for side in picture.size], Image.Resampling.BICUBIC)
    width = max(picture.width, minimum_width // 2)
    size = min(max(14, width // 24), LARGEST_FONT)
    lines = [unicodedata.normalize("NFC", str(line)) for line in lines]
    font = best_font(size, "".join(lines))
    wrapped = [piece for line in lines for piece in _wrap(line, font, width - size)]
    pitch = round(size * 1.3)
    sheet = Image.new("RGB", (width, picture.height + pitch * len(wrapped) + (size if wrapped else 0)), "white")
    sheet.paste(picture, (0, 0))
    draw = ImageDraw.Draw(sheet)
    for row, text in enumerate(wrapped):
        draw.text((size // 2, picture.height + size // 2 + row * pitch), text, fill="black", font=font)
    return sheet


def contact_sheet(
    images: Sequence[Image.Image], captions: Sequence[str], *, columns: int | None = None, cell: int = 224
) -> Image.Image:
    """All pictures in a grid, each within `cell` pixels, with its caption (which may hold line breaks) below."""
    if len(images) != len(captions) or not images:
        raise ValueError(f"need as many captions as pictures and at least one, got {len(captions)} and {len(images)}")
    columns = columns or min(len(images), max(1, round(len(images) ** 0.5 * 1.2)))
    size = max(11, cell // 16)
    captions = [unicodedata.normalize("NFC", str(caption)) for caption in captions]
    font = best_font(size, "".join(captions))
    texts = [[p for line in c.splitlines() for p in _wrap(line, font, cell)] for c in captions]
    gap, pitch = max(4, cell // 28), round(size * 1.3)
    height = cell + pitch * max(len(text) for text in texts) + gap
    rows = -(-len(images) // columns)
    sheet = Image.new("RGB", (columns * (cell + gap) + gap, rows * (height + gap) + gap), "white")
    draw = ImageDraw.Draw(sheet)
    for index, (image, text) in enumerate(zip(images, texts, strict=True)):
        left, top = gap + index % columns * (cell + gap), gap + index // columns * (height + gap)
        picture = _enlarge(image.convert("RGB"), cell)
        picture.thumbnail((cell, cell), Image.Resampling.BICUBIC)
        sheet.paste(picture, (left + (cell - picture.width) // 2, top + (cell - picture.height) // 2))
        for row, line in enumerate(text):
            draw.text((left, top + cell + gap // 2 + row * pitch), line, fill="black", font=font)
    return sheet


def _enlarge(image: Image.Image, width: int) -> Image.Image:
    """Whole multiples of a small picture, so that its pixels stay visible."""
    factor = min(width // image.width, SHEET_LIMIT // image.height)
    if image.width * 2 > width or factor < 2:
        return image
    return image.resize((image.width * factor, image.height * factor), Image.Resampling.NEAREST)


@functools.cache
def _font_files() -> tuple[str, ...]:
    """The fonts of FONT_NAMES that this machine has, in that order; matplotlib carries the first."""
    found: dict[str, str] = {}
    for folder in FONT_FOLDERS:
        for where, _, names in os.walk(os.path.expanduser(folder)):
            for name in FONT_NAMES:
                if name in names:
                    found.setdefault(name, os.path.join(where, name))
    matplotlib = importlib.util.find_spec("matplotlib")  # finds the package without running it
    if matplotlib is not None and matplotlib.origin:
        path = Path(matplotlib.origin).parent / "mpl-data" / "fonts" / "ttf" / FONT_NAMES[0]
        if path.is_file():
            found.setdefault(FONT_NAMES[0], str(path))
    return tuple(found[name] for name in FONT_NAMES if name in found)


def best_font(size: int, text: str = "") -> ImageFont.FreeTypeFont | ImageFont.ImageFont:
    """The first font here that can draw all of `text`, else the first, else the small one inside Pillow."""
    fonts = []
    for path in _font_files():
        try:
            fonts.append(ImageFont.truetype(path, size))
        except OSError:
            continue
        if _draws(fonts[-1], text):
            return fonts[-1]
    return fonts[0] if fonts else ImageFont.load_default(size=size)


def _draws(font: ImageFont.FreeTypeFont, text: str) -> bool:
    """Whether the font has a glyph for every character: one that it lacks looks like one that no font has."""
    missing = bytes(font.getmask("\U0010fffd"))
    return all(bytes(font.getmask(c)) != missing for c in set(text) if not c.isspace())


def _wrap(text: str, font: ImageFont.FreeTypeFont | ImageFont.ImageFont, width: int) -> list[str]:
    lines: list[str] = []
    current = ""
    for word in text.split(" "):
        longer = f"{current} {word}" if current else word
        if current and font.getlength(longer) > width:
            lines.append(current)
            current = word
        else:
            current = longer
    return [*lines, current]


def find_images(folder: str | os.PathLike[str]) -> list[Path]:
    """The pictures below a folder, by suffix, sorted by their path; hidden files are passed over."""
    folder = Path(folder)
    return sorted(
        path
        for path in folder.rglob("*")
        if path.suffix.lower() in IMAGE_SUFFIXES
        and path.is_file()
        and not any(part.startswith(".") for part in path.relative_to(folder).parts)
    )
