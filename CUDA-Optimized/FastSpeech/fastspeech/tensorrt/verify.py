"""Compare TensorRT's engines with PyTorch, layer by layer: where a difference begins says which layer is wrong.

    python -m fastspeech.tensorrt.verify --layers true --precision fp16

Every attention and feed-forward result of both engines becomes an output. Each is compared with the float32 model's; it
may be twice as far from that as the model in the same precision is. Exit status 1 if one is not.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from dlx import config as configs
from dlx.precision import DTYPES

from .. import registry
from ..model import Block, FastSpeech, Stack, round_durations
from ..options import CONFIGS

FLOOR = 1e-3  # of the largest value: differences below it are rounding, whatever the other way makes


@dataclass(frozen=True)
class Difference:
    """Of one layer: the largest error of the engine and of the plain model, and the largest value."""

    name: str
    error: float
    allowed: float
    size: float

    @property
    def passes(self) -> bool:
        return self.error <= max(2 * self.allowed, FLOOR * self.size)  # False for what is not a number


def activations(
    model: FastSpeech, text: Tensor, lengths: Tensor, durations: Tensor | None = None, size: int | None = None
) -> dict[str, Tensor]:
    """What each layer that an engine can show makes in the model, float32, 0 in the padding.

    Given ``durations`` (B, T) and ``size``, the decoder's too; without, the encoder's and the predicted durations.
    """
    found: dict[str, Tensor] = {}
    handles = []
    for side in ("encoder", "decoder"):
        stack: Stack = getattr(model, side)
        for number, block in enumerate(stack.blocks):
            handles += _watch(
                block, f"{side}.blocks.{number}", found, first=f"{side}.positions" if not number else None
            )
    try:
        with torch.inference_mode():
            hidden, logs = model.encode(text, lengths)
            found |= {"hidden": hidden, "log_durations": logs}
            if durations is None:
                found["durations"] = round_durations(logs, lengths)
            else:
                mel, mel_lengths = model.decode(hidden, durations, int(size or durations.sum(1).max()))
                found |= {"mel": mel.transpose(1, 2), "mel_lengths": mel_lengths}
    finally:
        for handle in handles:
            handle.remove()
    return {name: value.float() for name, value in found.items()}


def _watch(
    block: Block, name: str, found: dict[str, Tensor], first: str | None
) -> list[torch.utils.hooks.RemovableHandle]:
    def before(module: torch.nn.Module, inputs: tuple[Tensor, ...]) -> None:
        if first is not None:
            found[first] = inputs[0]

    def after(part: str):
        def hook(module: torch.nn.Module, inputs: tuple[Tensor, ...], output: Tensor) -> None:
            found[f"{name}.{part}"] = output

        return hook

    parts = ("attention", "feed_forward")
    handles = [getattr(block, part).register_forward_hook(after(part)) for part in parts]
    return [*handles, block.register_forward_pre_hook(before)]


def compare(
    found: Mapping[str, Tensor], plain: Mapping[str, Tensor], exact: Mapping[str, Tensor], lengths: Mapping[str, Tensor]
) -> list[Difference]:
    """A `Difference` for each tensor of ``found``, in the order of ``exact``, within the items' ``lengths`` by the
    first word of a name. ValueError for a tensor that the model does not have."""
    unknown = sorted(set(found) - set(exact))
    if unknown:
        raise ValueError(f"the model makes no {unknown[0]!r}")
    rows = []
    for name in (name for name in exact if name in found):
        mask = torch.ones_like(exact[name], dtype=torch.bool)
        limit = lengths.get(name.split(".")[0])
        if limit is not None:
            mask &= (torch.arange(mask.shape[1], device=mask.device) < limit[:, None]).view(
                *mask.shape[:2], *[1] * (mask.dim() - 2)
            )
        error, allowed = (
            float(torch.where(mask, (value[name].float() - exact[name]).abs(), 0).max()) for value in (found, plain)
        )
        rows.append(Difference(name, error, allowed, float(torch.where(mask, exact[name], 0).abs().max())))
    return rows


def table(rows: list[Difference]) -> str:
    lines = [f"{'layer':36s} {'error':>10s} {'plain':>10s} {'largest':>10s}"]
    for row in rows:
        verdict = "" if row.passes else "   WRONG"
        lines.append(f"{row.name:36s} {row.error:10.2e} {row.allowed:10.2e} {row.size:10.2e}{verdict}")
    return "\n".join(lines)


@dataclass
class VerifyConfig:
    """What is verified."""

    arch: str = configs.field("fastspeech", help=f"one of {', '.join(registry.ARCHITECTURES)}; fresh weights")
    layers: bool = configs.field(True, help="every layer; false: the results alone")
    precision: Literal["fp32", "bf16", "fp16"] = configs.field("fp16", help="of the engines")
    batch_size: int = configs.field(2, help="items", ge=1)
    text_length: int = configs.field(50, help="symbols of the longest item", ge=2)
    seed: int = configs.field(1, help="of weights and inputs", ge=0)
    device: str = configs.field("cuda", help="cuda or cuda:N")


def verify(config: VerifyConfig) -> list[Difference]:
    """Both engines against the model; needs TensorRT and a GPU that it supports."""
    from .engine import TensorRTEngine

    torch.manual_seed(config.seed)
    exact = registry.build(config.arch).eval().requires_grad_(False).to(config.device)
    dtype = DTYPES[config.precision]
    text = torch.randint(1, registry.SYMBOLS, (config.batch_size, config.text_length), device=config.device)
    lengths = torch.linspace(config.text_length, config.text_length // 2, config.batch_size).long().to(config.device)
    durations = torch.randint(0, 9, text.shape, device=config.device)
    durations[torch.arange(config.text_length, device=config.device) >= lengths[:, None]] = 0
    size = int(durations.sum(1).max())
    reference = activations(exact, text, lengths, durations, size)
    half = registry.build(config.arch).eval().requires_grad_(False).to(config.device)
    half.load_state_dict(exact.state_dict())
    plain = activations(half.to(dtype), text, lengths, durations, size)
    run = TensorRTEngine(half, batch=config.batch_size, watch=config.layers)
    found = run.encode(text, lengths, 1.0, None, None)
    found.pop("durations")  # rounded: compared through their logarithms
    found |= run.decode(found["hidden"], durations.int(), size)
    frames = reference["mel_lengths"]
    sides = {"encoder": lengths, "hidden": lengths, "log_durations": lengths, "decoder": frames, "mel": frames}
    return compare(found, plain, reference, sides)


def main(args: list[str] | None = None) -> int:
    rows = verify(configs.parse(VerifyConfig, args, configs_dir=CONFIGS, prog="verify"))
    print(table(rows))
    wrong = [row.name for row in rows if not row.passes]
    print(
        f"{len(rows) - len(wrong)} of {len(rows)} agree" + (f"; the first that does not is {wrong[0]}" if wrong else "")
    )
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
