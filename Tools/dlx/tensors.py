"""Tensors in files: safetensors in and out, and values that PyTorch loads without running code from the file.

Loading a pickle can run any code that its author put in. So weights are kept as safetensors, and the rest of a
checkpoint in types that `torch.load(weights_only=True)` admits.
"""

from __future__ import annotations

import collections
import json
import os
import pickle
import re
from pathlib import Path
from typing import Any

import numpy as np
import torch

__all__ = ["CheckpointError", "load_tensors", "load_torch", "portable", "restored", "save_tensors",
           "split_state_dict", "unwrap"]  # fmt: skip

Tensors = dict[str, torch.Tensor]


class CheckpointError(ValueError):
    """A file or checkpoint that cannot be used; the message names the file and what is wrong."""


def save_tensors(tensors: Tensors, path: str | os.PathLike, metadata: dict[str, str] | None = None) -> None:
    """Write tensors as safetensors. Tied tensors are written once per name, so any reader finds every name.

    The file is written in place: give a temporary path (`files.atomic_path`) where a half file would harm.
    """
    import safetensors.torch

    seen: set[int] = set()
    packed: Tensors = {}
    for name, tensor in tensors.items():
        tensor = tensor.detach().to("cpu").contiguous()
        storage = tensor.untyped_storage()
        # safetensors refuses two names for one memory, and views that use a part of it.
        if storage.data_ptr() in seen or storage.nbytes() != tensor.nbytes:
            tensor = tensor.clone()
        seen.add(tensor.untyped_storage().data_ptr())
        packed[name] = tensor
    header = {"format": "pt", "order": json.dumps(list(packed)), **(metadata or {})}
    safetensors.torch.save_file(packed, str(path), header)


def load_tensors(path: str | os.PathLike) -> Tensors:
    """Read a safetensors file onto the CPU, in the order in which it was written."""
    import safetensors

    try:
        with safetensors.safe_open(str(path), framework="pt", device="cpu") as file:
            names = list(file.keys())
            order = json.loads((file.metadata() or {}).get("order", "[]"))
            names = order if sorted(order) == sorted(names) else names
            return {name: file.get_tensor(name) for name in names}
    except safetensors.SafetensorError as error:
        raise CheckpointError(f"{path}: not a whole safetensors file: {error}") from None


def refusal(path: str | os.PathLike, error: pickle.UnpicklingError) -> str:
    """What to do about a file that torch refuses; torch's own advice is to switch the protection off."""
    culprit = re.search(r"(?:GLOBAL|global) ([\w.]+)", str(error))
    what = f"the Python object {culprit[1]}" if culprit else "Python objects"
    return (
        f"{path}: refused, since it holds {what} and loading that can run any code. If you trust where the file "
        f"comes from, convert it once: python -m dlx.weights convert --trust {path} "
        f"{Path(path).with_suffix('.safetensors')}"
    )


def load_torch(path: str | os.PathLike) -> Any:
    """`torch.load` onto the CPU that never runs code from the file; the error says how to convert a refused one."""
    try:
        return torch.load(path, map_location="cpu", weights_only=True)
    except pickle.UnpicklingError as error:
        raise CheckpointError(refusal(path, error)) from None
    except (RuntimeError, EOFError) as error:
        if isinstance(error, torch.OutOfMemoryError):
            raise
        raise CheckpointError(f"{path}: not a whole PyTorch file: {str(error).splitlines()[0]}") from None


def unwrap(model: torch.nn.Module) -> torch.nn.Module:
    """The module inside DistributedDataParallel and torch.compile, whose state dict has the plain names."""
    while True:
        if isinstance(model, torch.nn.parallel.DistributedDataParallel | torch.nn.DataParallel):
            model = model.module
        elif hasattr(model, "_orig_mod"):
            model = model._orig_mod
        else:
            return model


def split_state_dict(state_dict: dict[str, Any], name: str) -> tuple[Tensors, dict[str, Any]]:
    """Tensors that safetensors can hold, and the other entries (extra state, complex tensors)."""
    wrapped = bool(state_dict) and all(str(key).startswith("module.") for key in state_dict)
    tensors, extra = {}, {}
    for key, value in state_dict.items():
        key = (key.removeprefix("module.") if wrapped else key).replace("_orig_mod.", "")
        if isinstance(value, torch.Tensor):
            if value.is_meta:
                raise TypeError(f"model[{name!r}][{key!r}] is on the meta device and has no values to save")
            if hasattr(value, "full_tensor"):
                raise TypeError(f"model[{name!r}][{key!r}] is one shard of a tensor: gather the full state dict first")
            if value.layout is torch.strided and not value.is_complex() and not value.is_quantized:
                tensors[key] = value
                continue
        extra[key] = value
    return tensors, extra


_PLAIN = (type(None), bool, int, float, complex, str, bytes, torch.dtype, torch.device, torch.Size)
_ARRAY = "__numpy_array__"


def portable(value: Any, where: str) -> Any:
    """`value` in types that torch.load(weights_only=True) admits; TypeError names the entry that has none."""
    if isinstance(value, np.generic):
        return value.item()
    if isinstance(value, np.ndarray):
        if value.dtype.kind not in "biufc":
            raise TypeError(f"{where} is an array of {value.dtype}, which no tensor can hold")
        return {_ARRAY: torch.from_numpy(np.ascontiguousarray(value).reshape(value.shape))}
    if isinstance(value, torch.Tensor):
        if hasattr(value, "full_tensor") or value.is_meta:
            raise TypeError(f"{where} is a shard or a meta tensor: gather its values first")
        # A view would be saved with all the memory it looks into.
        part = value.layout is torch.strided and value.untyped_storage().nbytes() > value.nbytes
        return value.detach().clone() if part else value.detach()
    if isinstance(value, dict):
        items = {portable(k, f"a key of {where}"): portable(item, f"{where}[{k!r}]") for k, item in value.items()}
        return collections.Counter(items) if isinstance(value, collections.Counter) else items
    if isinstance(value, list | tuple | set | frozenset):
        items = [portable(item, f"{where}[{index}]") for index, item in enumerate(value)]
        if isinstance(value, torch.Size) or type(value) is list:
            return value if isinstance(value, torch.Size) else items
        return tuple(items) if isinstance(value, tuple) else set(items)
    if type(value) in _PLAIN:
        return value
    for kind in (bool, int, float, str):  # an IntEnum, a str subclass
        if isinstance(value, kind):
            return kind(value)
    raise TypeError(f"{where} is a {type(value).__name__}, which a checkpoint cannot hold: save its numbers instead")


def restored(value: Any) -> Any:
    if isinstance(value, dict):
        if set(value) == {_ARRAY}:
            return value[_ARRAY].numpy()
        for key, item in value.items():
            value[key] = restored(item)
        return value
    if type(value) is list:
        return [restored(item) for item in value]
    if type(value) is tuple:
        return tuple(restored(item) for item in value)
    return value
