"""Spherical harmonics, Clebsch-Gordan coefficients, and the bases of equivariant kernels.

Conventions are e3nn's, so that published weights keep their meaning: real harmonics in the order m = -l..l about the
polar axis y, which makes Y_1 proportional to (x, y, z); harmonics of norm 'integral' (orthonormal on the sphere);
3j tensors of Frobenius norm 1. Everything is derived here: harmonics by Legendre recursion in homogeneous polynomials,
coefficients by Racah's formula in exact integers and the change from complex to real harmonics.

E edges, J degree of the harmonic, F number of paths J = |in - out| ... in + out.
"""

from __future__ import annotations

import functools
import math
from fractions import Fraction

import torch
from torch import Tensor

from .fiber import degree_to_dim

Basis = dict[str, Tensor]
TINY = 1e-12  # shorter relative positions (in the coordinates' unit) have no direction


def unit_vectors(vectors: Tensor) -> Tensor:
    """(..., 3) / length, with the zero vector kept at zero and with finite gradients everywhere."""
    square = vectors.square().sum(-1, keepdim=True)
    degenerate = square <= TINY**2
    return torch.where(degenerate, 0.0, vectors) * torch.where(degenerate, 1.0, square).rsqrt()


def lengths(vectors: Tensor) -> Tensor:
    """(..., 1) Euclidean norms whose gradient at the zero vector is zero instead of nan."""
    square = vectors.square().sum(-1, keepdim=True)
    degenerate = square <= TINY**2
    return torch.where(degenerate, 0.0, torch.where(degenerate, 1.0, square).sqrt())


def spherical_harmonics(max_degree: int, vectors: Tensor) -> list[Tensor]:
    """Y_0 ... Y_max of the directions of ``vectors`` (..., 3): tensors (..., 2 l + 1) with integral norm.

    The zero vector has Y_0 and zeros in all higher degrees.
    """
    y, z, x = unit_vectors(vectors).unbind(-1)  # the formulas below are about the polar axis z
    square = x * x + y * y + z * z
    cosines, sines = [torch.ones_like(x)], [torch.zeros_like(x)]  # Re, Im of (x + i y)^m
    for _ in range(max_degree):
        cosine, sine = cosines[-1], sines[-1]
        cosines.append(x * cosine - y * sine)
        sines.append(x * sine + y * cosine)
    legendre: dict[tuple[int, int], Tensor] = {}  # P_l^m without (1 - z^2)^(m/2), homogeneous of degree l - m
    for m in range(max_degree + 1):
        legendre[m, m] = torch.full_like(z, math.prod(range(1, 2 * m, 2)))
        for degree in range(m + 1, max_degree + 1):
            value = (2 * degree - 1) * z * legendre[degree - 1, m]
            if degree > m + 1:
                value = value - (degree + m - 1) * square * legendre[degree - 2, m]
            legendre[degree, m] = value / (degree - m)
    harmonics = []
    for degree in range(max_degree + 1):
        columns = []
        for m in range(-degree, degree + 1):
            order = abs(m)
            norm = (2 * degree + 1) / (4 * math.pi) * math.factorial(degree - order) / math.factorial(degree + order)
            norm = math.sqrt(norm * (2 if m else 1))
            angular = sines[order] if m < 0 else cosines[order]
            columns.append(norm * legendre[degree, order] * angular)
        harmonics.append(torch.stack(columns, -1))
    return harmonics


def _complex_coefficient(j1: int, m1: int, j2: int, m2: int, j3: int) -> float:
    """<j1 m1 j2 m2 | j3 m1+m2> by Racah's formula, exact up to the last square root."""
    factorial, m3 = math.factorial, m1 + m2
    if abs(m3) > j3:
        return 0.0
    total = Fraction(0)
    for k in range(max(0, j2 - j3 - m1, j1 - j3 + m2), min(j1 + j2 - j3, j1 - m1, j2 + m2) + 1):
        denominator = factorial(k) * factorial(j1 + j2 - j3 - k) * factorial(j1 - m1 - k) * factorial(j2 + m2 - k)
        denominator *= factorial(j3 - j2 + m1 + k) * factorial(j3 - j1 - m2 + k)
        total += Fraction((-1) ** k, denominator)
    square = Fraction(
        (2 * j3 + 1) * factorial(j3 + j1 - j2) * factorial(j3 - j1 + j2) * factorial(j1 + j2 - j3),
        factorial(j1 + j2 + j3 + 1),
    )
    for j, m in ((j1, m1), (j2, m2), (j3, m3)):
        square *= factorial(j + m) * factorial(j - m)
    return math.copysign(math.sqrt(square * total * total), total)


