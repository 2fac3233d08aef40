"""HiFi-GAN's generator: the paper's network spelled out again, published key layouts, batches; published weights."""

import copy

import numpy as np
import pytest

torch = pytest.importorskip("torch")
from torch.nn import functional as F  # noqa: E402

from dlx import weights  # noqa: E402
from dlx.speech import fast_vocoder, vocoder  # noqa: E402
from dlx.speech.mel import MelConfig, MelSpectrogram  # noqa: E402
from dlx.speech.vocoder import GriffinLim, HifiGan, HifiGanConfig, audible  # noqa: E402

SMALL = HifiGanConfig(16, (4, 2), (8, 4), (3, 5), (1, 3), num_mels=10)
SMALL_MEL = MelConfig(8000, 32, 8, 32, 10, 0, 4000, padding="same")


def small(seed=0):
    torch.manual_seed(seed)
    model = HifiGan(SMALL, SMALL_MEL).eval()
    for parameter in model.parameters():  # as they come, the output would be next to nothing
        parameter.data *= 2
    return model


def paper(state, mel):
    """Section 2 of the paper, function by function, in float64, on the authors' tensors with weight normalisation."""

    def weight(name):
        v, g = state[name + ".weight_v"], state[name + ".weight_g"]
        return g * v / v.square().sum(tuple(range(1, v.dim())), keepdim=True).sqrt()

    def conv(name, x, dilation=1):
        kernel = weight(name)
        padding = dilation * (kernel.shape[2] - 1) // 2
        return F.conv1d(x, kernel, state[name + ".bias"], padding=padding, dilation=dilation)

    def leaky(x, slope):
        return torch.maximum(x, slope * x)

    x = conv("conv_pre", mel)
    for stage, (rate, kernel) in enumerate(zip(SMALL.upsample_rates, SMALL.upsample_kernels, strict=True)):
        name = f"ups.{stage}"
        x = F.conv_transpose1d(leaky(x, 0.1), weight(name), state[name + ".bias"], rate, (kernel - rate) // 2)
        total = 0
        for block in range(2):
            y = x
            for number, dilation in enumerate(SMALL.resblock_dilations):
                where = f"resblocks.{2 * stage + block}"
                inner = conv(f"{where}.convs1.{number}", leaky(y, 0.1), dilation)
                y = y + conv(f"{where}.convs2.{number}", leaky(inner, 0.1))
            total = total + y
        x = total / 2
    return torch.tanh(conv("conv_post", leaky(x, 0.01)))[:, 0]


def with_weight_norm(state):
    """Like a file of the authors: each kernel as magnitude and (another) direction."""
    found = {}
    for name, tensor in state.items():
        if name.endswith("weight"):
            norm = tensor.flatten(1).norm(dim=1).view(-1, 1, 1)
            found |= {name + "_g": norm, name + "_v": 3.7 * tensor}
        else:
            found[name] = tensor
    return found


def test_against_the_paper():
    model = small()
    state = {name: tensor.double() for name, tensor in with_weight_norm(model.state_dict()).items()}
    mel = torch.randn(2, 10, 23)
    expected = paper(state, mel.double())
    assert expected.abs().mean() > 0.01
    torch.testing.assert_close(model(mel).double(), expected, atol=1e-5, rtol=0)
    other = small(1)
    weights.load_into(other, vocoder.to_canonical(with_weight_norm(model.state_dict()), blocks=2))
    torch.testing.assert_close(other(mel), model(mel), atol=1e-6, rtol=0)


def nvidia_layout(state):
    """Blocks counted per stage; kernels with one dimension more, as in old files."""
    found = {}
    for name, tensor in state.items():
        if name.startswith("resblocks."):
            _, number, rest = name.split(".", 2)
            name = f"resblocks.{int(number) // 2}.{int(number) % 2}.{rest}"
        found[name] = tensor[..., None] if "weight" in name else tensor
    return found


def test_key_layouts(tmp_path, monkeypatch):
    model = small()
    mel = torch.randn(1, 10, 9)
    normed = torch.nn.utils.parametrizations.weight_norm
    newer = copy.deepcopy(model)
    for module in list(newer.modules()):
        if isinstance(module, torch.nn.Conv1d | torch.nn.ConvTranspose1d):
            normed(module)
    layouts = {
        "plain": model.state_dict(), "NVIDIA": nvidia_layout(with_weight_norm(model.state_dict())),
        "parametrised": newer.state_dict(),
    }  # fmt: skip
    for name, state in layouts.items():
        other = small(3)
        weights.load_into(other, vocoder.to_canonical(state, blocks=2))
        torch.testing.assert_close(other(mel), model(mel), atol=1e-6, rtol=0, msg=name)
    with pytest.raises(ValueError, match="ups.0.weight_g has no ups.0.weight_v"):
        vocoder.fold_weight_norm({"ups.0.weight_g": torch.ones(1)})


def test_published_files_are_found_inside(tmp_path):
    state = small().state_dict()
    zeros = {name: torch.zeros_like(tensor) for name, tensor in state.items()}
    files = {
        "authors": {"generator": with_weight_norm(state)},
        "nvidia": {"generator": zeros, "gen_ema": state, "config": {}},
        "nvidia without averages": {"generator": state, "gen_ema": None},
        "bare": state,
    }
    for name, content in files.items():
        torch.save(content, tmp_path / "x.pt")
        found = vocoder.load_state(tmp_path / "x.pt")
        assert found.keys() == state.keys(), name
        for key, tensor in state.items():
            torch.testing.assert_close(found[key], tensor, atol=1e-6, rtol=0)
    (tmp_path / "x.pt").write_bytes(b"nonsense")
    with pytest.raises(ValueError, match="neither a safetensors nor a torch file"):
        vocoder.load_state(tmp_path / "x.pt")


def test_a_padded_batch_is_its_items():
    model, lengths = small(), torch.tensor([20, 7, 1])
    mel = torch.randn(3, 10, 20)
    found = model(mel, lengths)
    assert found.shape == (3, 160)
    for row, length in enumerate(lengths.tolist()):
        torch.testing.assert_close(
            found[row, : 8 * length], model(mel[row : row + 1, :, :length])[0], atol=1e-6, rtol=0
        )
        assert (found[row, 8 * length :] == 0).all()
    torch.testing.assert_close(model(mel, torch.full((3,), 20)), model(mel), atol=0, rtol=0)


def test_half_precision():
    model, mel = small(), torch.randn(2, 10, 20)
    found = model.bfloat16()(mel, torch.tensor([20, 7]))
    assert found.dtype == torch.float32
    torch.testing.assert_close(found, small()(mel, torch.tensor([20, 7])), atol=0.1, rtol=0)


def test_every_step_of_the_ladder_says_the_same():
    model = small().eval()
    mel, lengths = torch.randn(2, 10, 9), torch.tensor([9, 4])
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    steps = fast_vocoder.ladder(model, torch.float64)
    with torch.no_grad():
        expected, padded = model(mel), model(mel, lengths)
        found = {name: step(mel) for name, step in steps.items() if not isinstance(step, str)}
        assert list(found) == ["weight norm, fp32", "folded", "+ float64", "+ channels last"]
        for audio in found.values():
            torch.testing.assert_close(audio, expected, atol=1e-5, rtol=0)
        torch.testing.assert_close(steps["+ channels last"](mel, lengths), padded, atol=1e-5, rtol=0)
    assert (padded[1, 32:] == 0).all() and (padded[0, 32:] != 0).any()
    assert any("original0" in name for name in steps["weight norm, fp32"].state_dict())
    assert steps["+ channels last"].conv_pre.weight.is_contiguous(memory_format=torch.channels_last)
    assert "CUDA device" in steps["+ CUDA graph"] and "CUDA device" in steps["fused kernels + CUDA graph"]
    assert all(torch.equal(tensor, before[name]) for name, tensor in model.state_dict().items())


def test_griffin_lim_has_the_same_interface():
    mel = MelSpectrogram()(0.1 * torch.randn(2, 4000))
    made = vocoder.load("griffin-lim")
    assert isinstance(made, GriffinLim) and made.mel == MelConfig()
    lengths = torch.tensor([mel.shape[2], 9])
    audio = made(mel, lengths)
    assert audio.shape == (2, mel.shape[2] * 256) == made(mel).shape
    torch.testing.assert_close(audio[1, : 9 * 256], made(mel[1:, :, :9])[0], atol=0, rtol=0)
    assert (audio[1, 9 * 256 :] == 0).all()


def test_what_does_not_fit_is_refused():
    with pytest.raises(ValueError, match="makes 256 samples of 80 mels, the spectrograms have 200 and 80"):
        HifiGan(mel=MelConfig(hop_length=200))
    with pytest.raises(ValueError, match=r"\(B, 10, F\)"):
        small()(torch.zeros(1, 80, 4))
    with pytest.raises(ValueError, match="hifigan_v1.universal"):
        vocoder.load("hifigan_v1.universe")
    with pytest.raises(ValueError, match="halved"):
        HifiGanConfig(channels=100, upsample_rates=(8, 8, 4), upsample_kernels=(16, 16, 8))


def test_cards():
    for tag in ("ljspeech", "universal"):
        card = weights.card(f"hifigan_v1.{tag}")
        assert MelConfig.from_dict(card.preprocessing["mel"]) == MelConfig(padding="same")
    with torch.device("meta"):
        assert sum(p.numel() for p in HifiGan().parameters()) == 13_926_017  # V1's 13.92 million of the paper's table


@pytest.mark.slow
@pytest.mark.parametrize(("name", "limit"), [("hifigan_v1.universal", 0.31), ("hifigan_v1.ljspeech", 0.38)])
def test_published_weights_copy_a_voice(name, limit):
    """Downloads 104 MB and flite. As the cards say, 0.28 and 0.345 on average; a man's voice (rms): 0.28 and 0.45."""
    pytest.importorskip("soundfile")
    from dlx.speech import flite

    sentences = ["He cut the cake with a big, sharp knife.", "The old man sat nodding by the fireplace."]
    model = vocoder.load(name)
    spectrogram = MelSpectrogram(model.mel)
    errors = []
    for sentence in sentences:
        spoken = flite.open_flite().speak(sentence, "slt", sample_rate=22050)
        mel = spectrogram(torch.from_numpy(spoken.audio)[None])
        with torch.inference_mode():
            audio = model(mel)
        errors.append(float((spectrogram(audio) - mel).abs().mean()))
        assert np.isfinite(audio.numpy()).all() and audio.abs().max() <= 1
    assert np.mean(errors) < limit


@pytest.mark.gpu
def test_the_gpu_agrees():
    model, mel, lengths = small(), torch.randn(2, 10, 20), torch.tensor([20, 7])
    expected = model(mel, lengths)
    torch.testing.assert_close(model.cuda()(mel.cuda(), lengths.cuda()).cpu(), expected, atol=2e-3, rtol=0)


def test_fresh_weights_can_be_heard():
    torch.manual_seed(0)
    mel = torch.randn(1, 80, 12)
    model = HifiGan().eval().requires_grad_(False)
    faint = model(mel).std()
    loud = audible(model)(mel).std()
    assert faint < 0.05 and 0.3 < loud < 1
