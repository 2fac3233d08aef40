"""Tacotron 2: counts, padding that changes nothing, gradients, decoding against its reference, losses, a step."""

from __future__ import annotations

import math
import shutil
import warnings
from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F

from tacotron2 import registry
from tacotron2.data import TextMelBatch
from tacotron2.decoding import FastDecoder, decode, decode_plainly, dropout
from tacotron2.loss import Tacotron2Loss, attention_focus, guided_attention
from tacotron2.masking import length_mask, reverse_within
from tacotron2.model import MaskedBatchNorm, Prediction, Tacotron2, Tacotron2Config
from tacotron2.recurrence import Product, lstm_cell
from tacotron2.step import TrainState, capture, train_step

TINY = Tacotron2Config(
    num_symbols=20,
    num_mels=8,
    encoder=16,
    prenet=12,
    rnn=24,
    attention=10,
    location_filters=4,
    location_kernel=5,
    postnet=16,
)


def tiny(gate: float = 0.0, dtype: torch.dtype = torch.float64) -> Tacotron2:
    torch.manual_seed(0)
    model = Tacotron2(TINY).double().eval()
    model.decoder.gate.bias.data.fill_(gate)
    for module in model.modules():  # norms that do something
        if isinstance(module, MaskedBatchNorm):
            module.running_mean.uniform_(-0.5, 0.5)
            module.running_var.uniform_(0.5, 2)
            module.weight.data.uniform_(0.5, 1.5)
            module.bias.data.uniform_(-0.5, 0.5)
    return model.to(dtype)  # of the same draws


def lively() -> Tacotron2:
    """A model whose frames differ so much that the gates fire at various steps."""
    model = tiny(-1.0)
    for name, parameter in model.decoder.named_parameters():
        if "weight" in name:
            parameter.data.mul_(3)
    return model


def example(batch: int = 3, symbols: int = 9, frames: int = 14) -> TextMelBatch:
    generator = torch.Generator().manual_seed(1)
    text_lengths = torch.tensor([symbols, symbols - 4, symbols - 2][:batch])
    mel_lengths = torch.tensor([frames - 5, frames, frames - 2][:batch])
    text = torch.randint(1, 20, (batch, symbols), generator=generator) * length_mask(text_lengths, symbols)
    mel = torch.randn(batch, 8, frames, generator=generator, dtype=torch.float64)
    gate = (torch.arange(frames) >= mel_lengths[:, None] - 1).double()
    return TextMelBatch(text, text_lengths, mel * length_mask(mel_lengths, frames)[:, None], mel_lengths, gate)


@pytest.mark.parametrize("name", list(registry.ARCHITECTURES))
def test_parameter_counts(name):
    """28.2 M and 87.9 M (256 channels) or 268 M (512) are the published numbers."""
    with torch.device("meta"):
        model = registry.build(name)
    assert sum(parameter.numel() for parameter in model.parameters()) == registry.ARCHITECTURES[name].parameters


def test_names_and_settings_are_checked():
    with pytest.raises(ValueError, match="unknown architecture 'tacotron3'; did you mean tacotron2"):
        registry.build("tacotron3")
    with pytest.raises(ValueError, match="num_symbols must be at least 2"):
        registry.build("tacotron2", 1)
    with pytest.raises(ValueError, match="location_kernel must be odd, got 4"):
        Tacotron2Config(location_kernel=4)


# Padding


@pytest.mark.parametrize("extra", [0, 7])
def test_a_padded_batch_is_its_items(extra):
    """Also with garbage in the padding, and whatever the padding's length."""
    model, batch = tiny(), example()
    frames, symbols = batch.mel.shape[2] + extra, batch.text.shape[1] + extra
    keep = dropout(model, frames, 3, torch.Generator().manual_seed(5))
    text = F.pad(batch.text, (0, extra), value=0) + 3 * ~length_mask(batch.text_lengths, symbols)
    mel = F.pad(batch.mel, (0, extra)) + 100.0 * ~length_mask(batch.mel_lengths, frames)[:, None]
    together = model(text, batch.text_lengths, mel, batch.mel_lengths, keep)
    for row, (length, count) in enumerate(zip(batch.text_lengths.tolist(), batch.mel_lengths.tolist(), strict=True)):
        alone = model(
            batch.text[row : row + 1, :length],
            batch.text_lengths[row : row + 1],
            batch.mel[row : row + 1, :, :count],
            batch.mel_lengths[row : row + 1],
            keep[:count, row : row + 1],
        )
        for name in ("mel", "refined"):
            found = getattr(together, name)[row]
            assert torch.allclose(found[:, :count], getattr(alone, name)[0], rtol=0, atol=1e-12), name
            assert not found[:, count:].any()
        assert torch.allclose(together.gate[row, :count], alone.gate[0], rtol=0, atol=1e-12)
        assert torch.allclose(together.alignments[row, :count, :length], alone.alignments[0], rtol=0, atol=1e-12)
        assert not together.alignments[row, :, length:].any()