def _to_complex(degree: int) -> Tensor:
    """(complex m, real m): how the complex harmonics follow from the real ones, with the phase (-i)^l of e3nn."""
    change = torch.zeros(degree_to_dim(degree), degree_to_dim(degree), dtype=torch.complex128)
    half = math.sqrt(0.5)
    for m in range(1, degree + 1):
        change[degree - m, degree + m] = half
        change[degree - m, degree - m] = -1j * half
        change[degree + m, degree + m] = (-1) ** m * half
        change[degree + m, degree - m] = 1j * (-1) ** m * half
    change[degree, degree] = 1
    return (-1j) ** degree * change


@functools.cache
@torch.inference_mode(False)  # kept for the life of the process, also for calls that record gradients
def wigner_3j(l1: int, l2: int, l3: int) -> Tensor:
    """The tensor (2 l1 + 1, 2 l2 + 1, 2 l3 + 1) that the three rotations leave alone, float64, Frobenius norm 1."""
    if not abs(l1 - l2) <= l3 <= l1 + l2:
        raise ValueError(f"degrees {l1}, {l2}, {l3} do not couple: need |l1 - l2| <= l3 <= l1 + l2")
    coupling = torch.zeros(degree_to_dim(l1), degree_to_dim(l2), degree_to_dim(l3), dtype=torch.complex128)
    for m1 in range(-l1, l1 + 1):
        for m2 in range(max(-l2, -l3 - m1), min(l2, l3 - m1) + 1):
            coupling[l1 + m1, l2 + m2, l3 + m1 + m2] = _complex_coefficient(l1, m1, l2, m2, l3)
    real = torch.einsum(
        "abc,ai,bj,ck->ijk", coupling, _to_complex(l1), _to_complex(l2), _to_complex(l3).conj()
    ).real.contiguous()
    return real / real.norm()


@functools.cache
@torch.inference_mode(False)
def kernel_coefficients(degree_in: int, degree_out: int, device: str, dtype: torch.dtype) -> list[tuple[int, Tensor]]:
    """Per path its J and the tensor (2 out + 1, 2 in + 1, 2 J + 1)."""
    paths = range(abs(degree_in - degree_out), degree_in + degree_out + 1)
    return [(j, wigner_3j(j, degree_in, degree_out).permute(2, 1, 0).to(device, dtype).contiguous()) for j in paths]


def pair_basis(degree_in: int, degree_out: int, harmonics: list[Tensor]) -> Tensor:
    """(E, 2 in + 1, F, 2 out + 1): the F equivariant maps from degree ``in`` to ``out`` along each edge."""
    first = harmonics[0]
    coefficients = kernel_coefficients(degree_in, degree_out, str(first.device), first.dtype)
    return torch.stack([torch.einsum("ej,klj->elk", harmonics[j], tensor) for j, tensor in coefficients], 2)


def get_basis(
    relative_pos: Tensor,
    max_degree: int = 4,
    compute_gradients: bool = False,
    use_pad_trick: bool = False,
    amp: bool = False,
) -> Basis:
    """Bases '{in},{out}' for all pairs of degrees up to ``max_degree``, from relative positions (E, 3).

    Without ``compute_gradients`` they are constants of the graph and can be kept. ``amp`` returns fp16.
    ``use_pad_trick`` is accepted for callers of the reference package and changes nothing.
    """
    exactly = torch.autocast(relative_pos.device.type, enabled=False)
    with exactly, torch.set_grad_enabled(compute_gradients and torch.is_grad_enabled()):
        harmonics = spherical_harmonics(2 * max_degree, relative_pos)
        degrees = range(max_degree + 1)
        basis = {f"{i},{o}": pair_basis(i, o, harmonics) for i in degrees for o in degrees}
    return {key: value.half() for key, value in basis.items()} if amp else basis
