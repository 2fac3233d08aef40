"""The kernels' arithmetic, indices and synchronisation without a GPU: csrc/*.cu compiled for the CPU, where
cuda_host.h plays blocks, barriers, asynchronous copies and tensor cores. Errors are measured against float64 and may
be twice those of the plain half-precision form."""

from __future__ import annotations

import ctypes
from pathlib import Path

import pytest
import torch

from fastspeech.cuda import launches, native, reference, torch_ops

HERE = Path(__file__).parent
SOURCES = HERE.parent / "csrc"
HALF, BFLOAT, FLOAT = torch.float16, torch.bfloat16, torch.float32


def normal(*shape: int, dtype: torch.dtype, seed: int = 0, scale: float = 1.0) -> torch.Tensor:
    return (scale * torch.randn(shape, generator=torch.Generator().manual_seed(seed))).to(dtype)


def wide(value):
    if isinstance(value, torch.Tensor):
        return value.double() if value.is_floating_point() else value
    return [wide(item) for item in value] if isinstance(value, list) else value


def check(host: native.Library, name: str, *arguments, lengths: torch.Tensor | None = None) -> torch.Tensor:
    """The kernel's result, no further from float64 than twice the plain form is, and 0 beyond the lengths."""
    plain = getattr(reference, name)
    exact, half = plain(*[wide(value) for value in arguments]), plain(*arguments)
    with torch_ops.host_library(host):
        found = getattr(torch.ops.fastspeech, name)(*arguments)
    first = (lambda y: y[0]) if isinstance(found, (tuple, list)) else (lambda y: y)
    exact, half, result = first(exact), first(half), first(found)
    assert result.shape == exact.shape and result.dtype == half.dtype and torch.isfinite(result).all()
    error, allowed = (result.double() - exact).abs().max(), (half.double() - exact).abs().max()
    floor = 1e-5 if half.dtype == FLOAT else 1e-4
    assert error <= 2 * allowed + floor * exact.abs().max(), (name, float(error), float(allowed))
    if lengths is not None:
        for row, length in enumerate(lengths.tolist()):
            assert (result[row, length:] == 0).all()
    return found


@pytest.mark.parametrize("dtype", [FLOAT, HALF, BFLOAT])
@pytest.mark.parametrize("symbols, channels, size", [(5, 16, 40), (1, 6, 3), (300, 24, 70), (513, 8, 900)])
@pytest.mark.parametrize("positions", [False, True])
def test_length_regulation(host, dtype, symbols, channels, size, positions):
    x = normal(3, symbols, channels, dtype=dtype)
    durations = torch.randint(-1, 5, (3, symbols), generator=torch.Generator().manual_seed(1), dtype=torch.int32)
    durations[1] = 0
    for least in (0, 1):
        expanded, lengths = check(host, "regulate", x, durations, size, least, positions)
        counts = durations.clamp(min=0)
        counts[:, 0] = torch.where(counts.sum(1) == 0, least, counts[:, 0])
        assert lengths.tolist() == counts.sum(1).clamp(max=size).tolist() and lengths.dtype == torch.int32
        for row in range(3):
            assert (expanded[row, lengths[row] :] == 0).all()
            if not positions:
                whole = x[row].repeat_interleave(counts[row], 0)[:size]
                assert torch.equal(expanded[row, : len(whole)], whole)


def test_sums_beyond_an_int_and_durations_beyond_the_end(host):
    x = normal(2, 300, 8, dtype=HALF)
    durations = torch.full((2, 300), 2**30, dtype=torch.int32)
    durations[0, 0], durations[1, :299] = 3, 0
    durations[1, 7], durations[1, 290] = 1, 2**31 - 1
    expanded, lengths = check(host, "regulate", x, durations, 40, 0, False)
    assert lengths.tolist() == [40, 40]
    assert torch.equal(expanded[0], x[0, [0] * 3 + [1] * 37]) and torch.equal(expanded[1], x[1, [7] + [290] * 39])


