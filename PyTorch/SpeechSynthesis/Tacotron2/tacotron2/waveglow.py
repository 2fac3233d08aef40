"""WaveGlow (Prenger, Valle and Catanzaro 2018, arXiv:1811.00002): sound of a mel spectrogram, by an invertible network.

Sound in groups of 8 samples is turned into Gaussian noise by 12 flows, each a 1x1 convolution that mixes the channels
and a coupling that scales and shifts half of them by what the other half and the spectrogram say; run backwards it
turns noise into sound. As published by NVIDIA; here the layers of a coupling share one convolution of the spectrogram.

B batch, M mels, F frames, S samples, G group, P positions (S / G), C channels within a coupling.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from .gating import gate


@dataclass(frozen=True)
class WaveGlowConfig:
    """The defaults are those of the published model of 256 channels."""

    num_mels: int = 80
    flows: int = 12
    group: int = 8
    early_every: int = 4  # flows after which channels leave
    early_size: int = 2
    layers: int = 8
    channels: int = 256
    kernel: int = 3
    hop_length: int = 256
    window: int = 1024  # samples that a frame spreads over
    upsample_groups: int = 1  # num_mels: each band is spread by itself, which saves 6.5 M parameters
    condition: int = 0  # width to which the grouped spectrogram is narrowed once for all flows; 0: it is not

    def __post_init__(self) -> None:
        if self.hop_length % self.group or self.window < self.hop_length:
            raise ValueError(
                f"expected a hop_length that is a multiple of group {self.group} and at most window {self.window}, "
                f"got {self.hop_length}"
            )
        if self.kernel % 2 == 0:
            raise ValueError(f"kernel must be odd, got {self.kernel}")
        if self.group % 2 or self.early_size % 2 or min(self.widths) < 2:
            raise ValueError(
                f"group {self.group} and early_size {self.early_size} must be even and leave channels for every flow"
            )

    @property
    def widths(self) -> list[int]:
        """Channels that each flow works on."""
        return [self.group - self.early_size * (flow // self.early_every) for flow in range(self.flows)]

    @property
    def positions_per_frame(self) -> int:
        return self.hop_length // self.group

    @property
    def reach(self) -> int:
        """On how many positions to each side a position depends, through all flows."""
        return self.flows * sum(2**layer * (self.kernel // 2) for layer in range(self.layers))

    @property
    def reach_frames(self) -> int:
        """The same in whole frames, with those before that the upsampling of the spectrogram needs."""
        spread = -(-self.window // self.hop_length) - 1
        return -(-self.reach // self.positions_per_frame) + spread


class Density(NamedTuple):
    """What the training objective needs: noise (B, G, P), the sum of log scales, and of log |det W| of one position."""

    z: Tensor
    log_scales: Tensor
    log_determinants: Tensor


class NormedConv(nn.Module):
    """A convolution whose kernels are directions ``weight_v`` times lengths ``weight_g`` (Salimans, Kingma 2016)."""

    def __init__(self, inputs: int, outputs: int, kernel: int = 1, dilation: int = 1):
        super().__init__()
        plain = nn.Conv1d(inputs, outputs, kernel)
        self.weight_v = nn.Parameter(plain.weight.detach().clone())
        self.weight_g = nn.Parameter(self.weight_v.detach().flatten(1).norm(dim=1).view(-1, 1, 1))
        self.bias = nn.Parameter(plain.bias.detach().clone())
        self.dilation, self.padding = dilation, dilation * (kernel // 2)

    def weight(self) -> Tensor:
        return torch._weight_norm(self.weight_v, self.weight_g, 0)  # one kernel each way on a GPU

    def forward(self, x: Tensor) -> Tensor:
        return F.conv1d(x, self.weight(), self.bias, padding=self.padding, dilation=self.dilation)

    def folded(self) -> nn.Conv1d:
        """The same as an ordinary convolution."""
        weight = self.weight().detach()
        outputs, inputs, kernel = weight.shape
        conv = nn.Conv1d(inputs, outputs, kernel, padding=self.padding, dilation=self.dilation)
        conv.to(weight.device, weight.dtype)
        conv.weight.data.copy_(weight)
        conv.bias.data.copy_(self.bias)
        return conv


class Mixing(nn.Module):
    """The invertible 1x1 convolution (Kingma and Dhariwal 2018); begins as a rotation.

    After `prepare` the inverse is kept; until then it is computed at each use, so that it is never out of date.
    """

    def __init__(self, width: int):
        super().__init__()
        rotation = torch.linalg.qr(torch.randn(width, width)).Q
        rotation[:, 0] *= torch.linalg.det(rotation).sign()
        self.weight = nn.Parameter(rotation.contiguous())
        self.register_buffer("inverse_weight", None, persistent=False)

    def forward(self, x: Tensor) -> Tensor:
        return F.conv1d(x, self.weight.to(x.dtype)[:, :, None])

    def prepare(self) -> None:
        exact = torch.promote_types(self.weight.dtype, torch.float32)
        self.inverse_weight = torch.linalg.inv(self.weight.detach().double()).to(exact)

    def inverse(self, x: Tensor) -> Tensor:
        weight = self.inverse_weight
        if weight is None:
            weight = torch.linalg.inv(self.weight.double())
        return F.conv1d(x, weight.to(x.dtype)[:, :, None])


class WN(nn.Module):
    """The network of a coupling: dilated gated convolutions over positions, conditioned on the spectrogram."""

    def __init__(self, half: int, config: WaveGlowConfig):
        super().__init__()
        width = config.channels
        self.width, self.count = width, config.layers
        self.start = NormedConv(half, width)
        self.condition = NormedConv(config.condition or config.num_mels * config.group, 2 * width * config.layers)
        self.filters = nn.ModuleList(
            NormedConv(width, 2 * width, config.kernel, 2**layer) for layer in range(config.layers)
        )
        last = config.layers - 1
        self.outputs = nn.ModuleList(
            NormedConv(width, width if layer == last else 2 * width) for layer in range(config.layers)
        )
        self.end = nn.Conv1d(width, 2 * half, 1)  # begins at zero: a coupling that leaves all as it is
        nn.init.zeros_(self.end.weight)
        nn.init.zeros_(self.end.bias)

    def forward(self, x: Tensor, condition: Tensor, mask: Tensor | None = None) -> tuple[Tensor, Tensor]:
        """Half of the channels (B, G', P) and the condition (B, M G, P) -> shift, log scale of the other half.

        With ``mask`` (B, 1, P) positions behind an item's end are as if they were not there.
        """
        conditions = self.condition(condition).chunk(self.count, 1)
        x = self.start(x)
        collected = None
        for layer in range(self.count):
            if mask is not None:
                x = x * mask
            found = self.outputs[layer](gate(self.filters[layer](x), conditions[layer]))
            if layer < self.count - 1:
                change, found = found.chunk(2, 1)
                x = x + change
            collected = found if collected is None else collected + found
        shift, log_scale = self.end(collected).chunk(2, 1)
        return shift, log_scale


class Flow(nn.Module):
    """Mixing and coupling."""

    def __init__(self, width: int, config: WaveGlowConfig):
        super().__init__()
        self.mixing = Mixing(width)
        self.wn = WN(width // 2, config)

    def forward(self, x: Tensor, condition: Tensor) -> tuple[Tensor, Tensor]:
        """Channels (B, G', P) one step nearer to noise, and the sum of log scales."""
        kept, changed = self.mixing(x).chunk(2, 1)
        shift, log_scale = self.wn(kept, condition)
        shift, log_scale = shift.to(x.dtype), log_scale.to(x.dtype)
        return torch.cat((kept, changed * log_scale.exp() + shift), 1), log_scale.sum()

    def inverse(self, x: Tensor, condition: Tensor, mask: Tensor | None = None) -> Tensor:
        kept, changed = x.chunk(2, 1)
        shift, log_scale = self.wn(kept.to(condition.dtype), condition, mask)
        shift, log_scale = shift.to(x.dtype), log_scale.to(x.dtype)
        return self.mixing.inverse(torch.cat((kept, (changed - shift) * torch.exp(-log_scale)), 1))


class WaveGlow(nn.Module):
    """Sound into noise for training (`forward`), noise into sound (`inverse`, `infer`)."""

    def __init__(self, config: WaveGlowConfig | None = None):
        super().__init__()
        self.config = config = config or WaveGlowConfig()
        mels = config.num_mels
        self.upsample = nn.ConvTranspose1d(mels, mels, config.window, config.hop_length, groups=config.upsample_groups)
        self.narrow = NormedConv(mels * config.group, config.condition) if config.condition else nn.Identity()
        self.flows = nn.ModuleList(Flow(width, config) for width in config.widths)

    def condition(self, mel: Tensor, samples: int | None = None) -> Tensor:
        """The spectrogram (B, M, F) at the rate of the positions, (B, M G or narrower, P), for F hops or ``samples``.

        What the last frame spreads beyond its hop is cut off, so a sample never depends on frames behind its own.
        """
        config = self.config
        length = mel.shape[2] * config.hop_length if samples is None else samples
        wide = self.upsample(mel.to(self.upsample.weight.dtype))[:, :, :length]
        if wide.shape[2] < length:
            raise ValueError(f"{mel.shape[2]} frames are too few for {length} samples")
        grouped = wide.unflatten(2, (-1, config.group))  # B M P G
        return self.narrow(grouped.transpose(2, 3).flatten(1, 2))

    def forward(self, mel: Tensor, audio: Tensor) -> Density:
        """``mel`` (B, M, F) of ``audio`` (B, S) in -1..1, S a multiple of the group, at most what F frames spread."""
        config = self.config
        if audio.shape[1] % config.group:
            raise ValueError(f"{audio.shape[1]} samples are no multiple of the group of {config.group}")
        condition = self.condition(mel, audio.shape[1])
        x = audio.unflatten(1, (-1, config.group)).transpose(1, 2)  # sound and its determinants stay in float32
        noise, log_scales = [], x.new_zeros(())
        for number, flow in enumerate(self.flows):
            if number and number % config.early_every == 0:
                noise.append(x[:, : config.early_size])
                x = x[:, config.early_size :]
            x, scales = flow(x, condition)
            x, log_scales = x.to(audio.dtype), log_scales + scales
        return Density(torch.cat((*noise, x), 1), log_scales, self.log_determinants().to(x.dtype))

    def log_determinants(self) -> Tensor:
        """The sum of log |det W| over the mixings, in float32 or more: of one batch, made equally large by ones."""
        weights = [flow.mixing.weight for flow in self.flows]
        exact = torch.promote_types(weights[0].dtype, torch.float32)
        large = []
        for weight in weights:
            rest = self.config.group - len(weight)
            ones = torch.ones(rest, dtype=exact, device=weight.device).diag()
            large.append(F.pad(weight.to(exact), (0, rest, 0, rest)) + F.pad(ones, (len(weight), 0, len(weight), 0)))
        return torch.linalg.slogdet(torch.stack(large)).logabsdet.sum()

    def inverse(self, mel: Tensor, z: Tensor, lengths: Tensor | None = None) -> Tensor:
        """Noise (B, G, P) in the order of `Density` and ``mel`` (B, M, P / positions_per_frame) -> sound (B, S).

        With ``lengths`` (B,) in frames an item is what it would be alone, then 0.
        """
        config = self.config
        condition = self.condition(mel, z.shape[2] * config.group)
        mask = None
        if lengths is not None:
            positions = torch.arange(z.shape[2], device=z.device)
            mask = (positions < lengths[:, None] * config.positions_per_frame)[:, None]
        parts = list(z.split([config.early_size] * ((config.flows - 1) // config.early_every) + [config.widths[-1]], 1))
        x = parts.pop()
        for number in reversed(range(config.flows)):
            x = self.flows[number].inverse(x, condition, mask)
            if number and number % config.early_every == 0:
                x = torch.cat((parts.pop(), x), 1)
        if mask is not None:
            x = x * mask
        return x.transpose(1, 2).flatten(1)

    def noise(self, frames: int, generator: torch.Generator | None = None) -> Tensor:
        """Standard Gaussian noise for so many frames, float32 (1, G, P).

        Frame after frame, so that a generator on the CPU gives a longer sound's beginning the same noise.
        """
        device = self.upsample.weight.device
        place = generator.device if generator is not None else device
        shape = (frames * self.config.positions_per_frame, self.config.group)
        return torch.randn(shape, generator=generator, device=place).to(device).T[None]

    @torch.no_grad()
    def infer(
        self,
        mel: Tensor,
        sigma: float = 1.0,
        generator: torch.Generator | None = None,
        lengths: Tensor | None = None,
        noise: Tensor | None = None,
    ) -> Tensor:
        """Sound float32 (B, F * hop_length) of spectrograms (B, M, F), with noise of deviation ``sigma``.

        Every item of a batch begins with the same noise, so that it does not depend on its neighbours; ``noise``
        (B or 1, G, P) takes the place of the drawn one.
        """
        if noise is None:
            noise = self.noise(mel.shape[2], generator)
        exact = torch.promote_types(self.upsample.weight.dtype, torch.float32)
        return self.inverse(mel, sigma * noise.expand(len(mel), -1, -1).to(exact), lengths).to(exact)

    @torch.no_grad()
    def stream(
        self, mel: Tensor, sigma: float = 1.0, generator: torch.Generator | None = None, chunk: int = 64
    ) -> Iterator[Tensor]:
        """The sound of `infer` in pieces of ``chunk`` frames, the last one shorter: (B, frames * hop_length) each.

        Each piece is computed with as many frames around it as it depends on, so that together they are the whole.
        """
        noise = self.noise(mel.shape[2], generator)
        for first in range(0, mel.shape[2], chunk):
            yield self.part(mel, noise, first, min(first + chunk, mel.shape[2]), sigma)

    @torch.no_grad()
    def part(self, mel: Tensor, noise: Tensor, first: int, end: int, sigma: float = 1.0) -> Tensor:
        """The sound of frames ``first`` to ``end`` of what `infer` gives of all, (B, (end - first) * hop_length)."""
        config, reach = self.config, self.config.reach_frames
        low, high = max(0, first - reach), min(mel.shape[2], end + reach)
        per = config.positions_per_frame
        sound = self.infer(mel[:, :, low:high], sigma, noise=noise[:, :, low * per : high * per])
        return sound[:, (first - low) * config.hop_length : (end - low) * config.hop_length]

    @torch.no_grad()
    def prepare(self, dtype: torch.dtype | None = None) -> WaveGlow:
        """Make this model ready for inference, for good: weight norms multiplied out, inverses kept. Returns it.

        ``dtype`` is of the convolutions; the sound itself, and what mixes it, stay in float32.
        """
        for module in list(self.modules()):
            if isinstance(module, Mixing):
                module.prepare()
            for name, child in list(module.named_children()):
                if isinstance(child, NormedConv):
                    setattr(module, name, child.folded())
        if dtype is not None:
            for module in (self.upsample, self.narrow, *(flow.wn for flow in self.flows)):
                module.to(dtype)
        return self.eval().requires_grad_(False)


class Denoiser(nn.Module):
    """Takes away the hum that WaveGlow makes of silence: its spectrum is subtracted (NVIDIA's denoiser)."""

    def __init__(self, model: WaveGlow, n_fft: int = 1024, hop_length: int = 256, frames: int = 88):
        super().__init__()
        self.n_fft, self.hop_length = n_fft, hop_length
        device = model.upsample.weight.device
        self.register_buffer("window", torch.hann_window(n_fft, device=device), persistent=False)
        silent = torch.zeros(1, model.config.num_mels, frames, device=device)
        hum = model.infer(silent, sigma=0.0).float()
        self.register_buffer("bias", self._transform(hum).abs()[:, :, :1], persistent=False)

    def _transform(self, audio: Tensor) -> Tensor:
        return torch.stft(audio, self.n_fft, self.hop_length, window=self.window, return_complex=True)

    def forward(self, audio: Tensor, strength: float = 0.1) -> Tensor:
        """(B, S) -> (B, S), float32. ``strength`` 0 leaves all as it is."""
        padded = F.pad(audio.float(), (0, max(0, self.n_fft - audio.shape[1])))  # a transform needs its window
        spectrum = self._transform(padded)
        size = spectrum.abs()
        lowered = (size - strength * self.bias).clamp(min=0)
        spectrum = spectrum * (lowered / size.clamp(min=1e-12))
        cleaned = torch.istft(spectrum, self.n_fft, self.hop_length, window=self.window, length=padded.shape[1])
        return cleaned[:, : audio.shape[1]]
