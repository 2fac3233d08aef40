"""At full size on a GPU: every engine against the plain way, graphs of several lengths, half precision, the verb."""

from __future__ import annotations

import json

import pytest
import torch

from dlx.inference import Replayed
from dlx.precision import autocast
from tacotron2 import benchmark, plain, registry
from tacotron2.data import TextMelBatch
from tacotron2.decoding import FastDecoder, decode
from tacotron2.loss import Tacotron2Loss
from tacotron2.step import TrainState, capture, train_step

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")]
# Rounding of a recurrence grows from frame to frame, so the first ones are looked at.
FRAMES, BOUND = 24, {torch.float32: 1e-3, torch.float16: 3e-2, torch.bfloat16: 2e-1}


@pytest.fixture(autouse=True)
def exact_products():
    autocast("fp32", "cuda")  # cuDNN's default is tf32


def voice(dtype: torch.dtype) -> torch.nn.Module:
    torch.manual_seed(0)
    model = registry.build("tacotron2").eval().requires_grad_(False)
    model.decoder.gate.bias.fill_(benchmark.NEVER)
    return model.to("cuda", dtype)


def texts(batch: int, longest: int) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(longest)
    lengths = torch.tensor([max(1, longest - 7 * row) for row in range(batch)])
    return torch.randint(1, 148, (batch, longest), generator=generator).cuda(), lengths.cuda()


def said(decoder: FastDecoder, inputs: tuple[torch.Tensor, torch.Tensor], frames: int) -> torch.Tensor:
    return decode(decoder, *inputs, generator=torch.Generator().manual_seed(3), limit=frames).refined


@pytest.mark.filterwarnings("ignore:items")
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("batch", [1, 5, 64])
def test_engines_say_what_the_plain_way_says(dtype, batch):
    model, inputs = voice(dtype), texts(batch, 50)
    torch.set_float32_matmul_precision("highest")
    expected = plain.decode_fixed(model, *inputs, torch.Generator().manual_seed(3), FRAMES).float()
    for engine, graphs in (("steps", False), ("steps", True), ("fused", False), ("fused", True)):
        found = said(FastDecoder(model, engine, graphs), inputs, FRAMES).float()
        gap = (found - expected).abs().max() / expected.abs().max()
        assert gap < BOUND[dtype], (engine, graphs, float(gap))


@pytest.mark.filterwarnings("ignore:items")
def test_graphs_of_several_lengths_do_not_mix():
    """A decoder that has met other texts says the same as a new one, bit for bit, and so does each repetition."""
    model = voice(torch.bfloat16)
    used = FastDecoder(model)
    assert used.engine == "fused" and used.graphs
    shapes = [(1, 20), (1, 90), (3, 90), (1, 25)]
    first = [said(used, texts(*shape), 70) for shape in shapes]
    again = [said(used, texts(*shape), 70) for shape in reversed(shapes)][::-1]
    for shape, one, two in zip(shapes, first, again, strict=True):
        assert torch.equal(one, two) and torch.equal(one, said(FastDecoder(model), texts(*shape), 70))
    assert len(used.captured) == 3  # 20 and 25 symbols share the one of 32


@pytest.mark.parametrize("arch", ["waveglow", "hifigan"])
@pytest.mark.parametrize("precision", ["fp16", "bf16"])
def test_vocoders_in_half_precision(arch, precision):
    """Ours, and the plain one in the same precision, against float32."""
    config = benchmark.BenchmarkConfig(mode="vocoder", precision=precision, peers=["plain"], frames=100)
    torch.manual_seed(1)
    mel, noise = torch.randn(1, 80, 100, device="cuda"), torch.randn(1, 8, 3200, device="cuda")
    programs, exact = benchmark.vocoder_programs(config, arch, torch.device("cuda"), mel, noise)
    with torch.inference_mode():
        expected = exact()
    errors = {name: float((run().float() - expected).norm() / expected.norm()) for name, run in programs.items()}
    again = float((programs["fused"]().float() - expected).norm() / expected.norm())  # by a graph now
    assert errors["fused"] <= 2 * errors["plain"] + 1e-3 and again == pytest.approx(errors["fused"], rel=1e-3), errors