def test_training_statistics_leave_padding_out(monkeypatch):
    """Loss, gradients and running statistics of a training step do not see how much padding there is."""
    results = []
    for extra in (0, 6):
        model, batch = tiny().train(), example()
        monkeypatch.setattr(F, "dropout", lambda x, *args, **options: x)
        text = F.pad(batch.text, (0, extra))
        mel, gate = F.pad(batch.mel, (0, extra)), F.pad(batch.gate, (0, extra), value=1)
        found = model(text, batch.text_lengths, mel, batch.mel_lengths)
        losses = Tacotron2Loss(guide=0.5)(found, mel, gate, batch.text_lengths, batch.mel_lengths)
        losses.total.backward()
        buffers = [buffer for name, buffer in model.named_buffers() if "running" in name]
        results.append([losses.total, *(parameter.grad for parameter in model.parameters()), *buffers])
    assert all(value is not None for value in results[0])
    for one, other in zip(*results, strict=True):
        assert torch.allclose(one, other, rtol=1e-6, atol=1e-9)


def test_masked_norm_is_a_norm_of_what_counts():
    torch.manual_seed(0)
    ours, plain = MaskedBatchNorm(5).double(), torch.nn.BatchNorm1d(5).double()
    x, lengths = torch.randn(3, 5, 7, dtype=torch.float64), torch.tensor([7, 2, 4])
    mask = length_mask(lengths, 7)[:, None]
    valid = x.transpose(1, 2)[mask[:, 0]]  # (13, 5)
    expected = plain(valid)
    assert torch.allclose(ours(x, mask).transpose(1, 2)[mask[:, 0]], expected)
    assert torch.allclose(ours.running_var, plain.running_var)
    assert torch.allclose(ours.running_mean, plain.running_mean)
    assert ours.num_batches_tracked == 1


def test_reversal_within_lengths():
    x = torch.arange(10.0).view(2, 5, 1)
    found = reverse_within(x, torch.tensor([3, 5]))[:, :, 0].tolist()
    assert found == [[2, 1, 0, 3, 4], [9, 8, 7, 6, 5]]


def test_the_encoder_is_the_packed_bidirectional_lstm():
    """The reference packs, as the published model does."""
    model, batch = tiny(), example()
    encoder = model.encoder
    reference = torch.nn.LSTM(16, 8, batch_first=True, bidirectional=True).double()
    for name, value in encoder.forward_lstm.named_parameters():
        getattr(reference, name).data.copy_(value)
        getattr(reference, name + "_reverse").data.copy_(getattr(encoder.backward_lstm, name))
    mask = length_mask(batch.text_lengths, 9)[:, None]
    x = encoder.embedding(batch.text).transpose(1, 2) * mask
    for layer in encoder.layers:
        x = layer(x, mask)
    packed = torch.nn.utils.rnn.pack_padded_sequence(
        x.transpose(1, 2), batch.text_lengths, batch_first=True, enforce_sorted=False
    )
    expected, _ = torch.nn.utils.rnn.pad_packed_sequence(reference(packed)[0], batch_first=True)
    assert torch.allclose(encoder(batch.text, batch.text_lengths), expected, rtol=0, atol=1e-12)


# Gradients


def test_gradients_of_the_loop_are_autograds():
    """The deferred weight gradients against a loop that lets autograd do it all."""
    torch.manual_seed(0)
    cell = torch.nn.LSTMCell(3, 4).double()
    inputs = torch.randn(6, 2, 3, dtype=torch.float64, requires_grad=True)
    hidden = state = torch.zeros(2, 4, dtype=torch.float64)
    expected = []
    for step in range(6):
        hidden, state = cell(inputs[step], (hidden, state))
        expected.append(hidden)
    weights = torch.randn(6, 2, 4, dtype=torch.float64)
    leaves = (inputs, *cell.parameters())
    wanted = torch.autograd.grad((torch.stack(expected) * weights).sum(), leaves)
    gates = Product(F.linear(inputs, cell.weight_ih, cell.bias_ih + cell.bias_hh), cell.weight_hh, torch.float64)
    hidden = state = torch.zeros(2, 4, dtype=torch.float64)
    found = []
    for step in range(6):
        hidden, state = lstm_cell(*gates.parts(step, hidden), state)
        found.append(hidden)
    assert torch.allclose(torch.stack(found), torch.stack(expected))
    for one, other in zip(torch.autograd.grad((torch.stack(found) * weights).sum(), leaves), wanted, strict=True):
        assert torch.allclose(one, other)


