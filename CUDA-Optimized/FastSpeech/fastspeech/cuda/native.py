"""The shared library of launchers through ctypes: addresses, sizes and a stream go in, nothing is allocated.

No PyTorch here: PyTorch, TensorRT's plugins and tests hand over addresses of device memory.
"""

from __future__ import annotations

import ctypes
import functools
from pathlib import Path

from . import build

POINTER, INT, FLOAT = ctypes.c_void_p, ctypes.c_int, ctypes.c_float
SIGNATURES: dict[str, tuple[type, ...]] = {
    # x, durations, out, lengths; batch, symbols, channels, size, least, with_positions, type; stream
    "length_regulation": (*[POINTER] * 4, *[INT] * 7, POINTER),
    # x, symbols, out, lengths; batch, rows, length, channels, type; stream
    "positions": (*[POINTER] * 4, *[INT] * 5, POINTER),
    # x, bias, residual, gain, shift, out, lengths; batch, length, channels; epsilon; type; stream
    "residual_norm": (*[POINTER] * 7, *[INT] * 3, FLOAT, INT, POINTER),
    # qkv, out, lengths; batch, length, heads, many, type; stream
    "attention64": (*[POINTER] * 3, *[INT] * 5, POINTER),
    # x, weight, bias, residual, gain, shift, out, parts, arrived, lengths; batch, length, inputs, outputs, kernel,
    # mode; epsilon; tile, splits, type; stream
    "convolution": (*[POINTER] * 10, *[INT] * 6, FLOAT, *[INT] * 3, POINTER),
    # x, 10 weights, lengths, speed, emphasis, pauses, logs, durations; batch, symbols, inputs, hidden, longest;
    # epsilon; type; stream
    "duration_predictor": (*[POINTER] * 17, *[INT] * 5, FLOAT, INT, POINTER),
}
INVALID = 1  # cudaErrorInvalidValue


class LaunchError(RuntimeError):
    """CUDA refused a launch."""


class Library:
    """The launchers as methods of the names in SIGNATURES. Addresses are integers, None is null."""

    def __init__(self, path: Path) -> None:
        self.path = path
        loaded = ctypes.CDLL(str(path))
        self.functions = {}
        for name, arguments in SIGNATURES.items():
            function = getattr(loaded, f"launch_{name}")
            function.argtypes, function.restype = arguments, INT
            self.functions[name] = function

    def launch(self, name: str, *arguments: int | float | None) -> None:
        """Queue a kernel. ValueError for sizes that it does not take, LaunchError for what else CUDA says."""
        code = self.functions[name](*arguments)
        if code == INVALID:
            raise ValueError(f"{name} does not take these sizes: {arguments}")
        if code:
            raise LaunchError(f"{name}: CUDA error {code}")


@functools.cache
def for_arch(arch: str) -> Library:
    """The library for "sm_90" and the like, built if need be."""
    return Library(build.library(arch))