def test_determinants_can_be_captured():
    """slogdet and its gradient in a graph: the same as without, and renewed when the weights change."""
    model = registry.build("waveglow_compact").cuda()
    weights = [flow.mixing.weight for flow in model.flows]

    def gradients() -> list[torch.Tensor]:
        return list(torch.autograd.grad(model.log_determinants(), weights))

    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        gradients()
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = gradients()
    for factor in (1.0, 2.0):
        for weight in weights:
            weight.data.mul_(factor)
        graph.replay()
        for found, weight in zip(captured, weights, strict=True):
            torch.testing.assert_close(found, torch.linalg.inv(weight.detach()).T, atol=1e-4, rtol=1e-4)


def training_batch(batch: int, symbols: int, frames: int) -> TextMelBatch:
    text, text_lengths = texts(batch, symbols)
    mel_lengths = torch.tensor([frames - 3 * row for row in range(batch)]).cuda()
    gate = (torch.arange(frames).cuda() >= mel_lengths[:, None] - 1).float()
    return TextMelBatch(text, text_lengths, torch.randn(batch, 80, frames).cuda(), mel_lengths, gate)


@pytest.mark.parametrize("precision", ["bf16", "fp16"])
def test_training_on_kernels_in_graphs_of_two_shapes(precision):
    """Losses fall in a captured step, near those of the eager plain loops; the second shape goes on from the first."""
    from dlx import optim
    from dlx.precision import LossScaler

    batches = [training_batch(4, 40, 60), training_batch(4, 30, 50)]
    losses: dict[str, list[float]] = {}
    for name in ("plain", "fused"):
        torch.manual_seed(0)
        model = registry.build("tacotron2_compact").cuda().train()
        model.decoder.fused = name == "fused"
        optimizer = optim.build_optimizer(model, "adam", lr=1e-3, momentum=0.9, weight_decay=1e-6)
        scaler = LossScaler(model.named_parameters(), enabled=precision == "fp16", initial=2.0**8)
        loss = Tacotron2Loss(guide=1.0)
        state = TrainState(model, optimizer, loss=loss, precision=precision, scaler=scaler, max_norm=1.0)
        steps = [capture(state, [batch]) for batch in batches] if name == "fused" else None
        losses[name] = []
        for number in range(30):
            batch = [batches[number % 2]]
            losses[name].append(float(steps[number % 2](batch) if steps else train_step(state, batch)))
    for name, values in losses.items():
        assert sum(values[-6:]) / 6 < 0.92 * sum(values[:2]) / 2, (name, values)
    assert losses["fused"][0] == pytest.approx(losses["plain"][0], rel=0.08)  # dropout differs
    assert losses["fused"][-1] == pytest.approx(losses["plain"][-1], rel=0.2)


def test_a_shape_is_captured_the_second_time():
    calls = []

    def twice(x: torch.Tensor) -> torch.Tensor:
        calls.append(x.shape)
        return 2 * x

    replayed = Replayed(twice, keep=2)
    for number in range(4):
        x = torch.full((3,), float(number), device="cuda")
        assert torch.equal(replayed(x), 2 * x)
    assert len(calls) == 3  # as it is; to warm up; to capture
    for size in (4, 5, 6):
        replayed(torch.ones(size, device="cuda"))
    assert len(replayed.graphs) == 2


@pytest.mark.parametrize(
    "words",
    [
        ["--mode", "decode", "--peers", "[plain, torchaudio]", "--engines", "[fused, graph]"],
        ["--mode", "vocoder", "--arch", "waveglow_compact", "--peers", "[graph, plain, unfolded]"],
        ["--mode", "vocoder", "--arch", "hifigan", "--peers", "[graph, plain]"],
        ["--mode", "pipeline", "--vocoder", "waveglow_compact", "--peers", "[plain]"],
        ["--mode", "training", "--arch", "tacotron2_compact", "--peers", "[plain]", "--batch_sizes", "[4]"],
        ["--mode", "training", "--arch", "waveglow_compact", "--peers", "[plain]", "--batch_sizes", "[2]"],
    ],
)
def test_the_benchmark_runs(words, tmp_path):
    output = tmp_path / "record.json"
    small = "--frames 40 --text_length 20 --warmup 1 --iterations 2 --pairs 1 --output".split()
    benchmark.main([*words, *small, str(output)])
    rows = json.loads(output.read_text())["attachments"]["rows"]
    assert all("skipped" in row or row["throughput"] > 0 for row in rows) and "throughput" in rows[0]
