"""Which implementation runs: the Triton kernels or the plain PyTorch form.

The choice is made at each call, from what was asked for (`use`, or the variable FUSEDOPS_BACKEND) and from the tensors:

========  ==========================================================================================================
auto      the kernels for tensors on a CUDA device of compute capability 8.0 or newer, in float32, float16 or bfloat16,
          where triton can be imported; the plain form for all else, DTensors among it
triton    the kernels, or a RuntimeError that names operator, device and reason. CPU tensors, too, when triton was
          imported with TRITON_INTERPRET=1, which runs the kernels by an interpreter (slowly; for tests)
plain     the plain form, written with PyTorch's own operators
========  ==========================================================================================================

Under torch.compile the choice is made once, while the graph is traced.
"""

from __future__ import annotations

import contextlib
import functools
import importlib.util
import os
import sys
from collections.abc import Callable
from contextvars import ContextVar

import torch
from torch import Tensor

__all__ = ["BACKENDS", "backend_for", "device_guard", "interpreted", "processors", "requested", "use"]

BACKENDS = ("auto", "triton", "plain")
DTYPES = (torch.float32, torch.float16, torch.bfloat16)
CAPABILITY = (8, 0)
INTERPRETED_PROCESSORS = 2  # the interpreter has none; two make kernels with a loop over rows use it


def _constant_for_compiler(function: Callable) -> Callable:
    """torch.compiler.assume_constant_result, which would import the whole compiler to set this one mark."""
    function._dynamo_marked_constant = True
    return function


_asked: ContextVar[str | None] = ContextVar("fusedops_backend", default=None)


class use:  # noqa: N801 - reads as a verb: fusedops.use("plain"), with fusedops.use("plain"): ...
    """Ask for a backend ("auto", "triton" or "plain") from here on in this thread or task; as a context, until its end.

    ValueError for another name. A new thread begins with the default: FUSEDOPS_BACKEND, or "auto".
    """

    def __init__(self, backend: str) -> None:
        self._token = _asked.set(_checked(backend, "use"))

    def __enter__(self) -> None:
        return None

    def __exit__(self, *_: object) -> None:
        _asked.reset(self._token)


@_constant_for_compiler
def requested() -> str:
    """What was asked for: "auto", "triton" or "plain". ValueError if FUSEDOPS_BACKEND holds another word."""
    return _asked.get() or _checked(os.environ.get("FUSEDOPS_BACKEND", "auto"), "FUSEDOPS_BACKEND")


def backend_for(*tensors: Tensor | None, op: str = "this operator") -> str:
    """ "triton" or "plain" for an operator on these tensors (None is passed over); see the top of this module.

    RuntimeError if "triton" is asked for and cannot run, or if the tensors lie on several devices: it names `op`.
    """
    given = [tensor for tensor in tensors if tensor is not None]
    asked = requested()
    devices = {tensor.device for tensor in given}
    if len(devices) > 1:
        raise RuntimeError(f"fusedops.{op}: tensors lie on several devices: {', '.join(sorted(map(str, devices)))}")
    if asked == "plain" or not given:
        return "plain"
    device = given[0].device
    reason = obstacle(device.type, -1 if device.index is None else device.index)
    if not reason and device.type == "cpu" and asked == "auto":
        return "plain"  # the interpreter is for those who ask for it
    if not reason and not torch.compiler.is_compiling() and any(map(is_distributed, given)):
        reason = "a DTensor has no memory of its own; the plain form asks its shards"
    if not reason and _transformed():
        reason = "torch.func's transforms (grad, vmap, ...) need the plain form"
    if not reason:
        strange = [tensor.dtype for tensor in given if tensor.is_floating_point() and tensor.dtype not in DTYPES]
        reason = f"its kernels know float32, float16 and bfloat16, not {strange[0]}" if strange else ""
    if not reason:
        return "triton"
    if asked == "triton":
        raise RuntimeError(f"fusedops.{op}: the triton backend cannot run on {device}: {reason}")
    return "plain"


def is_distributed(tensor: Tensor) -> bool:
    """Whether it is a DTensor, as FSDP2's parameters are."""
    module = sys.modules.get("torch.distributed.tensor")
    return module is not None and isinstance(tensor, module.DTensor)


@_constant_for_compiler
def obstacle(device_type: str, index: int) -> str:
    """Why kernels cannot run on a device; "" if they can. `index` -1 is the current device."""
    return _obstacle(device_type, index)


@functools.cache
def _obstacle(device_type: str, index: int) -> str:
    if importlib.util.find_spec("triton") is None:
        return "the package triton is not installed"
    if device_type == "cpu":
        return "" if interpreted() else "CPU tensors need TRITON_INTERPRET=1, set before triton is imported"
    if device_type != "cuda":
        return "it is neither a CUDA device nor a CPU"
    if torch.version.hip is not None:
        return "the kernels are not tested on ROCm"
    capability = torch.cuda.get_device_capability(None if index < 0 else index)
    if capability < CAPABILITY:
        return f"compute capability {capability[0]}.{capability[1]} is below {CAPABILITY[0]}.{CAPABILITY[1]}"
    return ""


@_constant_for_compiler
def _transformed() -> bool:
    """Whether a torch.func transform is active; custom operators and their derivatives do not know these."""
    return torch._C._are_functorch_transforms_active()


@functools.cache
def interpreted() -> bool:
    """Whether triton runs kernels by its interpreter in this process. It reads the variable when it is imported."""
    return os.environ.get("TRITON_INTERPRET") == "1"


def device_guard(tensor: Tensor) -> contextlib.AbstractContextManager[object]:
    """Make the tensor's device the current one, so that kernels launch there, on its current stream."""
    if tensor.device.type == "cuda" and tensor.device.index != torch.cuda.current_device():
        return torch.cuda.device(tensor.device)
    return _NOTHING


_NOTHING = contextlib.nullcontext()


def ceil_div(value: int, by: int) -> int:
    """As triton.cdiv, which takes microseconds outside of kernels."""
    return -(-value // by)


def next_power_of_2(value: int) -> int:
    """The smallest power of two that is not below `value`, which is 1 or more."""
    return 1 << (value - 1).bit_length()


def processors(device: torch.device) -> int:
    """Multiprocessors of a CUDA device; a small number for the interpreter."""
    return INTERPRETED_PROCESSORS if device.type != "cuda" else _multiprocessors(device.index)


@functools.cache
def _multiprocessors(index: int | None) -> int:
    return torch.cuda.get_device_properties(index).multi_processor_count


def shared_memory(device: torch.device) -> int:
    """Bytes of shared memory that a program may take; without bound for the interpreter."""
    return 1 << 30 if device.type != "cuda" else _shared_memory(device.index)


def stages_that_fit(stages: int, size: int, device: torch.device) -> int:
    """At most ``stages``: as many tiles of ``size`` bytes as a program's shared memory holds, but at least one."""
    return max(1, min(stages, shared_memory(device) // size))


@functools.cache
def _shared_memory(index: int | None) -> int:
    return torch.cuda.get_device_properties(index).shared_memory_per_block_optin


def _checked(backend: str, where: str) -> str:
    if backend not in BACKENDS:
        raise ValueError(f"{where}: backend {backend!r} is not one of {', '.join(BACKENDS)}")
    return backend
