"""int8 arithmetic simulated in floating point: fake quantisers, their calibration, and models that carry them.

Papers: Jacob et al. 2018 (https://arxiv.org/abs/1712.05877, integer-only inference) and Wu et al. 2020
(https://arxiv.org/abs/2004.09602, calibration by percentile, weights per channel). Weights are int8, symmetric, one
scale per output channel, by the largest value. Activations are uint8, affine, one scale per tensor, over a range that
calibration fixes. Biases are int32 in the exported file and not rounded here: their step is far below all others.

Differences from Jacob et al.: batch norms are folded before the fine-tuning instead of during it, and the ranges of
activations do not move with it (as in NVIDIA's recipe for EfficientNet).

N batch, C channels, H height, W width.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.utils import parametrize

from dlx.inference import ConvAct, fold
from dlx.norm import ACTIVATIONS, BatchNormAct, Pending

from . import efficientnet, resnet

LEVELS = 255  # steps of a uint8 activation
BINS = 8192  # of a histogram: at least 16 per step of the widest one-sided range
SMALLEST_SCALE = 2.0**-60  # for a channel or a tensor that is zero throughout
CALIBRATIONS = ("percentile", "max", "mse")


@dataclass(frozen=True)
class Scheme:
    """How a model is quantised.

    ``weight_bits`` 7 halves the range of weights: x86 processors without VNNI add pairs of products in 16 bits, which
    overflow with 8. ``keep_first_last_float`` leaves the first convolution and the classifier in floating point.
    """

    calibration: str = "percentile"
    percentile: float = 99.99
    weight_bits: int = 8
    keep_first_last_float: bool = False

    def __post_init__(self) -> None:
        if self.calibration not in CALIBRATIONS:
            raise ValueError(f"calibration must be one of {', '.join(CALIBRATIONS)}, got {self.calibration!r}")
        if not 50 < self.percentile <= 100:
            raise ValueError(f"percentile must be above 50 and at most 100, got {self.percentile}")
        if self.weight_bits not in (7, 8):
            raise ValueError(f"weight_bits must be 7 or 8, got {self.weight_bits}")

    @property
    def weight_limit(self) -> int:
        """The largest magnitude of a stored weight: 127 or 63 (the most negative number is left out)."""
        return 2 ** (self.weight_bits - 1) - 1


# ------------------------------------------------------------------------------------------------- weights


def weight_scale(weight: Tensor, limit: int) -> Tensor:
    """One scale per output channel (dimension 0), such that the largest magnitude becomes ``limit``."""
    return (weight.detach().flatten(1).abs().amax(1).float() / limit).clamp_min(SMALLEST_SCALE)


class WeightQuantizer(nn.Module):
    """A parametrisation: the module computes with rounded weights, the optimiser moves the exact ones.

    The gradient passes unchanged; none is clipped, since the range always reaches the largest weight.
    """

    def __init__(self, limit: int):
        super().__init__()
        self.limit = limit

    def forward(self, weight: Tensor) -> Tensor:
        scale = weight_scale(weight, self.limit)
        zero_point = torch.zeros_like(scale, dtype=torch.int32)
        return torch.fake_quantize_per_channel_affine(weight, scale, zero_point, 0, -self.limit, self.limit)


def quantize_weight(module: nn.Conv2d | nn.Linear, scheme: Scheme) -> None:
    parametrize.register_parametrization(module, "weight", WeightQuantizer(scheme.weight_limit))


# --------------------------------------------------------------------------------------------- calibration


class Histogram:
    """Counts of all values seen, in equal bins over [-reach, reach]; the reach doubles as larger values come.

    Doubling merges bins two by two, so no value is counted anew and the result does not depend on the batches' order
    except through the first reach.
    """

    def __init__(self) -> None:
        self.reach = 0.0
        self.low, self.high = math.inf, -math.inf
        self.counts = torch.zeros(BINS, dtype=torch.float64)

    def add(self, values: Tensor) -> None:
        """ValueError if a value is not finite."""
        values = values.detach().float().flatten()
        low, high = (bound.item() for bound in values.aminmax())
        if not (math.isfinite(low) and math.isfinite(high)):
            raise ValueError(f"activations reach from {low} to {high}; only finite ones can be quantised")
        self.low, self.high = min(self.low, low), max(self.high, high)
        largest = max(-low, high)
        if largest == 0.0 and self.reach == 0.0:
            return
        if self.reach == 0.0:
            self.reach = largest
        while self.reach < largest:
            pairs = self.counts.view(-1, 2).sum(1)
            self.counts = F.pad(pairs, (BINS // 4, BINS // 4))
            self.reach *= 2.0
        self.counts += torch.histc(values, BINS, -self.reach, self.reach).double().cpu()

    def percentile(self, percent: float) -> float:
        """As numpy.percentile of all values, to within a bin (linear inside it)."""
        if self.reach == 0.0:
            return 0.0
        cumulative = self.counts.cumsum(0)
        rank = percent / 100.0 * cumulative[-1].item()
        index = min(int(torch.searchsorted(cumulative, rank)), BINS - 1)
        before = cumulative[index - 1].item() if index else 0.0
        count = self.counts[index].item()
        inside = (rank - before) / count if count else 0.0
        value = -self.reach + (index + inside) * 2.0 * self.reach / BINS
        return min(max(value, self.low), self.high)

    def range(self, scheme: Scheme) -> tuple[float, float]:
        """The range that the scheme's calibration chooses."""
        if self.low > self.high:
            raise ValueError("no value was seen")
        if scheme.calibration == "max" or self.reach == 0.0:
            return self.low, self.high
        if scheme.calibration == "percentile":
            return self.percentile(100.0 - scheme.percentile), self.percentile(scheme.percentile)
        return self._least_squares()

    def _least_squares(self) -> tuple[float, float]:
        """The fraction of the whole range with the smallest squared rounding and clipping error."""
        centres = (torch.arange(BINS, dtype=torch.float64) + 0.5) * (2.0 * self.reach / BINS) - self.reach
        seen = self.counts > 0
        centres, counts = centres[seen], self.counts[seen]
        best, error = (self.low, self.high), math.inf
        for fraction in torch.linspace(0.2, 1.0, 81).tolist():
            scale, zero_point = affine(self.low * fraction, self.high * fraction)
            rounded = ((centres / scale).round() + zero_point).clamp(0, LEVELS) - zero_point
            found = (counts * (rounded * scale - centres).square()).sum().item()
            if found < error:
                best, error = (self.low * fraction, self.high * fraction), found
        return best


