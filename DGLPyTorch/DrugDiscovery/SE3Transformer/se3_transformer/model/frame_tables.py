"""Index tables of convolution in edge frames (``model.frames``): where each number lies, for any fibers.

In an edge's frame only components of one |m| meet, so features are kept by component: the rows of a (rows, E) matrix
hold, for m = 0, +1, -1, +2, -2 ..., all channels of the degrees >= |m|, in order of degrees. Rows that no kernel reads
or writes do not exist.

The numbers a and b of each pair of channels follow from the radial profile's paths: row r of the weights in frames is
``sum over k of coefficients[r, k] * weights[index[r, k]]``; row (block, input row, a or b, output row) of a block m.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from .fiber import Fiber, degree_to_dim
from .frames import path_to_frame
from .radial import Pair, RadialProfile, list_pairs

Columns = tuple[tuple[int, tuple[int, ...]], ...]  # per degree, the column of every channel's first component


class Layout:
    """Rows of a fiber's components with |m| <= reach."""

    def __init__(self, fiber: Fiber, reach: int):
        self.fiber, self.reach = fiber, min(reach, fiber.max_degree)
        self.first: dict[tuple[int, int], int] = {}  # (degree, m) -> row of its first channel
        row = 0
        for order in range(self.reach + 1):
            for m in (0,) if order == 0 else (order, -order):
                for degree, channels in fiber:
                    if degree >= order:
                        self.first[degree, m] = row
                        row += channels
        self.rows = row

    def start(self, m: int, degrees: list[int]) -> int:
        """The row where component m of these consecutive degrees begins."""
        return self.first[next(degree for degree in degrees if degree >= abs(m)), m]

    def count(self, m: int, degrees: list[int]) -> int:
        """Channels of these degrees that have a component m."""
        return sum(self.fiber[degree] for degree in degrees if degree >= abs(m))

    def row_map(self, degree: int) -> list[int]:
        """Rows of the components m = -degree ... degree of a degree's first channel, -1 where there are none."""
        return [self.first.get((degree, m), -1) for m in range(-degree, degree + 1)]


@dataclass(frozen=True)
class Block:
    """One |m| of a trunk's kernels: ``inputs`` rows from ``x_plus`` (and ``x_minus``) lead to ``outputs`` rows.

    Its weights are rows ``weight`` ... of the trunk's, in the order (input, a and b, output); only a for m = 0.
    """

    m: int
    x_plus: int
    x_minus: int
    inputs: int
    y_plus: int
    y_minus: int
    outputs: int
    weight: int


@dataclass
class TrunkPlan:
    """The kernels that share a trunk: blocks, and the tables that make their weights."""

    trunk: int
    group: int  # the output group that the result is added to
    blocks: list[Block]
    index: Tensor
    coefficients: Tensor

    @functools.cached_property
    def numbers(self) -> list[int]:
        """The blocks as the operators take them."""
        return [number for block in self.blocks for number in vars(block).values()]

    @functools.cached_property
    def rows(self) -> int:
        """Rows of the result."""
        return sum(block.outputs * (2 if block.m else 1) for block in self.blocks)


@dataclass
class Plan:
    """Everything about a convolution's fibers and sharing. ``groups``: layouts of disjoint sets of output degrees.

    ``index_back``, ``coefficients_back``: the transposed tables, over the weights of all trunks one after the other.
    """

    inputs: Layout
    groups: list[Layout]
    trunks: list[TrunkPlan]
    index_back: Tensor
    coefficients_back: Tensor

    def weight_tables(self, exact: bool) -> tuple[Tensor, ...]:
        """(index, coefficients) over all trunks and the transposed pair; coefficients are float64 if ``exact``."""
        widest = max(trunk.index.shape[1] for trunk in self.trunks)
        padding = [(0, widest - trunk.index.shape[1]) for trunk in self.trunks]
        index = torch.cat([F.pad(trunk.index, pad) for trunk, pad in zip(self.trunks, padding, strict=True)])
        coefficients = torch.cat(
            [F.pad(trunk.coefficients, pad) for trunk, pad in zip(self.trunks, padding, strict=True)]
        )
        dtype = torch.float64 if exact else torch.float32
        return index, coefficients.to(dtype), self.index_back, self.coefficients_back.to(dtype)

    def output_rows(self) -> tuple[int, ...]:
        """Rows of every output degree's components where the groups' results follow one another."""
        before, found = 0, []
        for number, layout in enumerate(self.groups):
            reach = max(trunk.rows for trunk in self.trunks if trunk.group == number)
            for degree in layout.fiber.degrees:
                found += [row + before if 0 <= row < reach else -1 for row in layout.row_map(degree)]
            before += reach
        return tuple(found)

    def input_rows(self) -> tuple[int, ...]:
        """Rows of every input degree's components."""
        return tuple(row for degree in self.inputs.fiber.degrees for row in self.inputs.row_map(degree))


