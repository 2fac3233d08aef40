"""On a GPU: every kernel at small, odd and full sizes against float64, with every way to launch; the forms of the whole
network; graphs of several sizes. Errors may be twice those of the plain form in the same precision."""

from __future__ import annotations

import importlib.util
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest
import torch

from dlx.speech import fast_vocoder
from dlx.speech.frontend import FrontEnd
from dlx.speech.vocoder import HifiGan
from fastspeech import pretrained, registry
from fastspeech.cuda import engine, launches, reference, torch_ops
from fastspeech.synthesis import Synthesizer
from fastspeech.tensorrt import layers

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")]
HALF, BFLOAT, FLOAT = torch.float16, torch.bfloat16, torch.float32


@pytest.fixture(autouse=True)
def exact_products():
    before = torch.backends.cuda.matmul.allow_tf32, torch.backends.cudnn.allow_tf32
    torch.backends.cuda.matmul.allow_tf32 = torch.backends.cudnn.allow_tf32 = False
    yield
    torch.backends.cuda.matmul.allow_tf32, torch.backends.cudnn.allow_tf32 = before


def normal(*shape: int, dtype: torch.dtype, seed: int = 0, scale: float = 1.0) -> torch.Tensor:
    return (scale * torch.randn(shape, generator=torch.Generator().manual_seed(seed))).to("cuda", dtype)


def ints(*values: int) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.int32, device="cuda")


def wide(value):
    if isinstance(value, torch.Tensor):
        return value.double() if value.is_floating_point() else value
    return [wide(item) for item in value] if isinstance(value, list) else value


def first(value):
    return value[0] if isinstance(value, (tuple, list)) else value


def check(name: str, *arguments, **options):
    """The kernel's result, whose error is at most twice the plain form's; the same again when it runs again."""
    plain = getattr(reference, name)
    exact, half = first(plain(*[wide(value) for value in arguments])), first(plain(*arguments))
    call = getattr(torch_ops, name)
    found = call(*arguments, **options)
    result = first(found)
    assert torch.isfinite(result).all() and result.shape == exact.shape and result.dtype == half.dtype
    error, allowed = (result.double() - exact).abs().max(), (half.double() - exact).abs().max()
    floor = 1e-5 if half.dtype == FLOAT else 1e-4
    assert error <= 2 * allowed + floor * exact.abs().max(), (name, float(error), float(allowed))
    assert torch.equal(first(call(*arguments, **options)), result)
    return found


@pytest.mark.parametrize("dtype", [FLOAT, HALF, BFLOAT])
@pytest.mark.parametrize("batch, symbols, channels, size", [(1, 128, 384, 800), (5, 37, 250, 111), (2, 3000, 8, 9000)])
@pytest.mark.parametrize("positions", [False, True])
def test_length_regulation(dtype, batch, symbols, channels, size, positions):
    generator = torch.Generator().manual_seed(1)
    durations = torch.randint(-1, 12, (batch, symbols), generator=generator, dtype=torch.int32).cuda()
    durations[-1] = 0
    found, lengths = check("regulate", normal(batch, symbols, channels, dtype=dtype), durations, size, 1, positions)
    expected = durations.clamp(min=0).sum(1).clamp(min=1, max=size)
    assert torch.equal(lengths.long(), expected)
    assert all((found[row, length:] == 0).all() for row, length in enumerate(lengths.tolist()))


def test_frames_of_half_precision_are_counted_exactly():
    x = torch.arange(600, device="cuda").half()[None, :, None].expand(1, 600, 384).contiguous()
    found, lengths = torch_ops.regulate(x, torch.full((1, 600), 7, device="cuda"), 4300)
    assert lengths.tolist() == [4200]
    assert torch.equal(found[0, :4200], x[0].repeat_interleave(7, 0)) and (found[0, 4200:] == 0).all()