def affine(low: float, high: float) -> tuple[float, int]:
    """Scale (a float32 number) and zero point (0..255) of the uint8 range that covers [low, high] and zero."""
    low, high = min(low, 0.0), max(high, 0.0)
    scale = torch.tensor(max((high - low) / LEVELS, SMALLEST_SCALE), dtype=torch.float32)
    if low == 0.0 and scale * LEVELS > high > 0.0:
        # A hair beyond the bound of a ReLU6 and onnxruntime would keep a pass of its own for the clipping.
        scale = torch.nextafter(scale, torch.tensor(0.0))
    zero_point = round(min(max(-low / scale.item(), 0.0), float(LEVELS)))
    return scale.item(), zero_point


class ActivationQuantizer(nn.Module):
    """Rounds a tensor to 256 levels. The gradient passes where the value lies in the range and is zero outside.

    Before calibration, and while a histogram is attached, values pass unchanged.
    """

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("scale", torch.ones(()))
        self.register_buffer("zero_point", torch.zeros((), dtype=torch.int32))
        self.enabled = True
        self.histogram: Histogram | None = None

    def extra_repr(self) -> str:
        return f"scale={self.scale.item():.4g}, zero_point={self.zero_point.item()}"

    def set_range(self, low: float, high: float) -> None:
        scale, zero_point = affine(low, high)
        self.scale.fill_(scale)
        self.zero_point.fill_(zero_point)

    def forward(self, x: Tensor) -> Tensor:
        if self.histogram is not None:
            self.histogram.add(x)
        if not self.enabled:
            return x
        return torch.fake_quantize_per_tensor_affine(x.float(), self.scale, self.zero_point, 0, LEVELS)


class UnitQuantizer(ActivationQuantizer):
    """For a sigmoid: the range [0, 1] is known beforehand and not calibrated."""

    def __init__(self) -> None:
        super().__init__()
        self.set_range(0.0, 1.0)


