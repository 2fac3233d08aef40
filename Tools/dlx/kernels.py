"""Whether kernels written in Triton can run here. Triton comes only with GPU builds of PyTorch, so import it late."""

from __future__ import annotations

import functools
import importlib.util
import os

import torch

DTYPES = (torch.float32, torch.bfloat16, torch.float16)  # that kernels read and write; they add up in float32


@functools.cache
def has_kernels(device_type: str) -> bool:
    """On a GPU where Triton is installed, or on a CPU by its interpreter (TRITON_INTERPRET=1), for tests."""
    interpreted = os.environ.get("TRITON_INTERPRET") == "1"
    return (device_type == "cuda" or interpreted) and importlib.util.find_spec("triton") is not None