def test_gradients_of_the_whole_model():
    """Central differences along random directions, in float64."""
    model, batch = tiny(), example()
    keep = dropout(model, 14, 3, torch.Generator().manual_seed(5))
    objective = Tacotron2Loss(gate_positive=3.0, guide=1.0)

    def loss() -> torch.Tensor:
        found = model(batch.text, batch.text_lengths, batch.mel, batch.mel_lengths, keep)
        return objective(found, batch.mel, batch.gate, batch.text_lengths, batch.mel_lengths).total

    loss().backward()
    generator = torch.Generator().manual_seed(2)
    for name, parameter in model.named_parameters():
        direction = torch.randn(parameter.shape, generator=generator, dtype=torch.float64)
        direction /= direction.norm()
        slope = float((parameter.grad * direction).sum())
        values = []
        for sign in (1, -1):
            with torch.no_grad():
                parameter.add_(direction, alpha=sign * 1e-6)
                values.append(float(loss()))
                parameter.sub_(direction, alpha=sign * 1e-6)
        assert slope == pytest.approx((values[0] - values[1]) / 2e-6, rel=1e-4, abs=1e-7), name


def test_mixed_precision_is_near():
    model, batch = tiny(dtype=torch.float32), example()
    keep = dropout(model, 14, 3, torch.Generator().manual_seed(5))
    inputs = (batch.text, batch.text_lengths, batch.mel.float(), batch.mel_lengths, keep)
    exact = model(*inputs)
    with torch.autocast("cpu", torch.bfloat16):
        rounded = model(*inputs)
    assert rounded.alignments.dtype == torch.float32
    assert (rounded.refined - exact.refined).abs().max() < 0.05 * exact.refined.abs().max()
    rounded.refined.float().sum().backward()
    assert all(p.grad.dtype == torch.float32 for name, p in model.named_parameters() if "gate" not in name)


# Decoding


@pytest.mark.parametrize("block", [1, 7, 32])
def test_fast_decoding_is_plain_decoding(block):
    model, batch = lively(), example()
    inputs = (batch.text, batch.text_lengths)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        plain = decode_plainly(model, *inputs, generator=torch.Generator().manual_seed(4), limit=60)
        fast = decode(FastDecoder(model, block=block), *inputs, generator=torch.Generator().manual_seed(4), limit=60)
    assert plain.lengths.tolist() == [20, 32, 60] and plain.reached_limit == [False, False, True]
    assert torch.equal(fast.lengths, plain.lengths) and fast.reached_limit == plain.reached_limit
    for name in ("mel", "refined", "alignments"):
        assert torch.allclose(getattr(fast, name), getattr(plain, name), rtol=0, atol=1e-9), name


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:items")
@pytest.mark.skipif(shutil.which("g++") is None, reason="lacks a C++ compiler (g++)")
def test_compiled_steps_decode_the_same():
    model, batch = tiny(-20, torch.float32), example()
    results = [
        decode(FastDecoder(model, engine), batch.text, batch.text_lengths, limit=20).refined
        for engine in ("steps", "compiled")
    ]
    assert torch.allclose(*results, rtol=0, atol=1e-4)


def test_given_frames_say_what_was_decoded():
    """Teacher forcing with a decoded spectrogram and the same dropout gives that spectrogram."""
    model, batch = lively(), example()
    generators = [torch.Generator().manual_seed(seed) for seed in (1, 2, 3)]
    found = decode(model, batch.text, batch.text_lengths, generator=generators, limit=60)
    generators = [torch.Generator().manual_seed(seed) for seed in (1, 2, 3)]
    keep = dropout(model, found.mel.shape[2], 3, generators)
    forced = model(batch.text, batch.text_lengths, found.mel, found.lengths, keep)
    assert torch.allclose(forced.mel, found.mel, rtol=0, atol=1e-9)
    assert torch.allclose(forced.refined, found.refined, rtol=0, atol=1e-9)
    for row, length in enumerate(found.lengths.tolist()):
        assert forced.gate[row, length - 1] > 0 and (forced.gate[row, : length - 1] <= 0).all()