# ------------------------------------------------------------------------------------------ quantised layers


class QuantizedActivation(nn.Module):
    """``Q(act(x))``. A SiLU is the product ``Q(x) * Q(sigmoid(Q(x)))``, each factor of which has an integer kernel."""

    def __init__(self, act: str):
        super().__init__()
        self.act = act
        self.output = ActivationQuantizer()
        if act == "silu":
            self.input, self.gate = ActivationQuantizer(), UnitQuantizer()

    def forward(self, x: Tensor) -> Tensor:
        if self.act == "silu":
            x = self.input(x)
            return self.output(x * self.gate(torch.sigmoid(x)))
        return self.output(ACTIVATIONS[self.act](x))


class QuantizedConvAct(ConvAct):
    """A ConvAct whose inputs are quantised already and whose output is. With a residual, both summands are, too."""

    def __init__(self, source: ConvAct, scheme: Scheme, float_weight: bool):
        nn.Module.__init__(self)
        self.conv, self.act = source.conv, source.act
        if not float_weight:
            quantize_weight(self.conv, scheme)
        self.branch = ActivationQuantizer()
        self.activation = QuantizedActivation(self.act)

    def normalize(self, x: Tensor) -> Tensor:
        return self.branch(super().normalize(x))

    def forward(self, x: Tensor, residual: Tensor | Pending | None = None) -> Tensor:
        if residual is None:
            return self.activation(super().normalize(x))
        if isinstance(residual, Pending):
            residual = residual.finish()
        return self.activation(self.normalize(x) + residual)

    def pooled(self, x: Tensor) -> Tensor:
        # Rounding again changes nothing here, but it tells onnxruntime that it may pool the integers.
        return self.activation.output(super().pooled(x))


class QuantizedSqueezeExcitation(nn.Module):
    """Channel attention on integers throughout: pooled values, both linear layers, the gate and the product."""

    def __init__(self, source: nn.Module, scheme: Scheme, act: str):
        super().__init__()
        self.squeeze, self.expand = source.squeeze, source.expand
        quantize_weight(self.squeeze, scheme)
        quantize_weight(self.expand, scheme)
        self.mean, self.hidden = ActivationQuantizer(), QuantizedActivation(act)
        self.logits, self.gate, self.output = ActivationQuantizer(), UnitQuantizer(), ActivationQuantizer()

    def forward(self, x: Tensor) -> Tensor:
        hidden = self.hidden(self.squeeze(self.mean(x.mean((2, 3)))))
        gate = self.gate(torch.sigmoid(self.logits(self.expand(hidden))))
        return self.output(x * self.gate(gate[:, :, None, None]))


class QuantizedBottleneck(nn.Module):
    """A Bottleneck with squeeze-and-excitation, whose residual sum stands outside of every ConvAct."""

    def __init__(self, source: resnet.Bottleneck):
        super().__init__()
        self.bn1, self.bn2, self.bn3, self.se = source.bn1, source.bn2, source.bn3, source.se
        self.downsample = source.downsample
        self.output = ActivationQuantizer()

    def forward(self, pair: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor]:
        main, shortcut = pair
        residual = shortcut if self.downsample is None else self.downsample(shortcut).finish()
        out = self.se(self.bn3(self.bn2(self.bn1(main))))
        out = self.output(F.relu(out + residual))
        return out, out


class QuantizedLinear(nn.Module):
    """The classifier: quantises its input; the logits stay in floating point."""

    def __init__(self, source: nn.Linear, scheme: Scheme):
        super().__init__()
        self.input, self.linear = ActivationQuantizer(), source
        quantize_weight(self.linear, scheme)

    def forward(self, x: Tensor) -> Tensor:
        return self.linear(self.input(x))


class QuantizedClassifier(nn.Module):
    """Images N C H W -> logits N K, computed as int8 hardware would. Made by ``quantize``."""

    def __init__(self, model: nn.Module, scheme: Scheme):
        super().__init__()
        self.model, self.scheme = model, scheme
        self.input = None if scheme.keep_first_last_float else ActivationQuantizer()

    def forward(self, x: Tensor) -> Tensor:
        return self.model(x if self.input is None else self.input(x))


