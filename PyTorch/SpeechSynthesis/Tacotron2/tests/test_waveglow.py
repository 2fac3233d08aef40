"""WaveGlow: invertible, its likelihood exact, padding and streaming that change nothing, the denoiser, a step."""

from __future__ import annotations

import math

import pytest
import torch

from dlx.speech.mel import MelConfig, MelSpectrogram
from tacotron2 import registry
from tacotron2.data import AudioBatch
from tacotron2.loss import likelihood_loss
from tacotron2.step import VocoderState, capture, train_vocoder_step
from tacotron2.vocoding import WaveGlowVocoder
from tacotron2.waveglow import Denoiser, NormedConv, WaveGlow, WaveGlowConfig

TINY = WaveGlowConfig(
    num_mels=8, flows=5, early_every=2, early_size=2, layers=3, channels=12, hop_length=32, window=128
)
MEL = MelConfig(sample_rate=8000, n_fft=128, hop_length=32, win_length=128, num_mels=8, fmax=4000)


def tiny(config: WaveGlowConfig = TINY, dtype: torch.dtype = torch.float64) -> WaveGlow:
    """Trained a little, as it were: the last layers are not zero."""
    torch.manual_seed(0)
    model = WaveGlow(config)
    for module in model.modules():
        if isinstance(module, NormedConv):
            module.weight_g.data.mul_(torch.rand_like(module.weight_g) + 0.5)
    for flow in model.flows:
        torch.nn.init.normal_(flow.wn.end.weight, std=0.1)
    return model.to(dtype)


def inputs(frames: int = 40, batch: int = 2, dtype: torch.dtype = torch.float64) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(1)
    mel = torch.randn(batch, 8, frames, generator=generator, dtype=dtype)
    return mel, 0.3 * torch.randn(batch, frames * 32, generator=generator, dtype=dtype)


@pytest.mark.parametrize("dtype, tolerance", [(torch.float32, 1e-4), (torch.float64, 1e-9)])
def test_inverse(dtype, tolerance):
    model = tiny(dtype=dtype)
    mel, audio = inputs(dtype=dtype)
    z = model(mel, audio).z
    assert z.shape == (2, 8, 160) and (z.std() - audio.std()).abs() > 0.01
    assert (model.inverse(mel, z) - audio).abs().max() < tolerance
    assert (model.prepare().inverse(mel, z) - audio).abs().max() < tolerance


def test_inverse_at_full_depth():
    """The published 12 flows and 8 layers, in float32 and narrow channels."""
    model = tiny(WaveGlowConfig(channels=16), torch.float32)
    mel = torch.randn(1, 80, 8)
    audio = 0.3 * torch.randn(1, 8 * 256)
    with torch.no_grad():
        assert (model.inverse(mel, model(mel, audio).z) - audio).abs().max() < 1e-4


def test_the_likelihood_is_that_of_the_map():
    """log |det| of the whole map from sound to noise, by its Jacobian matrix."""
    model = tiny()
    mel, audio = inputs(frames=2, batch=1)
    jacobian = torch.autograd.functional.jacobian(lambda x: model(mel, x).z.flatten(), audio)[:, 0]
    with torch.no_grad():
        density = model(mel, audio)
    positions = density.z.shape[2]
    expected = torch.linalg.slogdet(jacobian).logabsdet
    assert float(density.log_scales + positions * density.log_determinants) == pytest.approx(float(expected), rel=1e-9)
    loss = likelihood_loss(*density, sigma=0.7)
    by_hand = (float(density.z.square().sum()) / (2 * 0.49) - float(expected)) / density.z.numel()
    assert float(loss) == pytest.approx(by_hand, rel=1e-9)


def test_a_fresh_model_only_rotates():
    model = WaveGlow(TINY).double()
    mel, audio = inputs()
    density = model(mel, audio)
    assert float(density.log_scales.detach()) == 0 and abs(float(density.log_determinants.detach())) < 1e-5
    assert torch.allclose(density.z.norm(), audio.norm(), rtol=1e-5)


def test_a_padded_batch_is_its_items():
    model = tiny().prepare()
    mel, _ = inputs()
    lengths = torch.tensor([40, 23])
    mel[1, :, 23:] = 50
    generator = torch.Generator().manual_seed(2)
    together = model.infer(mel, 0.8, generator, lengths)
    for row, length in enumerate(lengths.tolist()):
        alone = model.infer(mel[row : row + 1, :, :length], 0.8, torch.Generator().manual_seed(2))
        assert torch.allclose(together[row, : length * 32], alone[0], rtol=0, atol=1e-9)
        assert not together[row, length * 32 :].any()


