"""How kernels are launched: tiles, splits, grids and shared memory. Numbers only, for every binding.

B batch, L length, C channels. The figures repeat the constants of csrc/*.cu, which a test compares.
"""

from __future__ import annotations

from dataclasses import dataclass

TYPES = {"float32": 0, "float16": 1, "bfloat16": 2}  # DataType of common.cuh
SUFFIXES = {"float32": "f32", "float16": "f16", "bfloat16": "bf16"}
RELU, NORM = 1, 2
LONGEST_FRAMES = 1024  # of one symbol
ROW = 64  # 16-bit values of a row in shared memory
SWIZZLE = 1024  # bytes at whose multiples tiles of warpgroups begin
PROCESSORS = 132  # where nobody says how many the GPU has


@dataclass(frozen=True)
class Tile:
    """A block's rows and columns of the result."""

    name: str
    rows: int
    columns: int
    threads: int
    stages: int
    groups: bool = False  # products of warpgroups, on Hopper

    @property
    def shared(self) -> int:
        return (self.rows + self.columns) * ROW * self.stages * 2 + (SWIZZLE if self.groups else 0)


# `plan_convolution` does not choose the last two, which were no faster: `benchmark --mode stages` measures them, too.
TILES = (
    Tile("small", 32, 64, 128, 5),
    Tile("medium", 64, 64, 128, 4),
    Tile("large", 128, 128, 256, 3),
    Tile("group", 64, 128, 128, 4, True),
    Tile("pair", 128, 128, 256, 3, True),
)


def arch_of(major: int, minor: int) -> str:
    """The architecture that a GPU's kernels are compiled for. Hopper's warpgroups are in sm_90a alone."""
    return "sm_90a" if (major, minor) == (9, 0) else f"sm_{major}{minor}"


@dataclass(frozen=True)
class Plan:
    """Which of TILES, and in how many parts the sum is made (with a norm)."""

    tile: int
    splits: int = 1

    def grid(self, batch: int, length: int, outputs: int) -> tuple[int, int, int]:
        tile = TILES[self.tile]
        return batch * -(-length // tile.rows), -(-outputs // tile.columns), self.splits


def plan_convolution(
    batch: int, length: int, inputs: int, outputs: int, kernel: int, norm: bool, processors: int = PROCESSORS
) -> Plan:
    """The largest tile that still fills the GPU, since it reads least; and with a norm, as many parts of the sum as
    give each processor three blocks, of at least 6 steps each."""
    steps = kernel * -(-inputs // ROW)
    most = max(1, min(steps // 6, 8)) if norm else 1
    for number in (2, 1, 0):
        across, down, _ = Plan(number).grid(batch, length, outputs)
        blocks = across * down
        wanted = processors * (2 if number == 2 else 1)
        if number == 0 or (blocks if number == 2 else blocks * most) >= wanted:
            return Plan(number, max(1, min(most, 3 * processors // blocks)) if number < 2 else 1)
    raise AssertionError("unreachable")


def attention_many(batch: int, length: int, heads: int, processors: int = PROCESSORS) -> bool:
    """Whether blocks of 64 queries are enough to fill the GPU."""
    return batch * heads * -(-length // 64) >= 2 * processors


def tickets(batch: int, length: int) -> int:
    """Counters that a convolution with a norm needs at most."""
    return batch * -(-length // TILES[0].rows)


@dataclass(frozen=True)
class Launch:
    """A kernel of csrc/``source``.cu by its name, as a driver launches it."""

    source: str
    kernel: str
    grid: tuple[int, int, int]
    threads: int
    shared: int = 0


def _whole(channels: int, dtype: str) -> str:
    """What a kernel for channels that 16 bytes do not divide is called after its type."""
    return "" if channels % (4 if dtype == "float32" else 8) == 0 else "_any"


def length_regulation(dtype: str, batch: int, channels: int, size: int) -> Launch:
    name = f"length_regulation_{SUFFIXES[dtype]}{_whole(channels, dtype)}"
    return Launch("length_regulation", name, (-(-size // 16), batch, 1), 256)


def positions(dtype: str, batch: int, length: int, channels: int) -> Launch:
    width = 1 if _whole(channels, dtype) else 4 if dtype == "float32" else 8
    name = f"positions_{SUFFIXES[dtype]}{_whole(channels, dtype)}"
    return Launch("positions", name, (-(-length * (channels // width) // 256), batch, 1), 256)


def attention64(dtype: str, batch: int, length: int, heads: int, many: bool) -> Launch:
    queries = 64 if many else 16
    name = f"attention64_{SUFFIXES[dtype]}_{'many' if many else 'few'}"
    return Launch("attention64", name, (-(-length // queries), heads, batch), 128, (queries + 4 * 64) * ROW * 2)


def convolution(dtype: str, plan: Plan, batch: int, length: int, outputs: int) -> Launch:
    tile = TILES[plan.tile]
    name = f"convolution_{SUFFIXES[dtype]}_{tile.name}"
    return Launch("conv_ff", name, plan.grid(batch, length, outputs), tile.threads, tile.shared)


def duration_predictor(dtype: str, batch: int, symbols: int, inputs: int, hidden: int) -> Launch:
    shared = 18 * (inputs + 8 + hidden + 8) * 2 + 16 * (hidden + 4) * 4
    name = f"duration_predictor_{SUFFIXES[dtype]}_{hidden}"
    return Launch("duration_predictor", name, (-(-symbols // 14), batch, 1), 256, shared)