class Packing:
    """How features lie in packed rows: ``columns`` of each channel's first component, ``rows`` in the frames' matrix.

    ``order`` (width,) brings components of degree after degree into the packed order.
    """

    def __init__(self, columns: Columns, rows: tuple[int, ...], device: torch.device):
        first = [column for _, places in columns for column in places]
        every = [place + k for degree, places in columns for place in places for k in range(2 * degree + 1)]
        self.columns = torch.tensor(first, dtype=torch.int32).to(device)
        self.order = torch.tensor(every, dtype=torch.int64).argsort().to(device)
        self.rows = torch.tensor(rows, dtype=torch.int32).to(device)
        self.spec = [number for degree, places in columns for number in (degree, len(places))]
        self.width = len(every)


class FrameTables:
    """The plan of a convolution with all its tables on a device. ``columns``: where messages are packed."""

    def __init__(self, plan: Plan, columns: Columns, device: torch.device, exact: bool):
        with torch.inference_mode(False):
            self.plan = plan
            self.weights = tuple(table.to(device) for table in self.plan.weight_tables(exact))
            inputs = self.plan.inputs.fiber
            self.inputs = Packing(plain_columns(inputs), self.plan.input_rows(), device)
            self.outputs = Packing(columns, self.plan.output_rows(), device)
        self.trunks = [(t.trunk, t.group, len(t.index), t.numbers, t.rows) for t in self.plan.trunks]
        self.input_rows, self.input_degrees = self.plan.inputs.rows, inputs.degrees

    def __deepcopy__(self, memo: dict) -> FrameTables:
        return self  # constants: copies of a model share them


@functools.cache
def make_tables(
    fiber_in: Fiber, fiber_out: Fiber, sharing: str, columns: Columns, device: torch.device, exact: bool
) -> FrameTables:
    """Made once for each kind of convolution and device."""
    return FrameTables(make_plan(fiber_in, fiber_out, sharing), columns, device, exact)


def plan_of(radial: RadialProfile) -> Plan:
    """The plan of a radial profile's pairs."""
    return make_plan(radial.fiber_in, radial.fiber_out, radial.sharing)


@functools.cache
@torch.inference_mode(False)
def make_plan(fiber_in: Fiber, fiber_out: Fiber, sharing: str) -> Plan:
    """Made once for each kind of convolution."""
    pairs = list_pairs(fiber_in, fiber_out, sharing)
    inputs = Layout(fiber_in, fiber_out.max_degree)
    split = sharing in ("output", "pair")
    sets = [Fiber([element]) for element in fiber_out] if split else [fiber_out]
    groups = [Layout(fiber, fiber_in.max_degree) for fiber in sets]
    trunks, triplets, offset = [], [], 0
    for trunk in range(1 + max(pair.trunk for pair in pairs)):
        mine = [pair for pair in pairs if pair.trunk == trunk]
        degrees_in = sorted({pair.degree_in for pair in mine})
        degrees_out = sorted({pair.degree_out for pair in mine})
        group = next(k for k, layout in enumerate(groups) if set(degrees_out) <= set(layout.fiber.degrees))
        blocks, rows, columns, values, size = _blocks(mine, inputs, groups[group], degrees_in, degrees_out)
        index, coefficients = _table(rows, columns, values, size)
        trunks.append(TrunkPlan(trunk, group, blocks, index, coefficients))
        triplets.append((rows + offset, columns, values))
        offset += size
    rows, columns, values = (np.concatenate(parts) for parts in zip(*triplets, strict=True))
    back = _table(columns, rows, values, pairs[-1].rows.stop)
    return Plan(inputs, groups, trunks, *back)