@pytest.mark.parametrize("chunk", [1, 7, 64])
def test_streaming_is_the_whole(chunk):
    model = tiny().prepare()
    mel, _ = inputs()
    whole = model.infer(mel, 0.8, torch.Generator().manual_seed(2))
    pieces = list(model.stream(mel, 0.8, torch.Generator().manual_seed(2), chunk))
    assert len(pieces) == -(-40 // chunk)
    assert torch.allclose(torch.cat(pieces, 1), whole, rtol=0, atol=1e-9)


def test_the_reach_is_exact():
    """Gradients say on what a position depends: as far as `reach`, no farther. Published, it is about a second."""
    model = tiny()
    assert TINY.reach == 5 * (1 + 2 + 4) and WaveGlowConfig().reach == 12 * 255
    assert WaveGlowConfig().reach_frames == 96 + 3
    mel = inputs(frames=60, batch=1)[0].requires_grad_()
    noise = model.noise(60, torch.Generator().manual_seed(2)).double().requires_grad_()
    model.inverse(mel, noise)[0, 120 * 8 : 121 * 8].square().sum().backward()
    positions = noise.grad[0].abs().amax(0).nonzero()[:, 0]
    assert positions.min() == 120 - TINY.reach and positions.max() == 120 + TINY.reach
    frames = mel.grad[0].abs().amax(0).nonzero()[:, 0]
    assert frames.min() >= 30 - TINY.reach_frames and 30 < frames.max() <= 30 + TINY.reach_frames


def test_noise_of_a_longer_sound_begins_the_same():
    model = tiny()
    long = model.noise(50, torch.Generator().manual_seed(7))
    assert torch.equal(model.noise(20, torch.Generator().manual_seed(7)), long[:, :, : 20 * 4])
    assert long.std() == pytest.approx(1, abs=0.05)
    generator = torch.Generator().manual_seed(7)
    assert torch.equal(torch.cat([model.noise(frames, generator) for frames in (8, 12, 30)], 2), long)


def test_prepared_models_compute_the_same():
    model = tiny(dtype=torch.float32)
    mel, _ = inputs(dtype=torch.float32)
    first = model.infer(mel, 0.5, torch.Generator().manual_seed(2))
    with torch.no_grad():
        prepared = model.prepare()
    assert not any(isinstance(module, NormedConv) for module in prepared.modules())
    assert torch.allclose(prepared.infer(mel, 0.5, torch.Generator().manual_seed(2)), first, rtol=0, atol=1e-5)
    rough = tiny(dtype=torch.float32).prepare(torch.bfloat16)
    found = rough.infer(mel, 0.5, torch.Generator().manual_seed(2))
    assert found.dtype == torch.float32 and rough.flows[0].mixing.weight.dtype == torch.float32
    assert (found - first).abs().max() < 0.05 * first.abs().max()


def test_inverses_are_not_out_of_date_after_a_change():
    model = tiny()
    mel, audio = inputs()
    model.inverse(mel, model(mel, audio).z)
    model.flows[0].mixing.weight.data.mul_(1.5)
    assert (model.inverse(mel, model(mel, audio).z) - audio).abs().max() < 1e-9


def test_the_denoiser_takes_the_hum_away():
    model = tiny(dtype=torch.float32).prepare()
    for flow in model.flows:  # a hum that does not depend on the input
        torch.nn.init.zeros_(flow.wn.end.weight)
        flow.wn.end.bias.data.fill_(0.05)
    denoiser = Denoiser(model, 128, 32)
    hum = model.infer(torch.zeros(1, 8, 88), 0.0)
    assert hum.abs().max() > 0.01
    left = denoiser(hum, 1.0)[:, 256:-256]
    assert left.norm() < 0.2 * hum[:, 256:-256].norm()
    tone = torch.sin(torch.arange(4096) * 0.3)[None]
    assert torch.allclose(denoiser(tone, 0.0), tone, atol=1e-5)
    assert (denoiser(tone, 1.0) - tone).abs().max() < 0.3
    assert torch.allclose(denoiser(tone[:, :32], 0.0), tone[:, :32], atol=1e-5)  # shorter than a window


@pytest.mark.parametrize("strength", [0.0, 0.3])
def test_the_vocoder_interface(strength):
    vocoder = WaveGlowVocoder(tiny(dtype=torch.float32), MEL, sigma=0.7, strength=strength, seed=3)
    mel, _ = inputs(dtype=torch.float32)
    whole = vocoder(mel)
    assert whole.shape == (2, 40 * 32) and whole.dtype == torch.float32
    both = vocoder(mel, torch.tensor([40, 23]))
    assert torch.allclose(both[0], whole[0], atol=1e-5) and not both[1, 23 * 32 :].any()
    assert torch.allclose(both[1, : 23 * 32], vocoder(mel[1:, :, :23])[0], atol=1e-5)
    other = WaveGlowVocoder(tiny(dtype=torch.float32), MEL, sigma=0.7, strength=strength, seed=4)
    assert not torch.allclose(other(mel), whole, atol=1e-2)
    with pytest.raises(ValueError, match="makes 32 samples of 8 mels, the spectrograms have 256 and 80"):
        WaveGlowVocoder(tiny(), MelConfig())
    with pytest.raises(ValueError, match="sigma and strength must be at least 0, got -1"):
        WaveGlowVocoder(tiny(), MEL, sigma=-1)


def test_settings_are_checked():
    with pytest.raises(ValueError, match="multiple of group"):
        WaveGlowConfig(hop_length=300, window=1024)
    with pytest.raises(ValueError, match="must be even and leave channels for every flow"):
        WaveGlowConfig(flows=20)
    with pytest.raises(ValueError, match="21 samples are no multiple of the group of 8"):
        tiny()(*[x[:, ..., :21] for x in inputs()])
    with pytest.raises(ValueError, match="3 frames are too few for 800 samples"):
        tiny().condition(torch.zeros(1, 8, 3).double(), 800)


def test_a_step_lowers_the_loss_and_it_learns_a_sound():
    torch.manual_seed(0)
    model = WaveGlow(TINY)
    sound = 0.4 * torch.sin(torch.arange(800) * 0.2)[None] + 0.05 * torch.randn(2, 800)
    batch = AudioBatch(sound, torch.full((2,), 800))
    optimizer = torch.optim.Adam(model.parameters(), lr=4e-3)
    state = VocoderState(model, optimizer, mel=MelSpectrogram(MEL))
    losses = [float(train_vocoder_step(state, [batch])) for _ in range(40)]
    assert losses[1] < losses[0] and losses[-1] < losses[0] - 0.5 and state.step == 40
    assert all(math.isfinite(loss) for loss in losses)
    heard = model.eval().infer(state.mel(sound)[:, :, :25], 0.3, torch.Generator().manual_seed(0))
    assert heard.shape == (2, 800) and heard.abs().max() < 3


def test_the_compact_architecture_trains():
    """Narrowed condition and bands that spread by themselves: every parameter has a gradient."""
    torch.manual_seed(0)
    model = registry.build("waveglow_compact")
    for flow in model.flows:
        torch.nn.init.normal_(flow.wn.end.weight, std=0.01)
    audio = 0.1 * torch.randn(1, 1024)
    likelihood_loss(*model(MelSpectrogram()(audio), audio)).backward()
    assert all(parameter.grad is not None and parameter.grad.abs().sum() > 0 for parameter in model.parameters())


@pytest.mark.gpu
def test_a_captured_step_is_the_eager_step():
    if not torch.cuda.is_available():
        pytest.skip("needs a CUDA device")
    batch = AudioBatch(0.1 * torch.randn(2, 800, device="cuda"), torch.full((2,), 800, device="cuda"))
    losses = []
    for graphed in (False, True):
        model = tiny(dtype=torch.float32).cuda()
        rate = torch.tensor(1e-3, device="cuda")
        optimizer = torch.optim.Adam(model.parameters(), lr=rate, fused=True, capturable=True)
        state = VocoderState(model, optimizer, mel=MelSpectrogram(MEL).cuda())
        step = capture(state, [batch]) if graphed else lambda inputs, state=state: train_vocoder_step(state, inputs)
        losses.append([float(step([batch])) for _ in range(5)])
    assert losses[0] == pytest.approx(losses[1], rel=1e-3) and losses[0][-1] < losses[0][0]
