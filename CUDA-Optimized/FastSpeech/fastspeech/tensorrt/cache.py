"""Engines kept between runs, each under a hash of all that it depends on.

An engine fits one version of TensorRT, one kind of GPU, one network, its weights and its shapes. Any of them changed
makes a new engine; the old one stays for who still needs it. Files are whole or not there, and their own hash is
checked before TensorRT reads them.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np

from dlx import files, paths

from ..cuda import build
from .network import Shapes

HERE = Path(__file__).resolve().parent
SOURCES = ("layers.py", "network.py", "plugins.py")  # what a definition comes from


def weights_hash(weights: Mapping[str, np.ndarray]) -> str:
    """Of names, types, shapes and values."""
    digest = hashlib.sha256()
    for name in sorted(weights):
        values = np.ascontiguousarray(weights[name])
        digest.update(f"{name} {values.dtype.str} {values.shape}\0".encode())
        digest.update(values.tobytes())
    return digest.hexdigest()


def key(
    trt: Any,
    gpu: str,
    half: str,
    config: Any,
    weights: Mapping[str, np.ndarray],
    shapes: Shapes,
    dtype: str,
    plugins: bool,
) -> dict[str, Any]:
    """All that an engine depends on. ``gpu``: its name and compute capability."""
    sources = [HERE / name for name in SOURCES]
    if plugins:
        sources += sorted(build.SOURCES.glob("*.cu*"))
    digest = hashlib.sha256()
    for path in sources:
        digest.update(path.name.encode() + b"\0" + path.read_bytes() + b"\0")
    return {
        "tensorrt": f"{trt.__name__} {trt.__version__}",
        "gpu": gpu,
        "half": half,
        "config": dataclasses.asdict(config),
        "weights": weights_hash(weights),
        "shapes": dataclasses.asdict(shapes),
        "dtype": dtype,
        "plugins": plugins,
        "sources": digest.hexdigest(),
    }


def folder() -> Path:
    return paths.home() / "engines"


def engine(description: dict[str, Any], make: Callable[[], bytes]) -> bytes:
    """The engine of a `key`: the kept one if it is whole, else what ``make`` gives, which is kept."""
    text = json.dumps(description, sort_keys=True)
    name = hashlib.sha256(text.encode()).hexdigest()[:24]
    target = folder() / f"{description['half']}-{name}.engine"
    with files.lock(target.with_suffix(".lock"), message=f"waiting for {target.name}"):
        found = _read(target, text)
        if found is None:
            found = make()
            head = json.dumps({"key": text, "sha256": hashlib.sha256(found).hexdigest()})
            files.atomic_write(target, head.encode() + b"\n" + found)
    return found


def _read(path: Path, text: str) -> bytes | None:
    """What a file holds after its line of JSON, if that says what is wanted and the rest is whole."""
    if not path.is_file():
        return None
    head, _, content = path.read_bytes().partition(b"\n")
    try:
        said = json.loads(head)
    except ValueError:
        return None
    whole = isinstance(said, dict) and said.get("sha256") == hashlib.sha256(content).hexdigest()
    return content if whole and said.get("key") == text else None
