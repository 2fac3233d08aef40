"""Export the network as ONNX: features (B, T + 2 context, D) to log likelihoods (B, T, P), any B and T.

    ./dlx run Kaldi/SpeechRecognition export -- --checkpoint runs/kaldi_quickstart --output_dir runs/export

Beside network.onnx goes what its user must know, in export.json: features, context, frame rate, and where the graph
and the symbols are. The file is checked against the network in onnxruntime before it is kept.
"""

from __future__ import annotations

import json
import shutil
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from dlx import config as configs
from dlx import export
from dlx.files import atomic_path, atomic_write

from .features import FRAME_SHIFT
from .options import CONFIGS
from .recogniser import load_network
from .tdnn import Tdnn
from .transitions import TransitionModel

TOLERANCE = 2e-3  # of a log likelihood


@dataclass
class ExportConfig:
    """Write a network and its graph for other programs."""

    checkpoint: str = configs.field(help="folder of a training run")
    output_dir: str = configs.field("runs/export", help="folder to fill")


class Scorer(nn.Module):
    """The network with priors taken off, as a module of its own: what is exported."""

    def __init__(self, network: Tdnn) -> None:
        super().__init__()
        self.network = network

    def forward(self, features: Tensor) -> Tensor:
        return self.network.log_likelihoods(features)


def export_network(network: Tdnn, path: Path, metadata: dict[str, Any]) -> float:
    """Write the ONNX file; returns its largest difference from the network over some shapes. ParityError if much."""
    scorer, context = Scorer(network).eval(), network.config.context
    batch, frames = torch.export.Dim("batch", min=1), torch.export.Dim("frames", min=2 * context + 1)
    example = torch.randn(2, 2 * context + 20, network.config.num_features)
    export.to_onnx(
        scorer, example, path, input_names=["features"], output_names=["log_likelihoods"],
        dynamic_shapes=[{0: batch, 1: frames}], metadata=metadata,
    )  # fmt: skip
    import onnxruntime

    session = onnxruntime.InferenceSession(str(path), providers=["CPUExecutionProvider"])
    worst = 0.0
    for size in ((1, 1), (1, 51), (3, 7)):
        x = 5 * torch.randn(size[0], 2 * context + size[1], network.config.num_features)
        with torch.no_grad():
            expected = scorer(x).numpy()
        [found] = session.run(None, {"features": x.numpy()})
        worst = max(worst, float(np.abs(found - expected).max()))
    if worst > TOLERANCE:
        path.unlink()
        raise export.ParityError(f"{path}: log likelihoods differ by {worst:.3g} from the network's")
    return worst


def id_table(model: TransitionModel) -> str:
    """A line per transition id: id, phone, state, pdf, whether it is the self-loop, log probability."""
    log_probabilities = model.log_probabilities()
    rows = []
    for number, (phone, state, pdf) in enumerate(model.triples.tolist()):
        for kind in (1, 0):
            tid = 2 * number + 2 - kind
            rows.append(f"{tid} {phone} {state} {pdf} {kind} {log_probabilities[tid]:.7g}")
    return "\n".join(rows) + "\n"


def main(args: list[str] | None = None) -> dict[str, Any]:
    config = configs.parse(ExportConfig, args, configs_dir=CONFIGS, prog="export")
    from .hmm import HmmModel

    source, output = Path(config.checkpoint), Path(config.output_dir)
    network, feature_config = load_network(source / "tdnn")
    settings = json.loads((source / "recogniser.json").read_text())
    values = {
        "features": feature_config.to_dict(),
        "context": network.config.context,
        "frame_shift": FRAME_SHIFT,
        "num_pdfs": network.config.num_pdfs,
        "search": settings["search"]["tdnn"],
    }
    worst = export_network(network, output / "network.onnx", values)
    for name in ("HCLG.fst", "words.txt"):
        with atomic_path(output / name) as temporary:
            shutil.copyfile(source / "graph" / name, temporary)
    shutil.copyfile(source / "lang" / "phones.txt", output / "phones.txt")
    model = HmmModel.load(source / "gmm").transitions
    atomic_write(output / "transitions.txt", id_table(model))
    atomic_write(output / "export.json", json.dumps(values, indent=1) + "\n")
    print(f"{output / 'network.onnx'}: differs from the network by at most {worst:.2g}")
    return values | {"difference": worst}


if __name__ == "__main__":
    main()