@pytest.mark.filterwarnings("ignore:items")
def test_an_item_does_not_depend_on_its_batch():
    model, batch = lively(), example()
    generators = [torch.Generator().manual_seed(seed) for seed in (1, 2, 3)]
    together = decode(model, batch.text, batch.text_lengths, generator=generators, limit=60)
    for row, length in enumerate(batch.text_lengths.tolist()):
        generator = [torch.Generator().manual_seed(row + 1)]
        text, lengths = batch.text[row : row + 1, :length], batch.text_lengths[row : row + 1]
        alone = decode(model, text, lengths, generator=generator, limit=60)
        frames = int(alone.lengths)
        assert frames == together.lengths[row]
        assert torch.allclose(together.refined[row, :, :frames], alone.refined[0], rtol=0, atol=1e-9)
        assert not together.refined[row, :, frames:].any()


def test_seeds_decide_on_the_dropout():
    model, batch = tiny(-20), example()

    def speak(seed: int) -> torch.Tensor:
        generator = torch.Generator().manual_seed(seed)
        with pytest.warns(UserWarning, match="cut at the limit"):
            return decode(model, batch.text, batch.text_lengths, generator=generator, limit=5).refined

    assert torch.equal(speak(1), speak(1)) and not torch.allclose(speak(1), speak(2))
    drawn = dropout(Tacotron2(), 200, 1, torch.Generator().manual_seed(0))
    assert set(drawn.unique().tolist()) == {0.0, 2.0} and drawn.mean() == pytest.approx(1, abs=0.02)
    with pytest.raises(ValueError, match="2 generators for a batch of 3"):
        dropout(model, 1, 3, [torch.Generator()] * 2)


def firing(model: Tacotron2, schedule: dict[int, int]) -> FastDecoder:
    """A decoder whose gates fire as told: {item: step from 1 on}."""
    decoder = FastDecoder(model, block=8)
    real, step = decoder.stepper.step, 0

    def forced(state, source, keep):
        nonlocal step
        state, gate = real(state, source, keep)
        step += 1
        return state, torch.tensor([1.0 if schedule.get(item) == step else -1.0 for item in range(len(gate))])

    decoder.stepper.step = forced
    return decoder


def test_the_limit_is_told_of():
    """User case O18."""
    model = tiny()
    text, lengths = torch.full((2, 4), 3), torch.tensor([4, 4])
    with pytest.warns(UserWarning) as caught:
        found = decode(firing(model, {}), text, lengths, limit=50)
    assert len(caught) == 1 and "items [0, 1] were cut at the limit of 50 frames" in str(caught[0].message)
    assert found.lengths.tolist() == [50, 50] and found.reached_limit == [True, True]
    assert found.refined.shape == (2, 8, 50)
    with pytest.warns(UserWarning) as caught:
        found = decode(firing(model, {1: 10}), text, lengths, limit=50)
    assert len(caught) == 1 and "items [0]" in str(caught[0].message)
    assert found.lengths.tolist() == [50, 10] and found.reached_limit == [True, False]
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        found = decode(firing(model, {0: 9, 1: 10}), text, lengths, limit=50)
    assert found.lengths.tolist() == [9, 10] and found.refined.shape[2] == 10


def test_bad_text_is_refused_before_anything_runs():
    model = tiny()
    with pytest.raises(ValueError, match=r"symbols 1..20 are not within the 20 of the model"):
        decode(model, torch.tensor([[1, 20]]), torch.tensor([2]))
    with pytest.raises(ValueError, match=r"lengths must be within 1 and 2, got \[0\]"):
        decode(model, torch.tensor([[1, 2]]), torch.tensor([0]))
    with pytest.raises(ValueError, match="expected text"):
        decode(model, torch.tensor([1, 2]), torch.tensor([2]))
    with pytest.raises(ValueError, match="threshold must be within 0 and 1, got 1.5"):
        decode(model, torch.tensor([[1, 2]]), torch.tensor([2]), threshold=1.5)


