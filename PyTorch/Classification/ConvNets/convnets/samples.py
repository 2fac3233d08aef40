"""Pictures with predictions, for a run's report."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from PIL import Image
from torch import Tensor, nn

from dlx.files import atomic_path
from dlx.inputs import Normalize
from dlx.loading import Loader

COUNT = 24


def to_picture(image: Tensor) -> Image.Image:
    """uint8 C H W (one or three channels) to a picture."""
    values = image.detach().cpu().permute(1, 2, 0).contiguous().numpy()
    return Image.fromarray(values[:, :, 0] if values.shape[2] == 1 else values)


@torch.no_grad()
def predict_samples(
    model: nn.Module, loader: Loader, normalize: Normalize, classes: list[str], folder: Path, count: int = COUNT
) -> list[dict[str, Any]]:
    """Predict the first pictures of a split; writes them as PNG and returns what the report shows of each."""
    training = model.training
    model.eval()
    shown: list[dict[str, Any]] = []
    folder.mkdir(parents=True, exist_ok=True)
    for images, labels in loader:
        probabilities = model(normalize(images)).float().softmax(1)
        for image, label, row in zip(images, labels.tolist(), probabilities, strict=True):
            if label < 0 or len(shown) == count:
                continue
            top = row.topk(min(3, len(classes)))
            ranked = [[classes[i], float(p)] for p, i in zip(top.values.tolist(), top.indices.tolist(), strict=True)]
            with atomic_path(folder / f"{len(shown):02d}.png") as path:
                to_picture(image).save(path, format="PNG")
            shown.append(
                {
                    "image": f"{folder.name}/{len(shown):02d}.png",
                    "truth": classes[label],
                    "prediction": ranked[0][0],
                    "top": ranked,
                }
            )
        if len(shown) == count:
            break
    model.train(training)
    return shown