@pytest.mark.parametrize("name", ["residual_norm", "attention64", "convolution"])
def test_views_may_begin_anywhere(host, monkeypatch, name):
    """Vectors of 16 bytes are loaded from where a tensor begins, which a view need not have at a multiple of 16."""
    x = normal(1 + 5 * 192, dtype=HALF)[1:].view(1, 5, 192)
    gain, weight = normal(193, dtype=HALF)[1:], normal(1 + 8 * 192, dtype=HALF, scale=0.1)[1:].view(8, 1, 192)
    seen, real = [], torch_ops.address
    monkeypatch.setattr(torch_ops, "address", lambda y: seen.append(real(y)) or real(y))
    arguments = {
        "residual_norm": (x, gain, x, gain, gain, None, 1e-5),
        "attention64": (x, None, 1),
        "convolution": (x, weight, None, None, False),
    }[name]
    assert x.data_ptr() % 16
    check(host, name, *arguments)
    assert seen and all(place is None or place % 16 == 0 for place in seen)


def test_frames_of_half_precision_are_counted_exactly(host):
    x = torch.arange(600).half()[None, :, None].expand(1, 600, 8).contiguous()
    with torch_ops.host_library(host):
        expanded, lengths = torch_ops.regulate(x, torch.full((1, 600), 7), 4300)
    assert lengths.tolist() == [4200]
    assert torch.equal(expanded[0, :4200], x[0].repeat_interleave(7, 0)) and (expanded[0, 4200:] == 0).all()


@pytest.mark.parametrize("dtype", [FLOAT, HALF, BFLOAT])
@pytest.mark.parametrize("length, channels", [(9, 16), (33, 10), (1, 6)])
def test_positions(host, dtype, length, channels):
    lengths = torch.tensor([length, 0, max(length - 4, 1)], dtype=torch.int32)
    check(host, "add_positions", normal(3, length, channels, dtype=dtype), lengths, lengths=lengths)
    symbols = torch.randint(-1, 12, (3, length), generator=torch.Generator().manual_seed(2), dtype=torch.int32)
    check(host, "embed", normal(11, channels, dtype=dtype), symbols, lengths, lengths=lengths)
    check(host, "embed", normal(11, channels, dtype=dtype), symbols, None)


@pytest.mark.parametrize("dtype", [FLOAT, HALF, BFLOAT])
@pytest.mark.parametrize("channels", [1, 40, 384, 390, 520])
def test_residual_norm(host, dtype, channels):
    x, residual = normal(2, 5, channels, dtype=dtype), normal(2, 5, channels, dtype=dtype, seed=1)
    bias, gain, shift = (normal(channels, dtype=dtype, seed=seed) for seed in (2, 3, 4))
    lengths = torch.tensor([5, 3], dtype=torch.int32)
    check(host, "residual_norm", x, bias, residual, gain, shift, lengths, 1e-5, lengths=lengths)
    check(host, "residual_norm", x, None, None, gain, shift, None, 1e-5)


@pytest.mark.parametrize("dtype", [HALF, FLOAT])
def test_a_norm_of_values_far_from_zero_keeps_its_digits(host, dtype):
    x = 300 + normal(1, 4, 384, dtype=FLOAT)  # E[x^2] - mean^2 of these loses all digits in half precision
    ones = torch.ones(384, dtype=dtype)
    check(host, "residual_norm", x.to(dtype), None, None, ones, 0 * ones, None, 1e-5)


@pytest.mark.parametrize("dtype", [HALF, BFLOAT])
@pytest.mark.parametrize("many", [False, True])
@pytest.mark.parametrize("batch, length, heads", [(3, 75, 2), (1, 16, 1), (2, 1, 3), (1, 130, 1)])
def test_attention(host, monkeypatch, dtype, many, batch, length, heads):
    monkeypatch.setattr(launches, "attention_many", lambda *sizes: many)
    lengths = torch.tensor([length, max(length - 20, 1), 0][:batch], dtype=torch.int32)
    qkv = normal(batch, length, heads * 192, dtype=dtype, scale=1.5)
    qkv[1:, int(lengths[1]) if batch > 1 else length :] = float("nan")  # padding is never read
    check(host, "attention64", qkv, lengths, heads, lengths=lengths)


