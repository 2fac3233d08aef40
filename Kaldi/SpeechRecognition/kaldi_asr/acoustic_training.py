"""Training of the network on the GMM-HMM's alignments by frame cross-entropy; what `dlx.training` carries through."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from dlx import dist, optim, step, trainer
from dlx.precision import LossScaler, autocast
from dlx.record import Record
from dlx.step import TrainState, wrap

from . import datadir, features
from .chunks import Chunk, Chunks
from .hmm import HmmModel
from .options import TASK
from .recipe import TrainConfig
from .tdnn import ORTHOGONAL_EVERY, Tdnn, build, mask

METRICS = {
    "loss": {"unit": "", "goal": "MINIMIZE", "format": ":.4f"},
    "accuracy": {"unit": "%", "goal": "MAXIMIZE", "format": ":.2f"},
}


@dataclass
class Examples:
    """Frames of the network's features (T, D) and their pdfs (T,) of each utterance that could be aligned."""

    items: list[np.ndarray]
    pdfs: list[np.ndarray]
    left_out: list[tuple[str, str]]


def examples(model: HmmModel, utterances: Sequence[datadir.Utterance]) -> Examples:
    """Align utterances with their texts and compute the network's features."""
    items = features.normalise_speakers(utterances, features.extract_all(utterances, model.features), model.cmvn)
    found = model.align([model.frontend(x) for x in items], model.graphs([u.words for u in utterances]))
    kept = [index for index, item in enumerate(found) if item is not None]
    pdf_of = model.transitions.pdfs_of_ids()
    seen = features.extract_all([utterances[index] for index in kept], features.TDNN_FEATURES)
    missing = [str(u.path) for u, item in zip(utterances, found, strict=True) if item is None]
    return Examples(seen, [pdf_of[found[i].ids] for i in kept], [(path, "too short for its text") for path in missing])


def train_step(state: TrainState, batch: list[Chunk], config: TrainConfig, generator: torch.Generator) -> Tensor:
    """One optimiser update over the micro-batches; the mean loss per frame, on the device."""

    def loss_of(micro: Chunk) -> Tensor:
        network: Tdnn = state.model
        hidden = mask((micro.features - network.mean) * network.scale, generator, config.mask_time, config.mask_bands)
        with autocast(state.precision, micro.features.device):
            found = state(hidden / network.scale + network.mean)
        return F.nll_loss(found.float().flatten(0, 1), micro.pdfs.flatten(), ignore_index=-1)

    loss = step.update(state, batch, [(micro.pdfs >= 0).sum() for micro in batch], loss_of)
    if state.step % ORTHOGONAL_EVERY == 0:
        state.model.constrain()
    return loss


@torch.no_grad()
def evaluate(model: Tdnn, chunks: Chunks) -> dict[str, float]:
    """Cross-entropy and frame accuracy in percent over all frames."""
    training = model.training
    model.eval()
    totals = torch.zeros(3, dtype=torch.float64)
    for chunk in chunks:
        found, known = model(chunk.features), chunk.pdfs >= 0
        loss = F.nll_loss(found.flatten(0, 1), chunk.pdfs.flatten(), ignore_index=-1, reduction="sum")
        right = ((found.argmax(2) == chunk.pdfs) & known).sum()
        totals += torch.stack([loss.double(), right.double(), known.sum().double()]).cpu()
    model.train(training)
    loss, right, count = totals.tolist()
    if not count:
        raise ValueError("there is no frame to evaluate")
    return {"loss": loss / count, "accuracy": 100 * right / count}


class Trainer(trainer.Trainer):
    """Builds everything of a run. `after` gets the trained network, the record and the run's folder."""

    task, score, maximize, items = TASK, "loss", False, "pieces"
    fixed = ("network",)

    def __init__(
        self,
        config: TrainConfig,
        world: dist.World,
        train: Examples,
        val: Examples,
        num_pdfs: int,
        after: Callable[[Tdnn, Record, Path], None],
    ) -> None:
        self.config, self.world, self.after = config, world, after
        self.metrics = METRICS
        self.network = config.tdnn(features.TDNN_FEATURES.dim, num_pdfs)
        options = {"size": config.chunk, "context": self.network.context, "batch_size": config.batch_size}
        options |= {"seed": config.seed, "device": world.device}
        self.train_loader = Chunks(
            train.items, train.pdfs, train=True, rank=world.rank, world_size=world.size, **options
        )
        self.train_loader.skipped = list(train.left_out)
        self.val_loader = Chunks(val.items, val.pdfs, train=False, **options) if val.items else None
        self.plan()
        stats = features.Cmvn.of(train.items)
        priors = np.bincount(np.concatenate(train.pdfs), minlength=num_pdfs)
        dist.seed_everything(config.seed)  # equal weights on every process
        model = build(self.network, stats.mean, stats.std, priors).to(world.device).train()
        dist.seed_everything(config.seed, world.rank)
        optimizer = optim.build_optimizer(
            model, "adamw", lr=self.peak_lr, momentum=0.9, weight_decay=config.weight_decay
        )
        self.engine = self.resolve_engine(graphs=False)
        self.state = TrainState(
            model,
            optimizer,
            forward=wrap(model, world, self.engine == "compile"),
            precision=config.precision,
            scaler=LossScaler(model.named_parameters(), enabled=config.precision == "fp16"),
            ema=optim.ModelEma(model, config.ema_decay) if config.ema_decay else None,
            max_norm=config.gradient_clip,
        )

    def step(self, batch: list[Chunk], epoch: int, index: int) -> Tensor:
        optim.set_learning_rate(self.state.optimizer, self.learning_rate(self.state.step))
        # A function of the step, so that a resumed run hides what the uninterrupted one would have hidden.
        generator = torch.Generator().manual_seed(self.config.seed * 2**32 + self.state.step)
        return train_step(self.state, batch, self.config, generator)

    def evaluate(self) -> dict[str, Any]:
        return evaluate(self.evaluated, self.val_loader)

    def identity(self) -> dict[str, Any]:
        return {"arch": "tdnn_f", "network": self.network.to_dict()}

    def finish(self, record: Record, output: Path) -> None:
        self.after(self.evaluated, record, output)
