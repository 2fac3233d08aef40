"""Published layouts: modules that name their tensors as those files do, loaded strictly, with equal outputs."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import nn

from dlx import weights
from dlx.speech.mel import MelConfig
from tacotron2 import pretrained, registry
from tacotron2.convert import to_canonical
from tacotron2.decoding import decode, dropout
from tacotron2.model import Tacotron2, Tacotron2Config
from tacotron2.waveglow import WaveGlow, WaveGlowConfig

GOLDEN = Path(__file__).parent / "golden" / "torchaudio_tacotron2.npz"
TINY = Tacotron2Config(
    num_symbols=20, num_mels=8, encoder=16, prenet=12, rnn=24, attention=10, location_filters=4, location_kernel=5,
    postnet=16,
)  # fmt: skip


# Tacotron 2 as in the published files: one text, one step after the other


class Inside(nn.Module):
    """A layer within a module that adds a name to its path."""

    def __init__(self, name: str, layer: nn.Module):
        super().__init__()
        setattr(self, name, layer)
        self.name = name

    def forward(self, x):
        return getattr(self, self.name)(x)


class Named(nn.Module):
    """Modules under given names."""

    def __init__(self, **modules: nn.Module):
        super().__init__()
        for name, module in modules.items():
            setattr(self, name, module)


class PublishedTacotron2(nn.Module):
    """``wraps``: with NVIDIA's wrapped layers, else as torchaudio has them."""

    def __init__(self, c: Tacotron2Config, wraps: bool):
        super().__init__()
        self.c = c

        def linear(a: int, b: int, bias: bool = True) -> nn.Module:
            layer = nn.Linear(a, b, bias)
            return Inside("linear_layer", layer) if wraps else layer

        def conv(a: int, b: int, k: int, bias: bool = True) -> nn.Module:
            layer = nn.Conv1d(a, b, k, padding=k // 2, bias=bias)
            return Inside("conv", layer) if wraps else layer

        def stack(widths: list[int]) -> nn.Module:
            pairs = zip(widths[:-1], widths[1:], strict=True)
            return nn.ModuleList(nn.Sequential(conv(a, b, c.kernel), nn.BatchNorm1d(b)) for a, b in pairs)

        self.embedding = nn.Embedding(c.num_symbols, c.encoder)
        self.encoder = Named(
            convolutions=stack([c.encoder] * 4),
            lstm=nn.LSTM(c.encoder, c.encoder // 2, batch_first=True, bidirectional=True),
        )
        prenet = nn.ModuleList([linear(c.num_mels, c.prenet, False), linear(c.prenet, c.prenet, False)])
        self.decoder = Named(
            prenet=Named(layers=prenet),
            attention_rnn=nn.LSTMCell(c.prenet + c.encoder, c.rnn),
            attention_layer=Named(
                query_layer=linear(c.rnn, c.attention, False),
                memory_layer=linear(c.encoder, c.attention, False),
                v=linear(c.attention, 1, False),
                location_layer=Named(
                    location_conv=conv(2, c.location_filters, c.location_kernel, False),
                    location_dense=linear(c.location_filters, c.attention, False),
                ),
            ),
            decoder_rnn=nn.LSTMCell(c.rnn + c.encoder, c.rnn),
            linear_projection=linear(c.rnn + c.encoder, c.num_mels),
            gate_layer=linear(c.rnn + c.encoder, 1),
        )
        self.postnet = Named(convolutions=stack([c.num_mels] + [c.postnet] * 4 + [c.num_mels]))

    def speak(self, text: torch.Tensor, keep: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """(1, T) symbols -> spectrogram (1, M, F) after the postnet, alignments (F, T); F steps as `keep` has."""
        d, a = self.decoder, self.decoder.attention_layer
        x = self.embedding(text).transpose(1, 2)
        for layer in self.encoder.convolutions:
            x = F.relu(layer(x))
        memory, _ = self.encoder.lstm(x.transpose(1, 2))
        processed = a.memory_layer(memory)
        frame, context = torch.zeros(1, self.c.num_mels).to(memory), torch.zeros(1, self.c.encoder).to(memory)
        first = second = None
        weights = total = torch.zeros(1, text.shape[1]).to(memory)
        frames, alignments = [], []
        for factors in keep:
            for number, layer in enumerate(d.prenet.layers):
                frame = F.relu(layer(frame)) * factors[:, number]
            first = d.attention_rnn(torch.cat((frame, context), -1), first)
            history = torch.stack((weights, total), 1)
            location = a.location_layer.location_dense(a.location_layer.location_conv(history).transpose(1, 2))
            energies = a.v(torch.tanh(a.query_layer(first[0].unsqueeze(1)) + location + processed)).squeeze(-1)
            weights = F.softmax(energies, 1)
            total = total + weights
            context = (weights.unsqueeze(1) @ memory).squeeze(1)
            second = d.decoder_rnn(torch.cat((first[0], context), -1), second)
            frame = d.linear_projection(torch.cat((second[0], context), 1))
            frames.append(frame)
            alignments.append(weights[0])
        mel = x = torch.stack(frames, 2)
        for number, layer in enumerate(self.postnet.convolutions):
            x = layer(x) if number == 4 else torch.tanh(layer(x))
        return mel + x, torch.stack(alignments)


def published_tacotron2(wraps: bool) -> PublishedTacotron2:
    torch.manual_seed(0)
    model = PublishedTacotron2(TINY, wraps).double().eval()
    for module in model.modules():
        if isinstance(module, nn.BatchNorm1d):
            module.running_mean.uniform_(-0.5, 0.5)
            module.running_var.uniform_(0.5, 2)
    gate = model.decoder.gate_layer
    (gate.linear_layer if wraps else gate).bias.data.fill_(-20)
    return model


@pytest.mark.parametrize("wraps", [True, False], ids=["nvidia", "torchaudio"])
@pytest.mark.parametrize("prefix", ["", "module.", "module.1."])
def test_tacotron2_layouts(tmp_path, wraps, prefix):
    published = published_tacotron2(wraps)
    content = {"epoch": 3, "config": {"n_mel_channels": 8}, "cuda_rng_state_all": torch.zeros(3)}
    state_dict = {prefix + name: value for name, value in published.state_dict().items()}
    torch.save(content | {"state_dict": state_dict}, tmp_path / "published.pt")
    model = Tacotron2(TINY).double().eval()
    report = weights.load_into(model, to_canonical(weights.load_state_dict(tmp_path / "published.pt")))
    assert report.complete
    text = torch.randint(1, 20, (1, 7))
    keep = dropout(model, 25, 1, torch.Generator().manual_seed(3))
    expected, alignments = published.speak(text, keep)
    with pytest.warns(UserWarning, match="cut at the limit"):
        found = decode(model, text, torch.tensor([7]), generator=torch.Generator().manual_seed(3), limit=25)
    assert torch.allclose(found.refined, expected, rtol=0, atol=1e-10)
    assert torch.allclose(found.alignments[0], alignments, rtol=0, atol=1e-10)


def test_what_does_not_fit_is_named(tmp_path):
    published = published_tacotron2(True).state_dict()
    published["decoder.surprise"] = torch.zeros(1)
    del published["postnet.convolutions.4.1.bias"]
    with pytest.raises(weights.WeightMismatch) as caught:
        weights.load_into(Tacotron2(replace(TINY, prenet=16)).double(), to_canonical(published))
    text = str(caught.value)
    assert "decoder.surprise: not in the model" in text and "postnet.layers.4.norm.bias: missing" in text
    assert "decoder.prenet.layers.0.weight: [12, 8] in the file, [16, 8] in the model" in text


# WaveGlow as in the published files


class PublishedWN(nn.Module):
    def __init__(self, half: int, c: WaveGlowConfig, wide: bool):
        super().__init__()
        normed = nn.utils.weight_norm
        self.c, self.wide = c, wide
        self.start = normed(nn.Conv1d(half, c.channels, 1))
        self.end = nn.Conv1d(c.channels, 2 * half, 1)
        rates = [2**layer for layer in range(c.layers)]
        self.in_layers = nn.ModuleList(
            normed(nn.Conv1d(c.channels, 2 * c.channels, 3, dilation=d, padding=d)) for d in rates
        )
        self.res_skip_layers = nn.ModuleList(
            normed(nn.Conv1d(c.channels, c.channels * (1 + (layer < c.layers - 1)), 1)) for layer in range(c.layers)
        )
        if wide:
            self.cond_layer = normed(nn.Conv1d(c.num_mels * c.group, 2 * c.channels * c.layers, 1))
        else:
            self.cond_layers = nn.ModuleList(normed(nn.Conv1d(c.num_mels * c.group, 2 * c.channels, 1)) for _ in rates)

    def forward(self, audio, spect):
        audio, output, n = self.start(audio), 0, self.c.channels
        for i in range(self.c.layers):
            if self.wide:
                condition = self.cond_layer(spect)[:, i * 2 * n : (i + 1) * 2 * n]
            else:
                condition = self.cond_layers[i](spect)
            acts = self.in_layers[i](audio) + condition
            found = self.res_skip_layers[i](torch.tanh(acts[:, :n]) * torch.sigmoid(acts[:, n:]))
            if i < self.c.layers - 1:
                audio, output = audio + found[:, :n], output + found[:, n:]
            else:
                output = output + found
        return self.end(output)


class PublishedWaveGlow(nn.Module):
    def __init__(self, c: WaveGlowConfig, wide: bool):
        super().__init__()
        self.c = c
        self.upsample = nn.ConvTranspose1d(c.num_mels, c.num_mels, c.window, stride=c.hop_length)
        self.WN = nn.ModuleList(PublishedWN(width // 2, c, wide) for width in c.widths)
        self.convinv = nn.ModuleList(Inside("conv", nn.Conv1d(width, width, 1, bias=False)) for width in c.widths)

    def spread(self, mel, length):
        spect = self.upsample(mel)[:, :, :length].unfold(2, self.c.group, self.c.group).permute(0, 2, 1, 3)
        return spect.contiguous().view(spect.size(0), spect.size(1), -1).permute(0, 2, 1)

    def forward(self, mel, audio):
        """z (B, G, P) and the loss with sigma 1."""
        spect = self.spread(mel, audio.shape[1])
        audio = audio.unfold(1, self.c.group, self.c.group).permute(0, 2, 1)
        out, log_s_total, log_det_total = [], 0, 0
        for k in range(self.c.flows):
            if k % self.c.early_every == 0 and k > 0:
                out.append(audio[:, : self.c.early_size])
                audio = audio[:, self.c.early_size :]
            audio = self.convinv[k](audio)
            matrix = self.convinv[k].conv.weight.squeeze()
            log_det_total = log_det_total + audio.shape[0] * audio.shape[2] * torch.linalg.slogdet(matrix)[1]
            half = audio.shape[1] // 2
            output = self.WN[k](audio[:, :half], spect)
            log_s, b = output[:, half:], output[:, :half]
            audio = torch.cat((audio[:, :half], torch.exp(log_s) * audio[:, half:] + b), 1)
            log_s_total = log_s_total + log_s.sum()
        z = torch.cat((*out, audio), 1)
        return z, ((z * z).sum() / 2 - log_s_total - log_det_total) / z.numel()


WAVE = WaveGlowConfig(num_mels=8, flows=5, early_every=2, layers=3, channels=12, hop_length=32, window=128)


@pytest.mark.filterwarnings("ignore:.*weight_norm")
@pytest.mark.parametrize("kind", ["new", "old", "folded", "parametrized"])
def test_waveglow_layouts(tmp_path, kind):
    torch.manual_seed(0)
    published = PublishedWaveGlow(WAVE, wide=kind == "old").double()
    state_dict = published.state_dict()
    if kind in ("folded", "parametrized"):
        changed = {}
        for name, value in state_dict.items():
            if name.endswith("weight_g"):
                direction = state_dict[name[:-1] + "v"]
                if kind == "folded":
                    changed[name[:-2]] = direction * value / direction.norm(dim=(1, 2), keepdim=True)
                else:
                    changed[name.replace("weight_g", "parametrizations.weight.original0")] = value
                    changed[name.replace("weight_g", "parametrizations.weight.original1")] = direction
            elif not name.endswith("weight_v"):
                changed[name] = value
        state_dict = changed
    state_dict = {"module." + name: value for name, value in state_dict.items()}
    torch.save({"state_dict": state_dict, "epoch": 1}, tmp_path / "published.pt")
    model = WaveGlow(WAVE).double()
    loaded = to_canonical(weights.load_state_dict(tmp_path / "published.pt"))
    assert weights.load_into(model, loaded).complete
    mel, audio = torch.randn(2, 8, 12).double(), torch.randn(2, 12 * 32).double()
    z, loss = published(mel, audio)
    density = model(mel, audio)
    assert torch.allclose(density.z, z, rtol=0, atol=1e-10)
    positions = z.shape[0] * z.shape[2]
    ours = (density.z.square().sum() / 2 - density.log_scales - positions * density.log_determinants) / z.numel()
    assert float(ours.detach()) == pytest.approx(float(loss.detach()), rel=1e-9)


# Files


def test_bare_files_are_recognised(tmp_path):
    torch.manual_seed(0)
    for arch in ("tacotron2_compact", "waveglow_compact"):
        torch.save(registry.build(arch).state_dict(), tmp_path / f"{arch}.pt")
        found = pretrained.load(tmp_path / f"{arch}.pt")
        assert found.arch == arch and found.mel == MelConfig() and not found.model.training
    small = registry.build("tacotron2_compact", 38)
    torch.save(small.state_dict(), tmp_path / "characters.pt")
    found = pretrained.load(tmp_path / "characters.pt")
    assert found.front_end.symbols.symbols[-1] == "z" and len(found.front_end.symbols) == 38
    assert found.front_end.encode("hi there")[:2] == [19, 20]
    torch.save(registry.build("tacotron2_compact", 50).state_dict(), tmp_path / "other.pt")
    with pytest.raises(ValueError, match="which 50 symbols it reads is not known"):
        pretrained.load(tmp_path / "other.pt")
    torch.save({"a": torch.zeros(2)}, tmp_path / "none.pt")
    with pytest.raises(ValueError, match="neither a Tacotron 2 nor a WaveGlow among its 1 tensors"):
        pretrained.load(tmp_path / "none.pt")
    with pytest.raises(ValueError, match="nowhere: no folder, no file, and no name of published weights"):
        pretrained.load("nowhere")
    with pytest.raises(ValueError, match="holds a waveglow_compact, which is a vocoder"):
        pretrained.load_voice(tmp_path / "waveglow_compact.pt")


# torchaudio


@pytest.mark.skipif(not GOLDEN.is_file(), reason="lacks golden/torchaudio_tacotron2.npz (golden/make_torchaudio.py)")
def test_torchaudios_tacotron2():
    """Its weights, its outputs with given frames and with its own, recorded with the version that `version` names."""
    stored = np.load(GOLDEN)
    config = Tacotron2Config(**json.loads(str(stored["config"])))
    model = Tacotron2(config).eval()
    state_dict = {name[7:]: torch.from_numpy(stored[name]) for name in stored.files if name.startswith("weight.")}
    assert weights.load_into(model, to_canonical(state_dict)).complete
    text, lengths = torch.from_numpy(stored["text"]), torch.from_numpy(stored["text_lengths"])
    mel, mel_lengths = torch.from_numpy(stored["mel"]), torch.from_numpy(stored["mel_lengths"])
    keep = torch.from_numpy(stored["keep"])
    with torch.no_grad():
        found = model(text, lengths, mel, mel_lengths, keep)
    for name, ours in (("mel_out", found.mel), ("refined", found.refined), ("gate", found.gate)):
        assert torch.allclose(ours, torch.from_numpy(stored[name]), rtol=0, atol=2e-5), name
    assert torch.allclose(found.alignments, torch.from_numpy(stored["alignments"]), rtol=0, atol=1e-5)
