"""Export for other runtimes: one ONNX graph from symbols to spectrogram, compared with the model before it is used.

    ./dlx run FastSpeech export -- --checkpoint runs/flite --output_dir exported
    ./dlx run FastSpeech export -- --checkpoint runs/flite --triton true

Inputs: text int64 (B, T), 0 in the padding; lengths int64 (B,); speed float32 (B,), 1 is as learnt; emphasis float32
(B, T), 1; pauses int64 (B, T), frames, 0. Outputs: mel float32 (B, M, F), mel_lengths int64 (B,), durations int64
(B, T). Nothing is of a fixed size; F is the longest item's frames, at least 2. Metadata of the file says what symbols
and spectrograms mean.
"""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from dlx import config as configs
from dlx import export as exports
from dlx import serve as serving
from dlx.config import field
from dlx.files import atomic_write

from . import pretrained
from .model import FastSpeech, round_durations
from .options import CONFIGS

INPUTS = ("text", "lengths", "speed", "emphasis", "pauses")
OUTPUTS = ("mel", "mel_lengths", "durations")
LONGEST = 2**20  # frames, more than any text has: what a compiler must know of a size that data decide
SYMBOLS = 4096  # of one text, at most


@dataclass
class ExportConfig:
    """Write a voice as an ONNX graph, and prove that it computes what the model does."""

    checkpoint: str = field(help="a run's folder, a checkpoint, a file or a published name")
    output_dir: str = field("exported", help="where fastspeech.onnx and export.json go")
    batches: list[int] = field([1, 3], help="batch sizes that are compared", ge=1)
    lengths: list[int] = field([2, 31, 90], help="symbols that are compared", ge=2)
    atol: float = field(1e-3, help="largest difference allowed of log mels", gt=0)
    triton: bool = field(False, help="also write a model repository for Triton Inference Server")


class Whole(nn.Module):
    """A voice as a function of tensors alone."""

    def __init__(self, model: FastSpeech) -> None:
        super().__init__()
        self.model = model

    def forward(
        self, text: Tensor, lengths: Tensor, speed: Tensor, emphasis: Tensor, pauses: Tensor
    ) -> tuple[Tensor, Tensor, Tensor]:
        x, log_durations = self.model.encode(text, lengths)
        durations = round_durations(log_durations, lengths, speed, emphasis, pauses)
        size = durations.sum(1).max().clamp(min=2).item()
        torch._check(size >= 2)
        torch._check(size < LONGEST)
        mel, mel_lengths = self.model.decode(x, durations, size)
        return mel, mel_lengths, durations


def example(num_symbols: int, batch: int, length: int, seed: int = 0) -> tuple[Tensor, ...]:
    """Inputs of so many items and symbols, all different."""
    generator = torch.Generator().manual_seed(seed)
    lengths = (length - torch.arange(batch)).clamp(min=1)
    text = torch.randint(1, num_symbols, (batch, length), generator=generator)
    within = torch.arange(length) < lengths[:, None]
    speed = 0.8 + 0.5 * torch.rand(batch, generator=generator)
    emphasis = 0.8 + 0.5 * torch.rand(batch, length, generator=generator)
    pauses = torch.randint(0, 2, (batch, length), generator=generator)
    return torch.where(within, text, 0), lengths, speed, emphasis, pauses


def export_onnx(voice: pretrained.Found, path: Path, config: ExportConfig) -> float:
    """Write the graph and run it in onnxruntime; the largest difference of any output. No failure leaves a file."""
    model = Whole(voice.model.requires_grad_(False).float().cpu()).eval()
    symbols = voice.model.config.num_symbols
    batch = torch.export.Dim("batch", min=1, max=SYMBOLS)
    length = torch.export.Dim("symbols", min=2, max=SYMBOLS)
    sizes = [{0: batch, 1: length} if name in ("text", "emphasis", "pauses") else {0: batch} for name in INPUTS]
    exports.to_onnx(
        model,
        example(symbols, 3, 9),
        path,
        input_names=INPUTS,
        output_names=OUTPUTS,
        dynamic_shapes=sizes,
        metadata=voice.describe(),
    )
    try:
        differences = [
            exports.check_onnx(
                path,
                model,
                lambda count, length=length: example(symbols, count, length, seed=1),
                batches=config.batches,
                atol=config.atol,
                rtol=0,
            )
            for length in config.lengths
        ]
    except BaseException:  # also a graph that onnxruntime refuses, and Ctrl-C: what is unchecked must not stay
        path.unlink(missing_ok=True)
        raise
    return max(differences)


def main(args: list[str] | None = None) -> dict[str, Any]:
    config = configs.parse(ExportConfig, args, configs_dir=CONFIGS, prog="export")
    folder = Path(config.output_dir)
    folder.mkdir(parents=True, exist_ok=True)
    voice = pretrained.load(config.checkpoint)
    path = folder / "fastspeech.onnx"
    difference = export_onnx(voice, path, config)
    print(f"{path}: {path.stat().st_size / 2**20:.1f} MiB, largest difference {difference:.1e}")
    content = voice.describe() | {
        "source": voice.source,
        "config": asdict(voice.model.config),
        "file": path.name,
        "difference": difference,
        "ports": serving.describe(path),
    }
    if config.triton:
        # Texts of a batch are of one padded length, which Triton's own batching does not see to.
        content["triton"] = str(serving.model_repository(path, folder / "triton", "fastspeech", max_batch_size=0))
    atomic_write(folder / "export.json", json.dumps(content, indent=1, ensure_ascii=False) + "\n")
    return content


if __name__ == "__main__":
    main()