def quantize(model: nn.Module, scheme: Scheme | None = None) -> QuantizedClassifier:
    """A copy with folded norms and quantisers, in evaluation mode, still to be calibrated. All parameters train.

    Dropout and stochastic depth are off: they would push activations out of ranges that were measured without them.
    ValueError if the model holds a convolution, norm or linear layer that the scheme would miss.
    """
    scheme = scheme or Scheme()
    if any(isinstance(module, ActivationQuantizer) for module in model.modules()):
        raise ValueError("the model is quantised already; start from the one in floating point")
    device = next(model.parameters()).device
    model = fold(model)
    first = next((module for module in model.modules() if isinstance(module, ConvAct)), None)
    last = [module for module in model.modules() if isinstance(module, nn.Linear)][-1:]
    if first is None or not last:
        raise ValueError(f"{type(model).__name__} has no convolution with batch norm, or no linear classifier")
    for parent in list(model.modules()):
        for name, child in list(parent.named_children()):
            if isinstance(child, ConvAct):
                setattr(parent, name, QuantizedConvAct(child, scheme, scheme.keep_first_last_float and child is first))
            elif isinstance(child, resnet.SqueezeExcitation):
                setattr(parent, name, QuantizedSqueezeExcitation(child, scheme, "relu"))
            elif isinstance(child, efficientnet.SqueezeExcitation):
                act = next(key for key, function in ACTIVATIONS.items() if function is child.act)
                setattr(parent, name, QuantizedSqueezeExcitation(child, scheme, act))
            elif child is last[0] and not scheme.keep_first_last_float:
                setattr(parent, name, QuantizedLinear(child, scheme))
            elif isinstance(child, nn.Dropout):
                child.p = 0.0
    for parent in list(model.modules()):
        if isinstance(parent, efficientnet.MBConv):
            parent.survival = 1.0
        for name, child in list(parent.named_children()):
            if isinstance(child, resnet.Bottleneck) and child.se is not None:
                setattr(parent, name, QuantizedBottleneck(child))
    _refuse_leftovers(model, scheme)
    return QuantizedClassifier(model, scheme).to(device).requires_grad_(True)  # the quantisers are new


def _refuse_leftovers(model: nn.Module, scheme: Scheme) -> None:
    plain = []
    for name, module in model.named_modules():
        if isinstance(module, BatchNormAct) or (
            isinstance(module, nn.Conv2d | nn.Linear) and not parametrize.is_parametrized(module)
        ):
            plain.append(name)
    if len(plain) != (2 if scheme.keep_first_last_float else 0):
        raise ValueError(f"no rule to quantise these layers of {type(model).__name__}: {', '.join(plain)}")


def quantizers(model: nn.Module) -> dict[str, ActivationQuantizer]:
    """All quantisers of activations by name."""
    return {name: module for name, module in model.named_modules() if isinstance(module, ActivationQuantizer)}


@contextmanager
def float_arithmetic(model: nn.Module) -> Iterator[None]:
    """Within the block activations are not rounded (weights are)."""
    changed = [quantizer for quantizer in quantizers(model).values() if quantizer.enabled]
    for quantizer in changed:
        quantizer.enabled = False
    try:
        yield
    finally:
        for quantizer in changed:
            quantizer.enabled = True


@torch.no_grad()
def calibrate(model: QuantizedClassifier, batches: Iterable[Tensor]) -> int:
    """Fix every range by what flows through the unrounded model; returns how many images that were.

    ``batches`` are normalised images. ValueError without any, or where activations are not finite (named).
    """
    watched = {name: q for name, q in quantizers(model).items() if not isinstance(q, UnitQuantizer)}
    training = model.training
    model.eval()
    count = 0
    try:
        for quantizer in watched.values():
            quantizer.histogram = Histogram()
        with float_arithmetic(model):
            for images in batches:
                model(images)
                count += len(images)
        if not count:
            raise ValueError("calibration needs at least one batch of images")
        for quantizer in watched.values():
            if quantizer.histogram.low <= quantizer.histogram.high:  # one that the graph never uses saw nothing
                quantizer.set_range(*quantizer.histogram.range(model.scheme))
    finally:
        for quantizer in watched.values():
            quantizer.histogram = None
        model.train(training)
    return count
