"""Radial profiles: from an edge's invariants to the weights of its kernel.

Two hidden layers (the trunk) and a linear layer that gives, for every pair of degrees, one number per output channel,
input channel and path. Pairs may share one trunk or have their own (``sharing``): published weights exist for each.

E edges, T trunks, H hidden width.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ..convert import SHARING
from .fiber import Fiber, degree_to_dim


class Pair(NamedTuple):
    """A pair of degrees with its rows [start, start + C_out * C_in * paths) of the last layer's matrix."""

    degree_in: int
    degree_out: int
    channels_in: int
    channels_out: int
    paths: int
    trunk: int
    start: int

    @property
    def rows(self) -> slice:
        """Rows in the order (channel out, channel in, path)."""
        return slice(self.start, self.start + self.channels_out * self.channels_in * self.paths)


def list_pairs(fiber_in: Fiber, fiber_out: Fiber, sharing: str = "all") -> list[Pair]:
    """All pairs, output degrees outermost."""
    if sharing not in SHARING:
        raise ValueError(f"radial sharing must be one of {', '.join(SHARING)}, got {sharing!r}")
    pairs, start = [], 0
    for place_out, (degree_out, channels_out) in enumerate(fiber_out):
        for place_in, (degree_in, channels_in) in enumerate(fiber_in):
            trunk = {"all": 0, "output": place_out, "input": place_in, "pair": len(pairs)}[sharing]
            pair = Pair(
                degree_in,
                degree_out,
                channels_in,
                channels_out,
                degree_to_dim(min(degree_in, degree_out)),
                trunk,
                start,
            )
            pairs.append(pair)
            start = pair.rows.stop
    return pairs


class PairWeights(nn.Module):
    """The last layer's matrix, (sum over pairs of C_out * C_in * paths, H); see ``Pair.rows``. It has no bias."""

    def __init__(self, rows: int, width: int):
        super().__init__()
        self.pairs = nn.Parameter(torch.empty(rows, width).uniform_(-1, 1) / math.sqrt(width))


class Trunks(nn.Module):
    """A linear layer of every trunk; trunk t owns rows t * H ... (t + 1) * H - 1."""

    def __init__(self, trunks: int, width_in: int, width: int):
        super().__init__()
        bound = 1 / math.sqrt(width_in)
        self.weight = nn.Parameter(torch.empty(trunks * width, width_in).uniform_(-bound, bound))
        self.bias = nn.Parameter(torch.empty(trunks * width).uniform_(-bound, bound))


class TrunkNorm(nn.Module):
    """Gain and offset of a layer norm over each trunk's H values."""

    def __init__(self, trunks: int, width: int):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(trunks * width))
        self.bias = nn.Parameter(torch.zeros(trunks * width))


class RadialProfile(nn.Module):
    """(E, edge_dim) invariants -> (E, T, H), and the matrix ``weights`` (rows, H) that the kernels come from.

    Children are numbered as in the reference package's sequence (linear, norm, relu, linear, norm, relu, linear), with
    the numbers closed up where there is no layer norm.
    """

    def __init__(
        self, fiber_in: Fiber, fiber_out: Fiber, edge_dim: int, mid_dim: int = 32, use_layer_norm: bool = False,
        sharing: str = "all",
    ):  # fmt: skip
        super().__init__()
        self.fiber_in, self.fiber_out, self.edge_dim, self.mid_dim = fiber_in, fiber_out, edge_dim, mid_dim
        self.use_layer_norm = use_layer_norm
        self.net = nn.ModuleDict()
        self.register_buffer("sharing_code", torch.zeros((), dtype=torch.int64))  # so that it travels with the weights
        self._build(sharing)

    def _build(self, sharing: str) -> None:
        self.sharing = sharing
        self.sharing_code.fill_(SHARING.index(sharing) if sharing in SHARING else 0)
        self.pairs = list_pairs(self.fiber_in, self.fiber_out, sharing)
        self.trunks = 1 + max((pair.trunk for pair in self.pairs), default=0)
        names = self.names
        self.net[names["first"]] = Trunks(self.trunks, self.edge_dim, self.mid_dim)
        self.net[names["second"]] = Trunks(self.trunks, self.mid_dim, self.mid_dim)
        if self.use_layer_norm:
            self.net[names["first_norm"]] = TrunkNorm(self.trunks, self.mid_dim)
            self.net[names["second_norm"]] = TrunkNorm(self.trunks, self.mid_dim)
        self.net[names["last"]] = PairWeights(self.pairs[-1].rows.stop if self.pairs else 0, self.mid_dim)

    @property
    def names(self) -> dict[str, str]:
        """The number of each layer."""
        if self.use_layer_norm:
            return {"first": "0", "first_norm": "1", "second": "3", "second_norm": "4", "last": "6"}
        return {"first": "0", "second": "2", "last": "4"}

    def set_sharing(self, sharing: str) -> None:
        """Give other pairs the same trunk. New parameters: do it before an optimiser holds the old ones."""
        if sharing != self.sharing:
            like = self.weights
            self._build(sharing)
            self.net.to(like.device, like.dtype)

    @property
    def weights(self) -> Tensor:
        """(rows, H)."""
        return self.net[self.names["last"]].pairs

    def _norm(self, hidden: Tensor, name: str) -> Tensor:
        if not self.use_layer_norm:
            return hidden.relu()
        norm = self.net[self.names[name]]
        shape = (self.trunks, self.mid_dim)
        if self.trunks == 1:
            return F.layer_norm(hidden, shape[1:], norm.weight, norm.bias).relu()
        return (F.layer_norm(hidden, shape[1:]) * norm.weight.view(shape) + norm.bias.view(shape)).relu()

    def forward(self, invariants: Tensor) -> Tensor:
        shape = (self.trunks, self.mid_dim)
        first, second = self.net[self.names["first"]], self.net[self.names["second"]]
        hidden = self._norm(F.linear(invariants, first.weight, first.bias).unflatten(-1, shape), "first_norm")
        if self.trunks == 1:
            hidden = F.linear(hidden, second.weight, second.bias)
        else:
            hidden = torch.einsum("eth,tkh->etk", hidden, second.weight.view(*shape, -1)) + second.bias.view(shape)
        return self._norm(hidden, "second_norm")