@pytest.mark.parametrize("dtype", [HALF, BFLOAT])
@pytest.mark.parametrize("tile", [0, 1, 2, 3, 4])
@pytest.mark.parametrize("taps, inputs, outputs, length", [(3, 72, 80, 37), (1, 128, 72, 70), (3, 200, 136, 1)])
def test_convolution(host, monkeypatch, dtype, tile, taps, inputs, outputs, length):
    monkeypatch.setattr(launches, "plan_convolution", lambda *sizes: launches.Plan(tile))
    lengths = torch.tensor([max(length - 3, 1), length, 0], dtype=torch.int32)
    x = normal(3, length, inputs, dtype=dtype)
    for row in range(3):
        x[row, lengths[row] :] = float("nan")  # padding is never read
    weight, bias = normal(outputs, taps, inputs, dtype=dtype, seed=1, scale=0.1), normal(outputs, dtype=dtype, seed=2)
    for relu in (False, True):
        check(host, "convolution", x, weight, bias, lengths, relu, lengths=lengths)


@pytest.mark.parametrize("dtype", [HALF, BFLOAT])
@pytest.mark.parametrize("tile, splits", [(0, 1), (0, 3), (1, 2), (2, 1), (3, 3), (4, 1)])
@pytest.mark.parametrize("taps, inputs, outputs, length", [(3, 136, 88, 37), (1, 64, 200, 5), (1, 64, 520, 9)])
def test_convolution_with_norm(host, monkeypatch, dtype, tile, splits, taps, inputs, outputs, length):
    monkeypatch.setattr(launches, "plan_convolution", lambda *sizes: launches.Plan(tile, splits))
    lengths = torch.tensor([length, max(length - 3, 1), 0], dtype=torch.int32)
    x, residual = normal(3, length, inputs, dtype=dtype), normal(3, length, outputs, dtype=dtype, seed=5)
    weight = normal(outputs, taps, inputs, dtype=dtype, seed=1, scale=0.1)
    bias, gain, shift = (normal(outputs, dtype=dtype, seed=seed) for seed in (2, 3, 4))
    check(host, "convolution_norm", x, weight, bias, residual, gain, shift, lengths, False, 1e-5, lengths=lengths)
    check(host, "convolution_norm", x, weight, None, None, gain, shift, None, True, 1e-5)


def test_counters_come_back_as_zeros(host):
    arrived = torch.zeros(launches.tickets(2, 70), dtype=torch.int32)
    x, weight = normal(2, 70, 64, dtype=HALF), normal(72, 3, 64, dtype=HALF, scale=0.1)
    gain = torch.ones(72, dtype=HALF)
    with torch_ops.host_library(host):
        results = [
            torch_ops.convolution_norm(
                x, weight, None, None, gain, gain, None, arrived=arrived, plan=launches.Plan(0, 3)
            )
            for _ in range(2)
        ]
    assert torch.equal(*results) and not arrived.any()


def predictor(inputs: int, hidden: int, dtype: torch.dtype) -> list[torch.Tensor]:
    shapes = [
        (hidden, 3, inputs),
        (hidden,),
        (hidden,),
        (hidden,),
        (hidden, 3, hidden),
        (hidden,),
        (hidden,),
        (hidden,),
    ]
    weights = [
        normal(*shape, dtype=dtype, seed=seed, scale=0.1) for seed, shape in enumerate([*shapes, (hidden,), (1,)])
    ]
    weights[2], weights[6] = weights[2] + 1, weights[6] + 1
    weights[9] = weights[9] + 1.2
    return weights


