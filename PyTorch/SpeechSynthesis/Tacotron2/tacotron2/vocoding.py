"""WaveGlow behind the interface of `dlx.speech.vocoder`: with its noise, its deviation and the denoiser."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from dlx.speech.mel import MelConfig

from . import fast_waveglow
from .waveglow import Denoiser, WaveGlow

ENGINES = ("auto", "plain", "fused")
SIGMA, STRENGTH = 0.9, 0.01
DENOISER_REACH = 4  # frames: a transform and its inverse


class WaveGlowVocoder(nn.Module):
    """Spectrograms (B, M, F) -> sound (B, F * hop_length), float32; ``seed`` decides on the noise.

    ``model`` is made ready for inference, for good, its convolutions in ``dtype``. ``strength`` 0 leaves the denoiser
    out. ``engine``: "plain" PyTorch, or "fused" kernels as CUDA graphs; "auto" is these where they apply.
    """

    def __init__(
        self,
        model: WaveGlow,
        mel: MelConfig,
        sigma: float = SIGMA,
        strength: float = STRENGTH,
        seed: int = 0,
        dtype: torch.dtype | None = None,
        engine: str = "auto",
    ):
        super().__init__()
        if mel.hop_length != model.config.hop_length or mel.num_mels != model.config.num_mels:
            raise ValueError(
                f"the WaveGlow makes {model.config.hop_length} samples of {model.config.num_mels} mels, the "
                f"spectrograms have {mel.hop_length} and {mel.num_mels}"
            )
        if sigma < 0 or strength < 0:
            raise ValueError(f"sigma and strength must be at least 0, got {sigma} and {strength}")
        if engine not in ENGINES:
            raise ValueError(f"unknown engine {engine!r}; known: {', '.join(ENGINES)}")
        self.model, self.mel, self.sigma, self.strength, self.seed = model.prepare(dtype), mel, sigma, strength, seed
        fused = engine == "fused" or (engine == "auto" and fast_waveglow.applies(self.model))
        self.fast = fast_waveglow.FastWaveGlow(self.model) if fused else None
        self.denoiser = Denoiser(model, mel.n_fft, mel.hop_length) if strength else None
        self._drawn: Tensor | None = None

    @property
    def reach(self) -> int:
        """On how many frames to each side a sample depends."""
        return self.model.config.reach_frames + (DENOISER_REACH if self.denoiser is not None else 0)

    def noise(self, frames: int) -> Tensor:
        """The noise of the seed for so many frames, float32 (1, G, P)."""
        if self._drawn is None or self._drawn.shape[2] < frames * self.model.config.positions_per_frame:
            generator = torch.Generator().manual_seed(self.seed)
            self._drawn = self.model.noise(max(frames, 1024), generator)
        drawn = self._drawn.to(self.model.upsample.weight.device)
        return drawn[:, :, : frames * self.model.config.positions_per_frame]

    def _sound(self, mel: Tensor, noise: Tensor, lengths: Tensor | None = None) -> Tensor:
        infer = self.model.infer if self.fast is None else self.fast.infer
        return infer(mel, self.sigma, lengths=lengths, noise=noise)

    @torch.no_grad()
    def forward(self, mel: Tensor, lengths: Tensor | None = None) -> Tensor:
        """With ``lengths`` (B,) in frames a row is what it would be alone, then 0."""
        audio = self._sound(mel, self.noise(mel.shape[2]), lengths)
        if self.denoiser is None:
            return audio.float()
        if lengths is None:
            return self.denoiser(audio, self.strength)
        result = torch.zeros_like(audio, dtype=torch.float32)
        for row, length in enumerate((lengths * self.mel.hop_length).tolist()):
            result[row, :length] = self.denoiser(audio[row : row + 1, :length], self.strength)[0]
        return result

    @torch.no_grad()
    def window(self, mel: Tensor, first: int) -> Tensor:
        """The sound of frames from ``first`` on: exact but for `reach` frames at each end that is cut."""
        noise = self.noise(first + mel.shape[2])[:, :, first * self.model.config.positions_per_frame :]
        audio = self._sound(mel, noise)
        return self.denoiser(audio, self.strength) if self.denoiser is not None else audio.float()
