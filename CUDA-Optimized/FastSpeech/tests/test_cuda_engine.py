"""The forms of the network agree: kernels played by the CPU against the plain model; buckets, refusals, operators."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from fastspeech.cuda import engine, launches, network, torch_ops
from fastspeech.model import FastSpeech, FastSpeechConfig

HERE = Path(__file__).parent
CONFIG = FastSpeechConfig(
    num_symbols=20, num_mels=8, channels=32, heads=1, feed_forward=40, encoder_blocks=1, decoder_blocks=1, predictor=128
)


def voice(dtype: torch.dtype) -> FastSpeech:
    torch.manual_seed(0)
    model = FastSpeech(CONFIG).eval()
    with torch.no_grad():  # norms and biases that do something
        for parameter in model.parameters():
            if parameter.dim() == 1:
                parameter.add_(0.2 * torch.randn_like(parameter))
        model.durations.output.bias.fill_(1.2)
    return model.to(dtype)


def inputs() -> tuple[torch.Tensor, torch.Tensor]:
    text = torch.randint(1, 20, (3, 9), generator=torch.Generator().manual_seed(1))
    return text, torch.tensor([9, 5, 0])


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize("library_rows", [None, 1])
def test_kernels_say_what_the_plain_model_says(host, dtype, library_rows):
    text, lengths = inputs()
    durations = torch.randint(0, 5, text.shape, generator=torch.Generator().manual_seed(2))
    durations[1, 5:], durations[2] = 0, 0
    exact = voice(dtype).double()(text, lengths, durations)
    plain = engine.build(voice(dtype), "plain")(text, lengths, durations)
    with torch_ops.host_library(host):
        found = engine.build(voice(dtype), "kernels", library_rows=library_rows)(text, lengths, durations)
    assert torch.equal(found.mel_lengths, exact.mel_lengths) and torch.equal(found.durations, durations)
    assert found.mel.shape == exact.mel.shape and found.mel.dtype == dtype
    for name in ("mel", "log_durations"):
        error = (getattr(found, name).double() - getattr(exact, name)).abs().max()
        allowed = (getattr(plain, name).double() - getattr(exact, name)).abs().max()
        assert error <= 2 * allowed, name
    assert (found.mel[2] == 0).all() and (found.mel[1, :, int(durations[1].sum()) :] == 0).all()


def test_controls_and_the_one_frame_of_an_empty_item(host):
    text, lengths = inputs()
    options = {"speed": 0.8, "emphasis": 1 + torch.rand(3, 9), "pauses": torch.randint(0, 3, (3, 9))}
    plain = engine.build(voice(torch.float32), "plain")(text, lengths, **options)
    with torch_ops.host_library(host):
        run = engine.build(voice(torch.float16), "kernels")
        found = run(text, lengths, **options)
        cut = run(text, lengths, size=4, **options)
    assert (found.durations - plain.durations).abs().max() <= 1  # rounding of half precision
    assert torch.equal(found.mel_lengths, found.durations.sum(1)) and int(found.mel_lengths[2]) == 1
    assert found.mel.shape == (3, 8, int(found.mel_lengths.max()))
    assert cut.mel.shape == (3, 8, 4) and cut.mel_lengths.tolist() == found.mel_lengths.clamp(max=4).tolist()


def test_a_request_is_one_piece_of_memory():
    text, lengths = inputs()
    request = engine.Request(3, 12, torch.device("cpu"))
    emphasis, pauses = torch.rand(3, 9), torch.randint(0, 5, (3, 9))
    request.fill(text, lengths, torch.tensor([1.0, 2.0, 0.5]), emphasis, pauses)
    other = engine.Request(3, 12, torch.device("cpu"))
    other.data.copy_(request.data)
    assert torch.equal(other.text[:, :9].long(), text) and not other.text[:, 9:].any()
    assert torch.equal(other.emphasis[:, :9], emphasis) and (other.emphasis[:, 9:] == 1).all()
    assert torch.equal(other.pauses[:, :9].long(), pauses) and other.speed.tolist() == [1, 2, 0.5]
    assert torch.equal(other.lengths.long(), lengths)
    request.fill(text[:, :2], lengths.clamp(max=2))
    assert not request.text[:, 2:].any() and not request.pauses.any() and (request.emphasis == 1).all()


def test_controls_of_a_call_do_not_stay_for_the_next():
    """One call comes from the host through another request, the next fills the device's own without controls."""
    text, lengths = inputs()
    staging, request = (engine.Request(3, 9, torch.device("cpu")) for _ in range(2))
    request.fill(text, lengths)
    staging.fill(text, lengths, 0.5, emphasis=torch.full((3, 9), 3.0), pauses=torch.full((3, 9), 4))
    staging.send(request)
    assert (request.emphasis == 3).all() and (request.pauses == 4).all()
    request.fill(text, lengths)
    assert (request.emphasis == 1).all() and not request.pauses.any() and (request.speed == 1).all()