@pytest.mark.parametrize("dtype", [HALF, BFLOAT])
@pytest.mark.parametrize("inputs, hidden, symbols", [(64, 128, 31), (96, 256, 3), (32, 128, 14)])
def test_duration_predictor(host, dtype, inputs, hidden, symbols):
    lengths = torch.tensor([symbols, max(symbols - 15, 1), 0], dtype=torch.int32)
    x, weights = normal(3, symbols, inputs, dtype=dtype), predictor(inputs, hidden, dtype)
    logs, durations = check(host, "predict_durations", x, weights, lengths, None, None, None, 1e-5, lengths=lengths)
    assert durations.sum() > symbols
    assert torch.equal(durations, torch.floor((logs.exp() - 1).clamp(0, 1024) + 0.5).int())
    speed, emphasis = torch.tensor([2.0, 1.0, 0.5]), 1 + normal(3, symbols, dtype=FLOAT).abs()
    pauses = torch.randint(0, 3, (3, symbols), dtype=torch.int32, generator=torch.Generator().manual_seed(1))
    controls = (speed, emphasis, pauses)
    pauses[0, 0] = -2000  # takes away what there is
    changed = check(host, "predict_durations", x, weights, lengths, *controls, 1e-5, lengths=lengths)[1]
    frames = torch.floor((logs.exp() - 1).clamp(0, 1024) * emphasis / speed[:, None] + 0.5).int() + pauses
    assert frames[0, 0] < 0 and changed[0, 0] == 0
    frames = frames.clamp(min=0)
    there = torch.arange(symbols) < lengths[:, None]
    assert torch.equal(changed, torch.where(there, frames, 0))


def test_nothing_depends_on_the_order_of_threads_and_blocks(host):
    """Barriers that are missing would let a thread read what another one has not written yet, or has overwritten; and
    parts of a sum are added in one order, whichever block arrives last."""
    x, lengths = normal(2, 70, 192, dtype=HALF), torch.tensor([70, 33], dtype=torch.int32)
    durations = torch.randint(0, 4, (2, 70), generator=torch.Generator().manual_seed(1), dtype=torch.int32)
    weight, gain = normal(72, 3, 192, dtype=HALF, scale=0.1), normal(72, dtype=HALF, seed=1)

    def everything() -> list[torch.Tensor]:
        results = [*torch_ops.regulate(x, durations, 150), torch_ops.attention64(x, lengths, 1)]
        for plan in (launches.Plan(0, 3), launches.Plan(1, 2), launches.Plan(2, 1)):
            results.append(torch_ops.convolution_norm(x, weight, gain, None, gain, gain, lengths, plan=plan))
        return [*results, *torch_ops.predict_durations(x, predictor(192, 128, HALF), lengths)]

    turn_round = ctypes.CDLL(str(host.path)).host_turn_round
    with torch_ops.host_library(host):
        forwards = everything()
        turn_round(1)
        try:
            backwards = everything()
        finally:
            turn_round(0)
    assert len(forwards) == 8 and all(map(torch.equal, forwards, backwards))


def test_sizes_that_kernels_do_not_take_are_refused(host):
    with pytest.raises(ValueError, match="does not take"):
        host.launch("residual_norm", *[None] * 7, 1, 1, 4096, 1e-5, 1, None)
    with pytest.raises(ValueError, match="does not take"):
        host.launch("residual_norm", *[None] * 7, 2**16, 2**16, 8, 1e-5, 1, None)
    with pytest.raises(ValueError, match="does not take"):
        host.launch("length_regulation", *[None] * 4, 1, 1, 8, 2**30, 0, 0, 1, None)
    for inputs, outputs, splits, mode in ((12, 16, 1, 0), (8, 2**23, 1, 0), (8, 16, 2**17, launches.NORM)):
        with pytest.raises(ValueError, match="does not take"):
            host.launch("convolution", *[None] * 10, 1, 1, inputs, outputs, 3, mode, 0.0, 0, splits, 1, None)
