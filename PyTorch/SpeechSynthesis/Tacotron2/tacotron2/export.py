"""Export for other runtimes: ONNX graphs and AOTInductor packages, compared with the model before they are used.

./dlx run Tacotron2 export -- --checkpoint runs/voice --output_dir exported
./dlx run Tacotron2 export -- --checkpoint runs/voice --waveglow runs/waveglow --formats onnx aoti

Writes encoder, step, postnet (of a Tacotron 2) and waveglow, each as .onnx or .pt2, and parts.json: names, types and
sizes of their inputs and outputs, the meaning of spectrograms and symbols. See `parts` for what a caller has to do.
"""

from __future__ import annotations

import dataclasses
import json
import os
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import torch

from dlx import config as configs
from dlx import export as exports
from dlx.files import atomic_write

from . import pretrained
from .model import Tacotron2
from .options import CONFIGS
from .parts import LoopLSTM, Part, SymbolicLSTM, tacotron2_parts, waveglow_parts

SUFFIX = {"onnx": ".onnx", "aoti": ".pt2"}


@dataclass
class ExportConfig:
    """Write the parts of a voice, of a WaveGlow, or of both, and prove that they compute what the models do."""

    checkpoint: str | None = configs.field(None, help="a voice: a run's folder, a checkpoint, a file or a name")
    waveglow: str | None = configs.field(None, help="a WaveGlow: the like")
    formats: list[Literal["onnx", "aoti"]] = configs.field(["onnx"], help="of the files", choices=("onnx", "aoti"))
    output_dir: str = configs.field("exported", help="where the files go")
    batches: list[int] = configs.field([1, 3], help="batch sizes that are compared", ge=1)
    lengths: list[int] = configs.field([7, 31], help="symbols and frames that are compared", ge=1)
    atol: float = configs.field(1e-4, help="largest difference allowed, relative to outputs over 1", gt=0)
    device: str = configs.field("cpu", help="of AOTInductor packages: cpu or cuda")

    def __post_init__(self) -> None:
        if not self.checkpoint and not self.waveglow:
            raise ValueError("give a checkpoint, a waveglow, or both")


def parts_of(found: pretrained.Found, target: str) -> dict[str, Part]:
    """The parts of a model as ``target`` ("onnx" or "aoti") can take them."""
    found.model.eval().requires_grad_(False)
    if isinstance(found.model, Tacotron2):
        return tacotron2_parts(found.model, {"onnx": SymbolicLSTM, "aoti": LoopLSTM}[target])
    return waveglow_parts(found.model)


def reference(found: pretrained.Found) -> dict[str, Part]:
    """The same parts in the model's own layers, for comparison."""
    if isinstance(found.model, Tacotron2):
        return tacotron2_parts(found.model.eval())
    return waveglow_parts(found.model.eval())


def export_onnx(
    part: Part, plain: Part, path: Path, metadata: Mapping[str, Any], cases: Sequence[tuple[int, int]], atol: float
) -> float:
    """Write a graph and run it in onnxruntime; the largest difference from ``plain`` over the (batch, length) cases.

    Raises dlx.export.ParityError beyond ``atol``; no failure leaves a file.
    """
    exports.to_onnx(
        part.module,
        part.example(2, 9),
        path,
        input_names=list(part.inputs),
        output_names=list(part.outputs),
        dynamic_shapes=part.dynamic(),
        metadata=metadata,
    )
    try:
        differences = [
            exports.check_onnx(
                path,
                plain.module,
                lambda batch, length=length: plain.example(batch, length, seed=1),
                batches=[batch],
                atol=atol,
                rtol=atol,
            )
            for batch, length in cases
        ]
    except BaseException:  # also a graph that onnxruntime refuses, and Ctrl-C: what is unchecked must not stay
        path.unlink(missing_ok=True)
        raise
    return max(differences)


@torch.no_grad()
def export_aoti(
    part: Part,
    plain: Part,
    path: Path,
    cases: Sequence[tuple[int, int]],
    atol: float,
    device: str | torch.device = "cpu",
) -> float:
    """Compile a package for ``device`` and run it as `export_onnx` does. Needs a C++ compiler."""
    program = torch.export.export(
        part.module.to(device), part.example(2, 9, device=device), dynamic_shapes=part.dynamic()
    )
    worst = 0.0
    with tempfile.TemporaryDirectory(dir=path.parent) as folder:
        package = Path(folder) / path.name
        torch._inductor.aoti_compile_and_package(program, package_path=str(package))
        run = torch._inductor.aoti_load_package(str(package))
        for batch, length in cases:
            inputs = plain.example(batch, length, seed=1, device=device)
            expected, found = plain.module.to(device)(*inputs), run(*inputs)
            if isinstance(expected, torch.Tensor):
                expected, found = (expected,), (found,)
            for name, ours, theirs in zip(part.outputs, expected, found, strict=True):
                gap = (ours - theirs).abs() if ours.shape == theirs.shape else torch.tensor(torch.inf)
                if not (gap <= atol + atol * ours.abs()).all():
                    raise exports.ParityError(
                        f"{path}: output {name} at batch {batch}, length {length} differs by up to {gap.max():.3g}"
                    )
                worst = max(worst, float(gap.max()))
        os.replace(package, path)
    return worst


def describe_part(part: Part, file: str) -> dict[str, Any]:
    """The entry of a part in parts.json."""
    return {
        "file": file,
        "inputs": [
            {"name": name, "type": "int64" if name in ("text", "lengths") else "float32", "sizes": list(sizes)}
            for name, sizes in part.inputs.items()
        ],
        "outputs": list(part.outputs),
    }


def export(
    found: pretrained.Found,
    folder: Path,
    target: str,
    *,
    batches: Sequence[int] = (1, 3),
    lengths: Sequence[int] = (7, 31),
    atol: float = 1e-4,
    device: str | torch.device = "cpu",
    only: Sequence[str] = (),
) -> dict[str, dict[str, Any]]:
    """Write all parts of a model (or those in ``only``); their entries of parts.json, with the differences found."""
    cases = list(zip(batches, lengths, strict=False)) + list(zip(batches, lengths[::-1], strict=False))
    plain, entries = reference(found), {}
    for name, part in parts_of(found, target).items():
        if only and name not in only:
            continue
        path = folder / f"{name}{SUFFIX[target]}"
        if target == "onnx":
            difference = export_onnx(part, plain[name], path, found.describe() | {"part": name}, cases, atol)
        else:
            difference = export_aoti(part, plain[name], path, cases, atol, device)
        entries[f"{name}.{target}"] = describe_part(part, path.name) | {"difference": difference}
        print(f"{path}: {path.stat().st_size / 2**20:.1f} MiB, largest difference {difference:.1e}")
    return entries


def main(args: list[str] | None = None) -> dict[str, Any]:
    config = configs.parse(ExportConfig, args, configs_dir=CONFIGS, prog="export")
    folder = Path(config.output_dir)
    folder.mkdir(parents=True, exist_ok=True)
    content: dict[str, Any] = {"models": [], "parts": {}}
    for source in filter(None, (config.checkpoint, config.waveglow)):
        for target in dict.fromkeys(config.formats):
            found = pretrained.load(source)
            options = {name: getattr(config, name) for name in ("batches", "lengths", "atol", "device")}
            content["parts"] |= export(found, folder, target, **options)
        model = found.describe() | {"source": found.source, "config": dataclasses.asdict(found.model.config)}
        content["models"].append(model)
    atomic_write(folder / "parts.json", json.dumps(content, indent=1, ensure_ascii=False) + "\n")
    return content


if __name__ == "__main__":
    main()
