"""One training step and what it needs: targets, mixup, learning rate, optimiser and its states.

N batch, K classes. Label smoothing: Szegedy et al. 2016 (https://arxiv.org/abs/1512.00567, section 7). Mixup:
Zhang et al. 2018 (https://arxiv.org/abs/1710.09412), with the batch in reverse order as partners.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass

import mxnet as mx
import numpy as np
from mxnet import autograd, gluon
from mxnet.contrib import amp

from dlx.draws import draws

from .blocks import named_parameters
from .workers import Workers

MIX_STREAM = 7


@dataclass
class TrainState:
    """Everything a step changes. ``mean`` and ``std`` (channels) are those of the preprocessing, for values 0 ... 1."""

    network: gluon.HybridBlock
    trainer: gluon.Trainer
    num_classes: int
    mean: tuple[float, ...]
    std: tuple[float, ...]
    label_smoothing: float = 0.0
    precision: str = "fp32"
    num_workers: int = 1
    step: int = 0


def normalize(images: mx.nd.NDArray, mean: tuple[float, ...], std: tuple[float, ...]) -> mx.nd.NDArray:
    """0 ... 255 to what the network wants, N C H W."""
    shape = (1, len(mean), 1, 1)
    mean, std = (mx.nd.array(np.reshape(v, shape), ctx=images.context) * 255 for v in (mean, std))
    return mx.nd.broadcast_div(mx.nd.broadcast_sub(images, mean), std)


def make_targets(labels: mx.nd.NDArray, num_classes: int, smoothing: float) -> mx.nd.NDArray:
    """N K probabilities: 1 - smoothing on the label and smoothing / K on all."""
    return mx.nd.one_hot(labels, num_classes) * (1 - smoothing) + smoothing / num_classes


def mix_weight(alpha: float, seed: int, step: int) -> float | None:
    """The share of the first picture, from Beta(alpha, alpha), by seed and step alone; None without mixup."""
    if alpha <= 0:
        return None
    words = (draws(seed, step, 0, 2, MIX_STREAM)[0] * 2**32).astype(np.uint64)
    return float(np.random.Generator(np.random.Philox(key=words)).beta(alpha, alpha))


def train_step(
    state: TrainState, images: mx.nd.NDArray, labels: mx.nd.NDArray, mix: float | None = None
) -> mx.nd.NDArray:
    """Forward, backward, sum over the workers, update; the mean loss of this worker's batch, not waited for."""
    batch = images.shape[0]
    images = normalize(images, state.mean, state.std)
    targets = make_targets(labels, state.num_classes, state.label_smoothing)
    if mix is not None:
        images = images * mix + images[::-1] * (1 - mix)
        targets = targets * mix + targets[::-1] * (1 - mix)
    with autograd.record():
        logits = state.network(images).astype("float32")
        losses = -(mx.nd.log_softmax(logits) * targets).sum(axis=1)
        if state.precision == "fp16":  # fp32's range is bf16's: only fp16 needs a scale
            with amp.scale_loss(losses, state.trainer) as scaled:
                autograd.backward(scaled)
    if state.precision != "fp16":
        losses.backward()
    state.trainer.step(batch * state.num_workers)
    state.step += 1
    return losses.mean()


def learning_rate(
    step: int, *, base: float, total: int, warmup: int, schedule: str = "cosine", final: float = 0.0
) -> float:
    """Linear from base / warmup to ``base`` over ``warmup`` steps, then half a cosine to ``final``, or constant."""
    if step < warmup:
        return base * (step + 1) / warmup
    if schedule == "constant":
        return base
    if schedule != "cosine":
        raise ValueError(f"lr_schedule {schedule!r} is neither cosine nor constant")
    progress = min(1.0, (step - warmup) / max(1, total - warmup))
    return final + (base - final) * 0.5 * (1 + math.cos(math.pi * progress))


def build_trainer(
    network: gluon.HybridBlock, workers: Workers, *, lr: float, momentum: float, weight_decay: float, nesterov: bool
) -> gluon.Trainer:
    """SGD that leaves norms and biases out of the weight decay; all workers get the first one's weights."""
    for parameter in named_parameters(network).values():
        parameter.wd_mult = 1.0 if len(parameter.shape) > 1 else 0.0
    options = {"learning_rate": lr, "momentum": momentum, "wd": weight_decay}
    kind = "nag" if nesterov else "sgd"
    trainer = gluon.Trainer(
        network.collect_params(), kind, options, kvstore=workers.store, update_on_kvstore=False
    )  # fmt: skip
    if workers.size > 1:  # else the first worker's weights would come with the first update, after a forward pass
        trainer._init_kvstore()
        trainer._init_params()
    return trainer


def _indices(network: gluon.HybridBlock, trainer: gluon.Trainer) -> dict[int, str]:
    names = {parameter.name: name for name, parameter in named_parameters(network).items()}
    return {index: names[parameter.name] for index, parameter in enumerate(trainer._params)}


def get_trainer_states(network: gluon.HybridBlock, trainer: gluon.Trainer) -> dict[str, np.ndarray]:
    """Momentum by the parameter's name. MXNet's own `save_states` would be a pickle."""
    names = _indices(network, trainer)
    states = trainer._updaters[0].states
    return {names[index]: value.asnumpy() for index, value in states.items() if value is not None}


def set_trainer_states(
    network: gluon.HybridBlock, trainer: gluon.Trainer, states: Mapping[str, np.ndarray], source: str = "states"
) -> None:
    """The inverse. ValueError for a name or a shape that does not fit."""
    names = _indices(network, trainer)
    places = {name: index for index, name in names.items()}
    own = named_parameters(network)
    updater = trainer._updaters[0]
    for name, value in states.items():
        if name not in places or tuple(own[name].shape) != tuple(value.shape):
            raise ValueError(f"{source}: no parameter {name} of shape {tuple(value.shape)} in the network")
        updater.states[places[name]] = mx.nd.array(value, ctx=own[name].list_ctx()[0])
        updater.states_synced[places[name]] = True


def average_statistics(network: gluon.HybridBlock, workers: Workers) -> None:
    """The batch norms' running statistics become the mean over the workers."""
    if workers.size == 1:
        return
    running = [p for p in named_parameters(network).values() if p.grad_req == "null"]
    values = [p.data().asnumpy() for p in running]
    total = workers.sum(np.concatenate(values)) / workers.size
    pieces = np.split(total, np.cumsum([len(value) for value in values])[:-1])
    for parameter, piece in zip(running, pieces, strict=True):
        parameter.set_data(mx.nd.array(piece))