def _blocks(pairs: list[Pair], inputs: Layout, outputs: Layout, degrees_in: list[int], degrees_out: list[int]):
    """The blocks of a trunk, and its table as triplets (row, row of the radial weights, coefficient)."""
    by_degrees = {(pair.degree_in, pair.degree_out): pair for pair in pairs}
    blocks, parts, size = [], [], 0
    for m in range(min(degrees_in[-1], degrees_out[-1]) + 1):
        width = 2 if m else 1
        block = Block(
            m, inputs.start(m, degrees_in), inputs.start(-m, degrees_in), inputs.count(m, degrees_in),
            outputs.start(m, degrees_out), outputs.start(-m, degrees_out), outputs.count(m, degrees_out), size,
        )  # fmt: skip
        blocks.append(block)
        first_in = 0
        for i in (degree for degree in degrees_in if degree >= m):
            first_out = 0
            for o in (degree for degree in degrees_out if degree >= m):
                pair = by_degrees[i, o]
                matrix = path_to_frame(i, o).numpy()
                c_in, c_out = np.arange(pair.channels_in)[:, None], np.arange(pair.channels_out)[None]
                for which in range(width):
                    numbers = matrix[2 * m - 1 + which if m else 0]
                    target = block.weight + ((first_in + c_in) * width + which) * block.outputs + first_out + c_out
                    for path in np.flatnonzero(np.abs(numbers) > 1e-12):
                        source = pair.start + (c_out * pair.channels_in + c_in) * pair.paths + path
                        parts.append((target.ravel(), source.ravel(), np.full(target.size, numbers[path])))
                first_out += pair.channels_out
            first_in += pair.channels_in
        size += block.inputs * width * block.outputs
    rows, columns, values = (np.concatenate(column) for column in zip(*parts, strict=True))
    return blocks, rows, columns, values, size


def _table(rows: np.ndarray, columns: np.ndarray, values: np.ndarray, size: int) -> tuple[Tensor, Tensor]:
    """Triplets as (size, K) tables of columns (int32) and values (float64), padded with column 0 and value 0."""
    order = np.argsort(rows, kind="stable")
    rows, columns, values = rows[order], columns[order], values[order]
    counts = np.bincount(rows, minlength=size)
    place = np.arange(len(rows)) - np.repeat(np.cumsum(counts) - counts, counts)
    index = np.zeros((size, max(1, int(counts.max(initial=0)))), np.int32)
    coefficients = np.zeros(index.shape, np.float64)
    index[rows, place], coefficients[rows, place] = columns, values
    return torch.from_numpy(index), torch.from_numpy(coefficients)


# Columns of packed messages


@functools.cache
def plain_columns(fiber: Fiber) -> Columns:
    """Degrees one after the other, channels one after the other."""
    found, start = [], 0
    for degree, channels in fiber:
        dim = degree_to_dim(degree)
        found.append((degree, tuple(start + channel * dim for channel in range(channels))))
        start += channels * dim
    return tuple(found)


@functools.cache
def head_columns(value_fiber: Fiber, key_fiber: Fiber, num_heads: int) -> Columns:
    """[values | keys], each with heads outermost, for the channels (values, then keys) of each degree."""
    width = value_fiber.num_features
    columns: dict[int, list[int]] = {degree: [] for degree in value_fiber.degrees}
    for fiber, base in ((value_fiber, 0), (key_fiber, width)):
        per_head, inside = fiber.num_features // num_heads, 0
        for degree, channels in fiber:
            dim, share = degree_to_dim(degree), channels // num_heads
            for channel in range(channels):
                head, place = divmod(channel, share)
                columns[degree].append(base + head * per_head + inside + place * dim)
            inside += share * dim
    return tuple((degree, tuple(places)) for degree, places in sorted(columns.items()))
