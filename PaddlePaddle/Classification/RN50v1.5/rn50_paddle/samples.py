"""Pictures with predictions, for a run's report."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image

from dlx.files import atomic_path

from .evaluate import model_forward

COUNT = 24


def to_picture(pixels: np.ndarray) -> Image.Image:
    """uint8 (C, H, W), one or three channels."""
    return Image.fromarray(pixels[0] if len(pixels) == 1 else np.ascontiguousarray(pixels.transpose(1, 2, 0)))


def softmax(logits: np.ndarray) -> np.ndarray:
    """Of each row."""
    powers = np.exp(logits - logits.max(1, keepdims=True))
    return powers / powers.sum(1, keepdims=True)


def predict(trainer: Any, folder: Path) -> list[dict[str, Any]]:
    """The first pictures of the evaluation with the three likeliest classes; writes them as PNG."""
    folder.mkdir(parents=True, exist_ok=True)
    images, labels = next(iter(trainer.val_loader))
    pixels, truth = images.numpy(), labels.numpy()
    rows = softmax(model_forward(trainer.state.model, trainer.preprocessing)(images))
    shown = []
    for number in range(min(COUNT, int((truth >= 0).sum()))):
        with atomic_path(folder / f"{number:02d}.png") as path:
            to_picture(pixels[number]).save(path, format="PNG")
        ranked = [[trainer.classes[i], float(rows[number, i])] for i in np.argsort(-rows[number])[:3]]
        shown.append(
            {"image": f"{folder.name}/{number:02d}.png", "truth": trainer.classes[truth[number]]}
            | {"prediction": ranked[0][0], "top": ranked}
        )
    return shown