@pytest.mark.parametrize("dtype", [FLOAT, HALF, BFLOAT])
@pytest.mark.parametrize("length, channels", [(1, 6), (129, 384), (4200, 384), (77, 250)])
def test_positions_and_norm(dtype, length, channels):
    lengths = ints(length, max(length // 2, 1), 0)
    x, residual = normal(3, length, channels, dtype=dtype), normal(3, length, channels, dtype=dtype, seed=1)
    check("add_positions", x, lengths)
    symbols = torch.randint(-1, 150, (3, length), dtype=torch.int32, device="cuda")
    check("embed", normal(148, channels, dtype=dtype), symbols, lengths)
    bias, gain, shift = (normal(channels, dtype=dtype, seed=seed) for seed in (2, 3, 4))
    check("residual_norm", x, bias, residual, gain, shift, lengths, 1e-5)


@pytest.mark.parametrize("dtype", [HALF, BFLOAT])
@pytest.mark.parametrize("many", [False, True])
@pytest.mark.parametrize(
    "batch, length, heads", [(1, 128, 2), (3, 75, 2), (1, 1, 1), (2, 800, 2), (1, 4200, 1), (2, 65, 5)]
)
def test_attention(monkeypatch, dtype, many, batch, length, heads):
    monkeypatch.setattr(launches, "attention_many", lambda *sizes: many)
    lengths = ints(*[length, max(length - 20, 1), 0][:batch])
    qkv = normal(batch, length, heads * 192, dtype=dtype, scale=1.5)
    for row, limit in enumerate(lengths.tolist()):
        qkv[row, limit:] = float("nan")  # padding is never read
    check("attention64", qkv, lengths, heads)


@pytest.mark.parametrize("dtype", [HALF, BFLOAT])
@pytest.mark.parametrize("tile", [0, 1, 2, 3, 4])
@pytest.mark.parametrize(
    "taps, inputs, outputs, length",
    [(3, 384, 1536, 128), (1, 384, 384, 800), (3, 72, 80, 37), (1, 384, 80, 333), (3, 200, 136, 1)],
)
def test_convolution(monkeypatch, dtype, tile, taps, inputs, outputs, length):
    monkeypatch.setattr(launches, "plan_convolution", lambda *sizes: launches.Plan(tile))
    lengths = ints(length, max(length - 3, 1), 0)
    x = normal(3, length, inputs, dtype=dtype)
    for row, limit in enumerate(lengths.tolist()):
        x[row, limit:] = float("nan")
    weight, bias = normal(outputs, taps, inputs, dtype=dtype, seed=1, scale=0.05), normal(outputs, dtype=dtype, seed=2)
    for relu in (False, True):
        check("convolution", x, weight, bias, lengths, relu)


@pytest.mark.parametrize("dtype", [HALF, BFLOAT])
@pytest.mark.parametrize("tile, splits", [(0, 1), (0, 5), (1, 3), (1, 8), (2, 1), (2, 4), (3, 1), (3, 6), (4, 2)])
@pytest.mark.parametrize("taps, inputs, outputs, length", [(3, 1536, 384, 128), (1, 128, 384, 800), (3, 136, 88, 37)])
def test_convolution_with_norm(monkeypatch, dtype, tile, splits, taps, inputs, outputs, length):
    monkeypatch.setattr(launches, "plan_convolution", lambda *sizes: launches.Plan(tile, splits))
    lengths = ints(length, max(length - 3, 1), 0)
    x, residual = normal(3, length, inputs, dtype=dtype), normal(3, length, outputs, dtype=dtype, seed=5)
    weight = normal(outputs, taps, inputs, dtype=dtype, seed=1, scale=0.05)
    bias, gain, shift = (normal(outputs, dtype=dtype, seed=seed) for seed in (2, 3, 4))
    arrived = torch.zeros(launches.tickets(3, length), dtype=torch.int32, device="cuda")
    check("convolution_norm", x, weight, bias, residual, gain, shift, lengths, False, 1e-5, arrived=arrived)
    for _ in range(20):  # blocks arrive in other orders, with the same sum
        torch_ops.convolution_norm(x, weight, bias, residual, gain, shift, lengths, arrived=arrived)
    assert not arrived.any()
    check("convolution_norm", x.nan_to_num(), weight, None, None, gain, shift, None, True, 1e-5)


@pytest.mark.parametrize("dtype", [HALF, BFLOAT])
@pytest.mark.parametrize("inputs, hidden, symbols", [(384, 256, 128), (256, 256, 31), (96, 128, 3), (384, 256, 15)])
def test_duration_predictor(dtype, inputs, hidden, symbols):
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
    shapes += [(hidden,), (1,)]
    weights = [normal(*shape, dtype=dtype, seed=seed, scale=0.1) for seed, shape in enumerate(shapes)]
    weights[9] = weights[9] + 1.2
    lengths = ints(symbols, max(symbols - 15, 1), 0)
    controls = (torch.tensor([2.0, 1.0, 0.5]).cuda(), 1 + torch.rand(3, symbols).cuda(), None)
    logs, frames = check(
        "predict_durations", normal(3, symbols, inputs, dtype=dtype), weights, lengths, *controls, 1e-5
    )
    real = (logs.double().exp() - 1).clamp(0, 1024) * controls[1] / controls[0][:, None] + 0.5
    there = torch.arange(symbols, device="cuda") < lengths[:, None]
    edge = (real - real.round()).abs() < 1e-3  # where exp decides
    assert (torch.where(there, real.clamp(max=1024).floor(), 0) == frames)[~edge].all()


def voice(arch: str, dtype: torch.dtype) -> torch.nn.Module:
    torch.manual_seed(0)
    model = registry.build(arch).eval().requires_grad_(False)
    model.durations.output.bias.fill_(1.9)
    return model.to("cuda", dtype)


def speech(batch: int, longest: int) -> tuple[torch.Tensor, torch.Tensor]:
    lengths = torch.tensor([max(1, longest - 9 * row) for row in range(batch)])
    return torch.randint(1, 148, (batch, longest), generator=torch.Generator().manual_seed(longest)), lengths


@pytest.mark.parametrize("arch", registry.ARCHITECTURES)
@pytest.mark.parametrize("dtype", [HALF, BFLOAT])
@pytest.mark.parametrize("form, library_rows", [("kernels", None), ("kernels", 1), ("graph", None), ("graph", 1)])
def test_forms_agree(arch, dtype, form, library_rows):
    exact, plain = (engine.build(voice(arch, kind), "plain") for kind in (FLOAT, dtype))
    run = engine.build(voice(arch, dtype), form, library_rows=library_rows)
    bounds: dict[str, torch.Tensor] = {}
    for batch, longest in ((1, 128), (4, 50), (32, 100), (1, 3), (4, 50)):
        text, lengths = speech(batch, longest)
        free = run(text, lengths)
        durations = free.durations.clone()
        assert torch.equal(free.mel_lengths, durations.sum(1)) and free.mel.shape[2] == int(durations.sum(1).max())
        found = run(text.cuda(), lengths.cuda(), durations)  # the same frames for all three
        expected, half = (other(text, lengths, durations) for other in (exact, plain))
        assert torch.equal(found.mel_lengths, expected.mel_lengths)
        for name in ("mel", "log_durations"):
            error = (getattr(found, name).double() - getattr(expected, name).double()).abs().max()
            allowed = (getattr(half, name).double() - getattr(expected, name).double()).abs().max()
            # Of few numbers the largest error of either is chance: what the first, long text allows holds for all.
            bound = bounds.setdefault(name, 2 * allowed).maximum(2 * allowed)
            assert error <= bound, (batch, longest, name, float(error), float(allowed))


def test_graphs_of_many_sizes_are_the_kernels():
    model = voice("fastspeech_compact", HALF)
    kernels, graph = engine.build(model, "kernels"), engine.build(model, "graph", keep=2)
    for batch, longest in ((1, 20), (2, 60), (1, 100), (1, 20), (3, 130), (2, 60)):
        text, lengths = speech(batch, longest)
        options = {
            "speed": 1.3,
            "emphasis": torch.rand(batch, longest) + 0.5,
            "pauses": torch.ones(batch, longest).int(),
        }
        for given in ({}, options, {}):
            one, other = kernels(text, lengths, **given), graph(text, lengths, **given)
            for a, b in zip(one, other, strict=True):
                torch.testing.assert_close(a.float(), b.float(), atol=2e-2, rtol=0)
            assert torch.equal(one.durations, other.durations)
    assert len(graph.sizes) == 2


def test_batches_are_filled_up_to_few_sizes():
    model = voice("fastspeech_compact", HALF)
    kernels, graph = engine.build(model, "kernels"), engine.build(model, "graph")
    for batch in (1, 2, 3, 4, 5, 7, 8):
        text, lengths = speech(batch, 60)
        one, other = kernels(text, lengths), graph(text, lengths)
        assert torch.equal(one.durations, other.durations) and one.mel.shape == other.mel.shape
        torch.testing.assert_close(one.mel.float(), other.mel.float(), atol=2e-2, rtol=0)
    assert {key[0] for key in graph.sizes} == {1, 2, 4, 8}


def test_threads_share_a_voice_of_graphs():
    torch.manual_seed(0)
    vocoder = fast_vocoder.optimize(HifiGan().eval().requires_grad_(False).cuda(), HALF)
    found = pretrained.Found(
        voice("fastspeech_compact", FLOAT).cpu(), "fastspeech_compact", vocoder.mel, FrontEnd(), "x"
    )
    synthesizer = Synthesizer(found, vocoder, torch.device("cuda"), HALF, form="graph")
    texts = [f"{'Many words ' * number}are said." for number in range(8)]
    alone = [synthesizer([text])[0] for text in texts]
    with ThreadPoolExecutor(8) as pool:
        for _ in range(4):
            for one, other in zip(pool.map(lambda text: synthesizer([text])[0], texts), alone, strict=True):
                np.testing.assert_array_equal(one.mel, other.mel)
                np.testing.assert_allclose(one.audio, other.audio, atol=1e-3)


def test_the_caller_s_stream_is_used():
    model = voice("fastspeech_compact", HALF)
    run, (text, lengths) = engine.build(model, "kernels"), speech(2, 40)
    expected = run(text, lengths, size=300).mel.clone()
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        torch.cuda._sleep(20_000_000)  # later work on the same stream has to wait for this
        found = run(text, lengths, size=300).mel
    stream.synchronize()
    assert torch.equal(found, expected)


def test_without_pytorch():
    if importlib.util.find_spec("pycuda") is None:
        pytest.skip("needs pycuda")
    from fastspeech.cuda.pycuda_engine import PyCudaEngine

    model = voice("fastspeech", FLOAT)
    run = PyCudaEngine({name: value.cpu().numpy() for name, value in model.state_dict().items()})
    kernels = engine.build(voice("fastspeech", HALF), "kernels")
    for batch, longest in ((1, 128), (3, 50)):
        text, lengths = speech(batch, longest)
        found, expected = run(text.numpy(), lengths.numpy()), kernels(text, lengths)
        assert np.array_equal(found.durations, expected.durations.cpu().numpy())
        np.testing.assert_allclose(found.mel, expected.mel.float().cpu().numpy(), atol=2e-2)


def test_tensorrt():
    try:
        trt = layers.load()
    except ImportError as error:
        pytest.skip(f"needs tensorrt: {error}")
    if layers.is_rtx(trt) and torch.cuda.get_device_capability() in ((9, 0), (10, 0)):
        pytest.skip("TensorRT-RTX does not run on data-centre GPUs of 9.0 and 10.0")
    from fastspeech.tensorrt import verify

    rows = verify.verify(verify.VerifyConfig(arch="fastspeech_compact"))
    assert rows and all(row.passes for row in rows), verify.table(rows)


@pytest.mark.multigpu
@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two CUDA devices")
@pytest.mark.parametrize("form", ["kernels", "graph"])
def test_a_device_that_is_not_the_current_one(form):
    text, lengths = speech(2, 40)
    model = voice("fastspeech_compact", HALF)
    expected = engine.build(model, form)(text, lengths).mel.clone()
    found = engine.build(model.to("cuda:1"), form)(text, lengths).mel
    assert torch.cuda.current_device() == 0 and found.device.index == 1
    torch.testing.assert_close(found.cpu(), expected.cpu(), atol=2e-2, rtol=0)