@pytest.mark.gpu
@pytest.mark.filterwarnings("ignore:items")
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_graphs_decode_the_same(dtype):
    if not torch.cuda.is_available():
        pytest.skip("needs a CUDA device")
    model = tiny(-20, dtype).to("cuda")
    text, lengths = torch.randint(1, 20, (2, 40), device="cuda"), torch.tensor([40, 25], device="cuda")
    eager, graphed = FastDecoder(model, "steps", graphs=False), FastDecoder(model, "steps")
    compiled, fused = FastDecoder(model, "compiled"), FastDecoder(model, "fused")
    results = []
    for decoder in (eager, graphed, graphed, compiled, fused):
        results.append(decode(decoder, text, lengths, generator=torch.Generator().manual_seed(3), limit=70))
    for other in results[1:]:
        assert torch.equal(results[0].lengths, other.lengths)
        gap = (results[0].refined.float() - other.refined.float()).abs().max()
        assert gap < (1e-4 if dtype == torch.float32 else 0.1)
    assert torch.equal(results[1].refined, results[2].refined)


@pytest.mark.gpu
def test_gradients_on_a_gpu():
    """The fused cell and the deferred gradients there, against float64 on the CPU; and autocast does not fail."""
    if not torch.cuda.is_available():
        pytest.skip("needs a CUDA device")
    model, batch = tiny(), example()
    keep = dropout(model, 14, 3, torch.Generator().manual_seed(5))
    objective = Tacotron2Loss(guide=1.0)
    gradients = []
    for device, dtype, cast in (
        ("cpu", torch.float64, False),
        ("cuda", torch.float32, False),
        ("cuda", torch.float32, True),
    ):
        own = tiny(dtype=dtype).to(device)
        for lstm in (own.encoder.forward_lstm, own.encoder.backward_lstm):
            lstm.train()  # cuDNN has no gradient of it otherwise; there is no dropout in it
        given = TextMelBatch(*(x.to(device, dtype) if x.is_floating_point() else x.to(device) for x in batch))
        with torch.autocast("cuda", torch.bfloat16, enabled=cast):
            found = own(given.text, given.text_lengths, given.mel, given.mel_lengths, keep.to(device, dtype))
        objective(found, given.mel, given.gate, given.text_lengths, given.mel_lengths).total.backward()
        gradients.append([parameter.grad.double().cpu() for parameter in own.parameters()])
    for exact, single, rough in zip(*gradients, strict=True):
        scale = exact.norm() + 1e-6
        assert (single - exact).norm() < 1e-3 * scale + 1e-6 and (rough - exact).norm() < 0.2 * scale + 1e-3


@pytest.mark.gpu
def test_a_captured_step_is_the_eager_step():
    if not torch.cuda.is_available():
        pytest.skip("needs a CUDA device")
    batch = TextMelBatch(*(x.to("cuda", torch.float32) if x.is_floating_point() else x.cuda() for x in example()))
    losses = []
    for graphed in (False, True):
        torch.manual_seed(0)
        model = Tacotron2(replace(TINY, dropout=0.0, rnn_dropout=0.0)).cuda()
        rate = torch.tensor(3e-3, device="cuda")
        optimizer = torch.optim.Adam(model.parameters(), lr=rate, fused=True, capturable=True)
        state = TrainState(model, optimizer, max_norm=1.0)
        step = capture(state, [batch]) if graphed else lambda inputs, state=state: train_step(state, inputs)
        losses.append([float(step([batch])) for _ in range(5)])
    assert losses[0] == pytest.approx(losses[1], rel=1e-3) and losses[0][-1] < losses[0][0]


# Losses


def test_losses_are_means_over_what_counts():
    batch = example()
    generator = torch.Generator().manual_seed(3)

    def noise(*shape: int) -> torch.Tensor:
        return torch.randn(shape, generator=generator, dtype=torch.float64)

    found = Prediction(noise(3, 8, 14), noise(3, 8, 14), noise(3, 14), noise(3, 14, 9).softmax(2))
    losses = Tacotron2Loss(gate_positive=4.0, guide=0.3)(
        found, batch.mel, batch.gate, batch.text_lengths, batch.mel_lengths
    )
    sums, frames = {"mel": 0.0, "refined": 0.0, "gate": 0.0, "guide": 0.0}, 0
    for b in range(3):
        for f in range(int(batch.mel_lengths[b])):
            frames += 1
            for name in ("mel", "refined"):
                sums[name] += float(((getattr(found, name)[b, :, f] - batch.mel[b, :, f]) ** 2).mean())
            chance, target = 1 / (1 + math.exp(-float(found.gate[b, f]))), float(batch.gate[b, f])
            sums["gate"] -= 4 * target * math.log(chance) + (1 - target) * math.log(1 - chance)
            for t in range(int(batch.text_lengths[b])):
                distance = t / int(batch.text_lengths[b]) - f / int(batch.mel_lengths[b])
                sums["guide"] += float(found.alignments[b, f, t]) * (1 - math.exp(-(distance**2) / (2 * 0.2**2)))
    for name, value in sums.items():
        if name != "guide":
            assert float(getattr(losses, name)) == pytest.approx(value / frames, rel=1e-9), name
    inside = length_mask(batch.text_lengths, 9)[:, None]
    guide = guided_attention(found.alignments * inside, batch.text_lengths, batch.mel_lengths)
    assert float(guide) == pytest.approx(sums["guide"] / frames, rel=1e-9)
    assert float(losses.total) == pytest.approx(
        float(losses.mel + losses.refined + losses.gate + 0.3 * losses.guide), rel=1e-9
    )


