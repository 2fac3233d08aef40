"""The network: sizes, an independent fp64 form of its blocks, masks, frames counted exactly."""

import math

import numpy as np
import pytest
import torch
from torch.nn import functional as F

from fastspeech import registry
from fastspeech.model import FastSpeech, FastSpeechConfig, frame_symbols, regulate, round_durations, sinusoids

SMALL = FastSpeechConfig(
    num_symbols=30, num_mels=7, channels=16, head_channels=8, feed_forward=24, encoder_blocks=2, decoder_blocks=2,
    predictor=12,
)  # fmt: skip


def small(seed=0, dtype=torch.float32, **changes):
    torch.manual_seed(seed)
    model = FastSpeech(SMALL).to(dtype).eval()
    with torch.no_grad():  # norms and biases that do something
        for parameter in model.parameters():
            if parameter.dim() == 1:
                parameter.add_(0.3 * torch.randn_like(parameter))
        model.durations.output.bias.fill_(1.3)
    return model


@pytest.mark.parametrize("name", registry.ARCHITECTURES)
def test_parameters_are_counted(name):
    with torch.device("meta"):
        model = registry.build(name)
    assert sum(parameter.numel() for parameter in model.parameters()) == registry.ARCHITECTURES[name].parameters
    assert registry.recognise(model.state_dict()) == name
    if name.endswith("compact"):
        assert 2 * registry.ARCHITECTURES[name].parameters < 12e6


# An independent form: numpy, float64, loops, one item without padding


def _norm(x, weights, name):
    mean, deviation = x.mean(1, keepdims=True), np.sqrt(x.var(1, keepdims=True) + 1e-5)
    return (x - mean) / deviation * weights[name + ".weight"] + weights[name + ".bias"]


def _convolve(x, weights, name):
    kernel, bias = weights[name + ".weight"], weights[name + ".bias"]
    padded = np.pad(x, ((1, 1), (0, 0)))
    return np.stack([bias + sum(kernel[:, :, k] @ padded[place + k] for k in range(3)) for place in range(len(x))])


def _block(x, weights, name, config):
    width = config.head_channels
    qkv = x @ weights[f"{name}.attention.qkv.weight"].T + weights[f"{name}.attention.qkv.bias"]
    heads = []
    for head in range(config.heads):
        start = head * width
        q, k, v = (qkv[:, part * config.heads * width + start :][:, :width] for part in range(3))
        scores = np.exp(q @ k.T / math.sqrt(width))
        heads.append(scores / scores.sum(1, keepdims=True) @ v)
    found = np.concatenate(heads, 1) @ weights[f"{name}.attention.output.weight"].T
    x = _norm(x + found + weights[f"{name}.attention.output.bias"], weights, f"{name}.attention.norm")
    hidden = np.maximum(_convolve(x, weights, f"{name}.feed_forward.first"), 0)
    return _norm(x + _convolve(hidden, weights, f"{name}.feed_forward.second"), weights, f"{name}.feed_forward.norm")


def _positions(length, channels):
    table = np.zeros((length, channels))
    for place in range(length):
        for channel in range(channels):
            angle = (place + 1) / 10000 ** (2 * (channel // 2) / channels)
            table[place, channel] = math.cos(angle) if channel % 2 else math.sin(angle)
    return table


def oracle(model, text, durations=None):
    """(mel (M, F), log durations (T,)) of one text."""
    weights = {name: value.double().numpy() for name, value in model.state_dict().items()}
    config = model.config
    x = weights["embedding.weight"][text] + _positions(len(text), config.channels)
    for number in range(config.encoder_blocks):
        x = _block(x, weights, f"encoder.blocks.{number}", config)
    hidden = x
    for name in ("first", "second"):
        hidden = np.maximum(_convolve(hidden, weights, f"durations.{name}"), 0)
        hidden = _norm(hidden, weights, f"durations.{name}_norm")
    predicted = (hidden @ weights["durations.output.weight"].T + weights["durations.output.bias"])[:, 0]
    if durations is None:
        durations = np.floor(np.maximum(np.exp(predicted) - 1, 0) + 0.5).astype(int)
    x = np.repeat(x, durations, 0) + _positions(int(sum(durations)), config.channels)
    for number in range(config.decoder_blocks):
        x = _block(x, weights, f"decoder.blocks.{number}", config)
    return (x @ weights["mel.weight"].T + weights["mel.bias"]).T, predicted


@pytest.mark.parametrize("given", [False, True])
def test_the_network_is_its_independent_form(given):
    model = small(dtype=torch.float64)
    generator = np.random.default_rng(1)
    text = generator.integers(1, 30, 11)
    durations = generator.integers(0, 6, 11) if given else None
    with torch.no_grad():
        found = model(torch.tensor(text)[None], torch.tensor([11]), torch.tensor(durations)[None] if given else None)
    mel, predicted = oracle(model, text, durations)
    np.testing.assert_allclose(found.mel[0].numpy(), mel, atol=1e-9)
    np.testing.assert_allclose(found.log_durations[0].numpy(), predicted, atol=1e-9)
    assert int(found.mel_lengths) == mel.shape[1] > 11


def test_padding_changes_nothing():
    model = small(2)
    text, lengths = torch.randint(1, 30, (3, 9)), torch.tensor([9, 4, 6])
    dirty = torch.cat([text, torch.full((3, 5), 7)], 1)  # whatever stands in the padding
    with torch.no_grad():
        alone = [model(text[row : row + 1, :length], torch.tensor([length])) for row, length in enumerate([9, 4, 6])]
        together = model(dirty, lengths, size=400)
    for row, single in enumerate(alone):
        frames, symbols = int(single.mel_lengths), int(lengths[row])
        assert int(together.mel_lengths[row]) == frames > symbols
        torch.testing.assert_close(together.mel[row, :, :frames], single.mel[0], atol=2e-5, rtol=0)
        assert (together.mel[row, :, frames:] == 0).all() and (together.log_durations[row, symbols:] == 0).all()
        torch.testing.assert_close(together.log_durations[row, :symbols], single.log_durations[0], atol=1e-5, rtol=0)


def test_an_empty_item_is_nothing_and_not_nan():
    model = small().train()
    text, lengths = torch.tensor([[3, 4, 5], [0, 0, 0]]), torch.tensor([3, 1])
    found = model(text, lengths, torch.tensor([[2, 0, 4], [0, 0, 0]]), 8)
    assert found.mel_lengths.tolist() == [6, 0] and (found.mel[1] == 0).all()
    (found.mel.square().mean() + found.log_durations.square().mean()).backward()
    assert all(torch.isfinite(parameter.grad).all() for parameter in model.parameters())
    assert (model.embedding.weight.grad[0] == 0).all()


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32])
def test_frames_are_counted_exactly_in_half_precision(dtype):
    durations = torch.full((1, 600), 7)
    logs = torch.log(durations + 1.0).to(dtype)
    rounded = round_durations(logs, torch.tensor([600]))
    assert int(rounded.sum()) == 4200 and (rounded == 7).all()
    x = torch.arange(600).to(dtype)[None, :, None].expand(1, 600, 4)
    expanded, lengths = regulate(x, rounded, 4300)
    assert lengths.tolist() == [4200] and expanded.dtype == dtype
    assert torch.equal(expanded[0, :4200], x[0].repeat_interleave(7, 0)) and (expanded[0, 4200:] == 0).all()