def test_a_batch_filled_up_by_nothing_says_the_same(host):
    """As the graphs' batches are: items without symbols beside those that are asked for."""
    text, lengths = inputs()
    emphasis, pauses = 1 + torch.rand(2, 9), torch.randint(0, 3, (2, 9))
    request = engine.Request(4, 12, torch.device("cpu"))
    request.data.fill_(7)  # of the call before
    request.fill(text[:2], lengths[:2], torch.tensor([0.8, 1.1]), emphasis, pauses)
    assert request.lengths.tolist() == [9, 5, 0, 0] and request.speed.tolist()[2:] == [1, 1]
    assert not request.text[2:].any() and not request.pauses[2:].any() and (request.emphasis[2:] == 1).all()
    with torch_ops.host_library(host):
        run = engine.build(voice(torch.float16), "kernels")
        expected = run(text[:2], lengths[:2], speed=torch.tensor([0.8, 1.1]), emphasis=emphasis, pauses=pauses)
        run._prepared = lambda *given: engine._Launched(run.network, request)
        found = run(text[:2], lengths[:2], speed=torch.tensor([0.8, 1.1]), emphasis=emphasis, pauses=pauses)
    for one, other in zip(found, expected, strict=True):
        assert torch.equal(one, other)


def test_buckets():
    sizes = (32, 64, 100)
    assert [engine.bucket(n, sizes) for n in (1, 32, 33, 100, 101, 250)] == [32, 32, 64, 100, 200, 300]


def test_refusals(host):
    text, lengths = inputs()
    with pytest.raises(ValueError, match="unknown form 'fast'"):
        engine.build(voice(torch.float32), "fast")
    with pytest.raises(ValueError, match="needs a CUDA device"):
        engine.build(voice(torch.float16), "kernels")
    with torch_ops.host_library(host):
        with pytest.raises(ValueError, match="fp16 or bf16"):
            engine.build(voice(torch.float32), "kernels")
        with pytest.raises(ValueError, match="graphs need a CUDA device"):
            engine.build(voice(torch.float16), "graph")
    with pytest.raises(ValueError, match="from 0 to 19, got 1 to 77"):
        engine.build(voice(torch.float32), "plain")(text.index_fill(1, torch.tensor([3]), 77), lengths)
    with pytest.raises(ValueError, match="from 0 to 9"):
        engine.build(voice(torch.float32), "plain")(text, lengths + 5)
    assert engine.build(voice(torch.float32)).form == "plain"
    for change, reason in (({"head_channels": 32}, "64"), ({"predictor": 64}, "128"), ({"channels": 48}, "32")):
        model = FastSpeech(FastSpeechConfig(**{**CONFIG.__dict__, **change})).half()
        assert reason in network.refusal(model)


@pytest.mark.parametrize("name", [schema.split("(")[0] for schema, *_ in torch_ops.OPERATORS])
def test_operators_are_sound(name):
    """Schema and fake form against a real call, as torch.compile and torch.export rely on them."""
    x, lengths = torch.randn(2, 5, 64), torch.tensor([5, 3], dtype=torch.int32)
    gain = torch.randn(64)
    weights = [torch.randn(128, 3, 64), *[torch.randn(128)] * 3, torch.randn(128, 3, 128), *[torch.randn(128)] * 4]
    arguments = {
        "regulate": (x, torch.ones(2, 5, dtype=torch.int32), 7),
        "add_positions": (x, lengths),
        "embed": (torch.randn(9, 64), torch.randint(0, 9, (2, 5), dtype=torch.int32), lengths),
        "residual_norm": (x, gain, x, gain, gain, lengths),
        "attention64": (torch.randn(2, 5, 192), lengths, 1),
        "convolution": (x, torch.randn(8, 3, 64), None, lengths, True),
        "convolution_norm": (x, torch.randn(64, 1, 64), gain, x, gain, gain, lengths),
        "predict_durations": (x, [*weights, torch.randn(1)], lengths, None, torch.ones(2, 5)),
    }[name]
    tests = ("test_schema", "test_faketensor")
    torch.library.opcheck(getattr(torch.ops.fastspeech, name).default, arguments, test_utils=tests)


def test_the_host_library_is_only_there_within_its_block(host):
    x = torch.randn(1, 2, 8)
    assert torch_ops.device_library(x) is None
    with torch_ops.host_library(host):
        assert torch_ops.device_library(x) == (host, launches.PROCESSORS, 0)
    assert torch_ops.device_library(x) is None