def test_guided_attention_prefers_the_diagonal():
    diagonal = torch.eye(20)[None]
    lengths = torch.tensor([20])
    assert float(guided_attention(diagonal, lengths, lengths)) < 1e-6
    assert float(guided_attention(diagonal.flip(1), lengths, lengths)) > 0.5


def test_focus_of_attention():
    lengths = torch.tensor([4, 2])
    sharp, flat = torch.eye(4).expand(2, 4, 4).clone(), torch.full((2, 4, 4), 0.25)
    sharp[1, 2:] = 9  # behind the end
    assert float(attention_focus(sharp, lengths)) == 1 and float(attention_focus(flat, lengths)) == 0.25


# Training


def _state(model: Tacotron2, **options) -> TrainState:
    optimizer = torch.optim.Adam(model.parameters(), lr=3e-3)
    return TrainState(model.train(), optimizer, max_norm=1.0, **options)


def test_a_step_lowers_the_loss_and_micro_batches_are_one_batch(monkeypatch):
    batch = TextMelBatch(*(value.double() if value.is_floating_point() else value for value in example()))
    state = _state(tiny(), loss=Tacotron2Loss(guide=1.0))
    losses = []
    for _ in range(3):
        torch.manual_seed(0)  # the same dropout
        losses.append(float(train_step(state, [batch])))
    assert losses[2] < losses[1] < losses[0] and state.step == 3
    # Norms in evaluation mode and no dropout: then a batch is the same whole or in parts.
    monkeypatch.setattr(F, "dropout", lambda x, *args, **options: x)
    grown = []
    parts = [TextMelBatch(*(value[:1] for value in batch)), TextMelBatch(*(value[1:] for value in batch))]
    for given in ([batch], parts):
        state = _state(tiny())
        state.model.eval()
        loss = train_step(state, given)
        grown.append([loss, *(parameter.grad.clone() for parameter in state.model.parameters())])
    for one, other in zip(*grown, strict=True):
        assert torch.allclose(one, other, rtol=1e-6, atol=1e-9)


def test_a_tiny_model_learns_an_utterance():
    """By heart: the spectrogram of a sound whose pitch is the symbol, attention on the diagonal, and where it ends."""
    torch.manual_seed(0)
    config = Tacotron2Config(
        num_symbols=8, num_mels=8, encoder=32, prenet=32, rnn=64, attention=32, postnet=32, dropout=0.1,
        conv_dropout=0.1, rnn_dropout=0.0,
    )  # fmt: skip
    model = Tacotron2(config)
    text = torch.tensor([[1, 3, 5, 7, 2, 4]])
    mel = torch.full((1, 8, 24), -2.0)
    for frame in range(24):
        mel[0, text[0, frame // 4], frame] = 1.0
    gate = torch.zeros(1, 24)
    gate[0, -1] = 1
    batch = TextMelBatch(text, torch.tensor([6]), mel, torch.tensor([24]), gate)
    state = _state(model, loss=Tacotron2Loss(gate_positive=5.0, guide=2.0))
    losses = [float(train_step(state, [batch])) for _ in range(220)]
    assert losses[-1] < 0.15 * losses[0]
    found = decode(model.eval(), text, batch.text_lengths, limit=60)
    assert abs(int(found.lengths) - 24) <= 1
    heard = [int(found.refined[0, :, 4 * place + 1 : 4 * place + 3].mean(1).argmax()) for place in range(6)]
    assert heard == text[0].tolist()
