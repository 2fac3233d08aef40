"""Edge frames: the same kernels as ``basis``, seen from a frame whose y axis lies along the edge.

A kernel that commutes with rotations, along the axis y, only couples components of the same |m|. With D_l(e) the
rotation that turns edge e onto y, the map from degree i to o is D_o^T K D_i, where K has one number for m = 0 and two
(a, b) for each m = 1 ... min(i, o):

    y_+m = a x_+m - b x_-m        y_-m = a x_-m + b x_+m

So 2 min(i, o) + 1 numbers per pair of channels take the place of the paths J, which they follow from by a constant
matrix (``path_to_frame``), and a dense (2 i + 1) x F x (2 o + 1) basis per edge is never needed. The idea is that of
Passaro and Zitnick, Reducing SO(3) convolutions to SO(2), arXiv:2302.03655; here it is an identity between equal
results, not another model.
"""

from __future__ import annotations

import functools
import math

import torch
from torch import Tensor

from .basis import pair_basis, spherical_harmonics, unit_vectors, wigner_3j
from .fiber import degree_to_dim


def rotation_to_axis(vectors: Tensor) -> Tensor:
    """(E, 3, 3) rotations R with R v = |v| y. The smallest one for v_y >= 0, else after half a turn about x.

    Both charts are smooth and far from their singular points. The zero vector gets the identity.
    """
    v = unit_vectors(vectors)
    sign = torch.where(v[..., 1:2] < 0, -1.0, 1.0).to(v.dtype)
    turn = torch.cat([torch.ones_like(sign), sign, sign], -1)  # diag(1, -1, -1) or the identity
    x, y, z = (v * turn).unbind(-1)
    zero = torch.zeros_like(x)
    # w = v x (0, 1, 0) = (-z, 0, x), R = 1 + [w] + [w]^2 / (1 + y)
    skew = torch.stack([zero, -x, zero, x, zero, z, zero, -z, zero], -1).unflatten(-1, (3, 3))
    identity = torch.eye(3, dtype=v.dtype, device=v.device)
    rotation = identity + skew + skew @ skew / (1 + y)[..., None, None]
    return rotation * turn[..., None, :]


@functools.cache
@torch.inference_mode(False)
def _step_up(degree: int, device: str, dtype: torch.dtype) -> Tensor:
    return (wigner_3j(1, degree - 1, degree) * math.sqrt(degree_to_dim(degree))).to(device, dtype)


def wigner_matrices(rotation: Tensor, max_degree: int) -> list[Tensor]:
    """D_0 ... D_max of rotations (E, 3, 3), each (E, 2 l + 1, 2 l + 1), with Y_l(R v) = D_l Y_l(v)."""
    matrices = [torch.ones_like(rotation[..., :1, :1])]
    if max_degree >= 1:
        matrices.append(rotation)
    for degree in range(2, max_degree + 1):
        step = _step_up(degree, str(rotation.device), rotation.dtype)
        half = torch.einsum("abm,epa->epbm", step, rotation.mT)  # contract D_1[a, p] with a
        whole = torch.einsum("epbm,ebq->epqm", half, matrices[-1])
        matrices.append(torch.einsum("epqm,pqn->emn", whole, step))
    return matrices


@functools.cache
@torch.inference_mode(False)
def path_to_frame(degree_in: int, degree_out: int) -> Tensor:
    """(2 min(in, out) + 1, F) float64: rows a_0, a_1, b_1, a_2, b_2 ... as sums over the paths J."""
    axis = torch.tensor([[0.0, 1.0, 0.0]], dtype=torch.float64)
    kernel = pair_basis(degree_in, degree_out, spherical_harmonics(degree_in + degree_out, axis))[0]
    rows = [kernel[degree_in, :, degree_out]]
    for m in range(1, min(degree_in, degree_out) + 1):
        rows.append(kernel[degree_in + m, :, degree_out + m])
        rows.append(kernel[degree_in + m, :, degree_out - m])
    return torch.stack(rows)
