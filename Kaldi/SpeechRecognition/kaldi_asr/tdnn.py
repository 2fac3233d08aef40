"""The acoustic model: a time-delay network with factored layers (TDNN-F).

Povey et al., "Semi-orthogonal low-rank matrix factorization for deep neural networks", Interspeech 2018. A layer sees
two moments, squeezed through a narrow linear map that is kept semi-orthogonal, and adds what it makes of them to what
it got. What differs: there is one output, of log posteriors, trained by cross-entropy; no i-vectors.

    B batch, T frames, D features, H hidden, P pdfs. Input frames: T + left_context + right_context; output frames: T.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

BYPASS = 0.66  # of its input that a layer adds to its output
ORTHOGONAL_EVERY = 4  # steps


@dataclass(frozen=True)
class TdnnConfig:
    """`dilations`: how many frames apart the two moments of each layer are; 0 sees one."""

    num_features: int
    num_pdfs: int
    hidden: int = 256
    bottleneck: int = 64
    dilations: tuple[int, ...] = (1, 1, 1, 0, 3, 3, 3, 3)
    splice: int = 2
    dropout: float = 0.1

    def __post_init__(self) -> None:
        if not 1 <= self.bottleneck <= self.hidden:
            raise ValueError(f"bottleneck {self.bottleneck} is not between 1 and hidden, {self.hidden}")
        if min(self.dilations, default=0) < 0 or not self.dilations:
            raise ValueError(f"dilations {self.dilations} must be some numbers of frames, 0 or more")

    @property
    def context(self) -> int:
        """Frames that are needed on each side."""
        return self.splice + sum(self.dilations)

    def to_dict(self) -> dict[str, Any]:
        return asdict(self) | {"dilations": list(self.dilations)}

    @classmethod
    def from_dict(cls, values: dict[str, Any]) -> TdnnConfig:
        return cls(**(values | {"dilations": tuple(values["dilations"])}))


class FactoredLayer(nn.Module):
    """(B, H, T + 2 d) -> (B, H, T): two moments, to the bottleneck, two of those, ReLU, norm, plus 0.66 x."""

    def __init__(self, hidden: int, bottleneck: int, dilation: int, dropout: float) -> None:
        super().__init__()
        self.dilation = dilation
        taps = 2 if dilation else 1
        self.factor = nn.Conv1d(hidden, bottleneck, taps, dilation=max(dilation, 1), bias=False)
        self.affine = nn.Conv1d(bottleneck, hidden, taps, dilation=max(dilation, 1))
        self.norm = nn.BatchNorm1d(hidden, affine=False)
        self.dropout = nn.Dropout(dropout)

    def forward(self, x: Tensor) -> Tensor:
        y = self.dropout(self.norm(F.relu(self.affine(self.factor(x)))))
        return y + BYPASS * x[:, :, self.dilation : x.shape[2] - self.dilation]


class Tdnn(nn.Module):
    """(B, T + 2 context, D) -> (B, T, P) log posteriors. `mean` and `scale` of the features are part of the model."""

    mean: Tensor
    scale: Tensor
    log_prior: Tensor

    def __init__(self, config: TdnnConfig) -> None:
        super().__init__()
        self.config = config
        self.register_buffer("mean", torch.zeros(config.num_features))
        self.register_buffer("scale", torch.ones(config.num_features))
        self.register_buffer("log_prior", torch.zeros(config.num_pdfs))
        self.first = nn.Conv1d(config.num_features, config.hidden, 2 * config.splice + 1)
        self.first_norm = nn.BatchNorm1d(config.hidden, affine=False)
        self.layers = nn.ModuleList(
            FactoredLayer(config.hidden, config.bottleneck, dilation, config.dropout) for dilation in config.dilations
        )
        self.narrow = nn.Conv1d(config.hidden, config.bottleneck * 2, 1, bias=False)
        self.narrow_norm = nn.BatchNorm1d(config.bottleneck * 2, affine=False)
        self.output = nn.Conv1d(config.bottleneck * 2, config.num_pdfs, 1)

    def forward(self, features: Tensor) -> Tensor:
        x = ((features - self.mean) * self.scale).transpose(1, 2)
        x = self.first_norm(F.relu(self.first(x)))
        for layer in self.layers:
            x = layer(x)
        x = self.output(self.narrow_norm(self.narrow(x)))
        return F.log_softmax(x.float(), 1).transpose(1, 2)

    def log_likelihoods(self, features: Tensor) -> Tensor:
        """(B, T + 2 context, D) -> (B, T, P): posteriors over priors, which is what decoding wants."""
        return self(features) - self.log_prior

    @torch.no_grad()
    def constrain(self) -> None:
        """One step of each factor towards a semi-orthogonal matrix of any scale (section 3.2 of the paper)."""
        for layer in self.layers:
            weight = layer.factor.weight
            matrix = weight.reshape(weight.shape[0], -1)
            product = matrix @ matrix.T
            scale = (product * product).sum() / product.trace()  # alpha squared
            speed = (
                0.125 if (product - scale * torch.eye(len(product), device=weight.device)).norm() < scale else 0.0625
            )
            error = product - scale * torch.eye(len(product), device=weight.device)
            matrix -= 4 * speed / scale * (error @ matrix)


def pad_context(features: Tensor, context: int) -> Tensor:
    """(B, T, D) -> (B, T + 2 context, D): the first and last frames repeat."""
    first, last = features[:, :1].expand(-1, context, -1), features[:, -1:].expand(-1, context, -1)
    return torch.cat([first, features, last], 1)


def orthogonality(model: Tdnn) -> float:
    """The largest relative distance of a factor from semi-orthogonality: 0 is exact."""
    worst = 0.0
    for layer in model.layers:
        matrix = layer.factor.weight.detach().reshape(layer.factor.weight.shape[0], -1).double()
        product = matrix @ matrix.T
        scale = (product * product).sum() / product.trace()
        worst = max(worst, float((product - scale * torch.eye(len(product))).norm() / (scale * len(product) ** 0.5)))
    return worst


def mask(features: Tensor, generator: torch.Generator, time: int, bands: int) -> Tensor:
    """SpecAugment (Park et al., 2019) on normalised features: a stretch of frames and of features set to 0 in each."""
    batch, frames, dim = features.shape
    result = features.clone()
    for size, limit, axis in ((time, frames, 1), (bands, dim, 2)):
        if not size:
            continue
        width = (torch.rand(batch, 1, generator=generator) * (size + 1)).long()
        start = (torch.rand(batch, 1, generator=generator) * (limit - width + 1)).long()
        places = torch.arange(limit)[None]
        hidden = (places >= start) & (places < start + width)
        result.masked_fill_(hidden.unsqueeze(3 - axis), 0.0)
    return result


def build(config: TdnnConfig, mean: Sequence[float], std: Sequence[float], priors: Sequence[float]) -> Tdnn:
    """A new network that knows the features' mean and deviation and the pdfs' shares of the frames."""
    model = Tdnn(config)
    model.mean.copy_(torch.as_tensor(mean))
    model.scale.copy_(1 / torch.as_tensor(std))
    prior = torch.as_tensor(priors, dtype=torch.float64)
    # A pdf that no frame has must not look likely for having a prior of nothing.
    model.log_prior.copy_((prior + prior.sum() * 1e-5).div(prior.sum() * (1 + 1e-5 * len(prior))).log())
    return model
