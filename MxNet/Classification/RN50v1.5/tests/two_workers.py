"""A few steps of a small network on halves of fixed batches, for the test of several workers.

    python two_workers.py OUTPUT.npz dist_sync|local

Each of the workers takes its share of every batch. Alone, `local`, the one process makes the gradients of both halves
itself and adds them, without a kvstore: what two workers must come to.
"""

import sys

import mxnet as mx
import numpy as np

from rn50_mxnet import blocks, registry, step
from rn50_mxnet.workers import Workers

CLASSES, BATCH, STEPS = 4, 8, 4


def main(output: str, kind: str) -> None:
    workers = Workers(kind)
    # Different seeds: the first worker's weights must reach the others.
    network = registry.build("resnet8_small", CLASSES, 1, seed=workers.rank)
    trainer = step.build_trainer(network, workers, lr=0.1, momentum=0.9, weight_decay=1e-2, nesterov=True)
    network.hybridize(static_alloc=True, static_shape=True)
    state = step.TrainState(network, trainer, CLASSES, (0.5,), (0.5,), 0.1, num_workers=workers.size)
    rng = np.random.default_rng(0)
    losses = []
    for _ in range(STEPS):
        images = mx.nd.array(rng.integers(0, 256, (BATCH, 1, 28, 28)))
        labels = mx.nd.array(rng.integers(0, CLASSES, BATCH))
        halves = [(images[: BATCH // 2], labels[: BATCH // 2]), (images[BATCH // 2 :], labels[BATCH // 2 :])]
        if workers.size == 2:
            losses.append(step.train_step(state, *halves[workers.rank]).asscalar())
            continue
        total = 0.0
        for parameter in blocks.named_parameters(network).values():
            if parameter.grad_req != "null":
                parameter.grad_req = "add"
                parameter.zero_grad()
        for half, answer in halves:
            targets = step.make_targets(answer, CLASSES, 0.1)
            with mx.autograd.record():
                loss = -(mx.nd.log_softmax(network(step.normalize(half, (0.5,), (0.5,)))) * targets).sum()
            loss.backward()
            total += loss.asscalar() / BATCH
        trainer.step(BATCH)
        losses.append(total)
    mean = workers.sum(np.array(losses)) / workers.size
    weights = {k: v for k, v in blocks.get_weights(network).items() if "running" not in k}
    states = step.get_trainer_states(network, trainer)
    np.savez(
        output.replace("RANK", str(workers.rank)), losses=mean,
        **{f"weight.{k}": v for k, v in weights.items()}, **{f"state.{k}": v for k, v in states.items()},
    )  # fmt: skip


if __name__ == "__main__":
    main(*sys.argv[1:])
