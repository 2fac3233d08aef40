"""Forms in which a 16-bit parameter keeps, or does without, its float32 master weight. The plain form of the kernels'
arithmetic.

Remainder: a bfloat16 number is the upper half of a float32 number's bits, so the 16 bits that it lacks (int16) are
all that a master needs. The parameter is the nearest bfloat16 (ties away from zero), which is one up where the
remainder, read as a signed number, is negative; so the pair gives back the float32 number bit for bit.

Stochastic rounding: up or down with probabilities that make the mean exact, so that updates far below the last bit of
a bfloat16 are not lost. The random bits are a function of seed, tensor, element and step alone.
"""

from __future__ import annotations

import torch
from torch import Tensor

MASK = 0xFFFFFFFF


def split(x: Tensor) -> tuple[Tensor, Tensor]:
    """float32 -> nearest bfloat16 (ties away from zero) and int16 remainder, from which `join` gives x bit for bit."""
    bits = x.contiguous().view(torch.int32)
    low = (bits << 16) >> 16
    high = (bits >> 16) + (low < 0)
    return high.to(torch.int16).view(torch.bfloat16), low.to(torch.int16)


def join(parameter: Tensor, remainder: Tensor) -> Tensor:
    """bfloat16 and int16 -> float32; the inverse of `split`."""
    low = remainder.contiguous().to(torch.int32)
    high = parameter.contiguous().view(torch.int16).to(torch.int32) - (low < 0).to(torch.int32)
    return ((high << 16) | (low & 0xFFFF)).view(torch.float32)


def mix(x: Tensor | int) -> Tensor | int:
    """A permutation of the 32-bit numbers, on an int or an int64 tensor."""
    x = x & MASK
    x = ((x ^ (x >> 16)) * 0x7FEB352D) & MASK
    x = ((x ^ (x >> 15)) * 0x846CA68B) & MASK
    return x ^ (x >> 16)


def random_bits(shape: Tensor, seed: int, tensor: int, step: int) -> Tensor:
    """-> int64 in [0, 2 ** 32) of the shape and layout of ``shape``; elements 2 ** 32 apart have the same ones."""
    element = torch.arange(shape.numel(), dtype=torch.int64, device=shape.device)
    return mix(mix(element + mix(seed + tensor)) ^ mix(step))


def round_stochastically(x: Tensor, seed: int, tensor: int, step: int) -> Tensor:
    """float32 -> bfloat16; what is not finite is kept. ``x`` is dense in memory, and elements count in memory order."""
    flat = x.as_strided((x.numel(),), (1,))
    bits = flat.view(torch.int32).to(torch.int64) & MASK
    rounded = (bits + (random_bits(flat, seed, tensor, step) & 0xFFFF)) & 0xFFFF0000
    signed = torch.where(rounded >= 2**31, rounded - 2**32, rounded).to(torch.int32)
    result = torch.where(torch.isfinite(flat), signed.view(torch.float32), flat).to(torch.bfloat16)
    return torch.empty_like(x, dtype=torch.bfloat16).copy_(result.as_strided(x.shape, x.stride()))