@pytest.mark.parametrize("seed", range(4))
def test_length_regulation_repeats(seed):
    generator = torch.Generator().manual_seed(seed)
    durations = torch.randint(0, 5, (5, 13), generator=generator)
    durations[1] = 0
    durations[2, :4] = 0
    x = torch.randn(5, 13, 3, generator=generator)
    for size in (1, 20, 60):
        expanded, lengths = regulate(x, durations, size)
        for row in range(5):
            whole = x[row].repeat_interleave(durations[row], 0)[:size]
            assert int(lengths[row]) == len(whole)
            assert torch.equal(expanded[row, : len(whole)], whole) and (expanded[row, len(whole) :] == 0).all()
    index = frame_symbols(durations, 60)
    assert index.min() >= 0 and index.max() <= 12


def test_rounding_and_control():
    logs = torch.log(torch.tensor([[0.5, 1.5, 2.49, 10.0], [4.0, 0.0, 3.0, 9.0]]) + 1)
    lengths = torch.tensor([4, 2])
    assert round_durations(logs, lengths).tolist() == [[1, 2, 2, 10], [4, 0, 0, 0]]
    assert round_durations(logs, lengths, speed=2.0).tolist() == [[0, 1, 1, 5], [2, 0, 0, 0]]
    assert round_durations(logs, lengths, torch.tensor([1.0, 0.5])).tolist() == [[1, 2, 2, 10], [8, 0, 0, 0]]
    emphasis, pauses = torch.tensor([[1, 1, 1, 1.5]]).expand(2, 4), torch.tensor([[0, 7, 0, 0], [0, 1, 9, 0]])
    assert round_durations(logs, lengths, 1.0, emphasis, pauses).tolist() == [[1, 9, 2, 15], [4, 1, 0, 0]]
    assert round_durations(torch.full((1, 3), -9.0), torch.tensor([3])).tolist() == [[1, 0, 0]]
    assert round_durations(torch.full((1, 1), 80.0), torch.tensor([1])).tolist() == [[1024]]
    broken = torch.tensor([[math.nan, math.log(3), math.nan]])  # of a network that has gone astray
    assert round_durations(broken, torch.tensor([3])).tolist() == [[0, 2, 0]]
    assert round_durations(logs[:1], lengths[:1], pauses=torch.tensor([[-9, 1, 0, -1]])).tolist() == [[0, 3, 2, 9]]


def test_positions_are_those_of_the_paper():
    np.testing.assert_allclose(sinusoids(50, 16, "cpu", torch.float64).numpy(), _positions(50, 16), atol=1e-12)
    np.testing.assert_allclose(sinusoids(4200, 384, "cpu").numpy()[::97], _positions(4200, 384)[::97], atol=1e-3)


def test_the_convolution_of_a_gpu_is_that_of_the_cpu():
    convolution = FastSpeech(SMALL).encoder.blocks[0].feed_forward.first
    x = torch.randn(2, 9, 16)
    weight = convolution.weight[:, :, None].contiguous(memory_format=torch.channels_last)
    moved = F.conv2d(x.transpose(1, 2)[:, :, None], weight, convolution.bias, padding=(0, 1))
    torch.testing.assert_close(moved[:, :, 0].transpose(1, 2), convolution(x))


def test_one_step_lowers_the_loss():
    model = small(3).train()
    optimizer = torch.optim.Adam(model.parameters(), 1e-3)
    text, lengths, durations = torch.randint(1, 30, (4, 8)), torch.tensor([8, 8, 5, 7]), torch.randint(1, 4, (4, 8))
    target = torch.randn(4, 7, 30)
    losses = []
    for _ in range(8):
        torch.manual_seed(0)
        found = model(text, lengths, durations, 30)
        losses.append((found.mel - target).square().mean() + (found.log_durations - 1).square().mean())
        optimizer.zero_grad()
        losses[-1].backward()
        optimizer.step()
    assert losses[-1] < losses[0]
