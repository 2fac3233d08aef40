"""One step's arithmetic against numpy; several workers against one that makes all gradients itself."""

import os
import subprocess
import sys
from pathlib import Path

import mxnet as mx
import numpy as np
import pytest

from rn50_mxnet import blocks, registry, runner, step
from rn50_mxnet.workers import Workers

MEAN, STD = (0.5,), (0.25,)


def make_state(seed=1, smoothing=0.1, **options):
    settings = {"lr": 0.1, "momentum": 0.9, "weight_decay": 1e-2, "nesterov": False} | options
    network = registry.build("resnet8_small", 4, 1, seed=seed)
    trainer = step.build_trainer(network, Workers(), **settings)
    return step.TrainState(network, trainer, 4, MEAN, STD, smoothing)


def batch(count=8, seed=0):
    rng = np.random.default_rng(seed)
    return mx.nd.array(rng.integers(0, 256, (count, 1, 28, 28))), mx.nd.array(rng.integers(0, 4, count))


def test_normalise():
    images, _ = batch()
    ours = step.normalize(images, (0.1, 0.2, 0.3), (0.5, 0.6, 0.7)).asnumpy()
    values = images.asnumpy() / 255
    for channel, (mean, std) in enumerate(zip((0.1, 0.2, 0.3), (0.5, 0.6, 0.7), strict=True)):
        np.testing.assert_allclose(ours[:, channel], (values[:, 0] - mean) / std, atol=1e-6)


@pytest.mark.parametrize("mix", [None, 0.3])
def test_the_loss_is_that_of_the_papers(mix):
    state = make_state()
    images, labels = batch()
    values = (images.asnumpy() / 255 - MEAN[0]) / STD[0]
    truth = labels.asnumpy().astype(int)
    targets = np.full((8, 4), 0.1 / 4)
    targets[np.arange(8), truth] += 0.9
    if mix is not None:
        values = mix * values + (1 - mix) * values[::-1]
        targets = mix * targets + (1 - mix) * targets[::-1]
    with mx.autograd.train_mode():
        logits = state.network(mx.nd.array(values)).asnumpy().astype(np.float64)
    state = make_state()  # the norms' statistics have moved
    scores = logits - np.log(np.exp(logits).sum(1, keepdims=True))
    loss = step.train_step(state, images, labels, mix).asscalar()
    assert loss == pytest.approx(-(targets * scores).sum(1).mean(), rel=1e-5)


@pytest.mark.parametrize("nesterov", [False, True])
def test_two_updates_are_sgd_with_momentum_and_decay_of_matrices_only(nesterov):
    state = make_state(nesterov=nesterov)
    momentum = {}
    for number in range(2):
        before = blocks.get_weights(state.network)
        step.train_step(state, *batch(seed=number))
        after = blocks.get_weights(state.network)
        for name, parameter in blocks.named_parameters(state.network).items():
            if parameter.grad_req == "null":
                continue
            decay = 1e-2 if before[name].ndim > 1 else 0.0
            gradient = parameter.grad().asnumpy() / 8
            old = momentum.get(name, 0)
            new = 0.9 * old + gradient + decay * before[name]
            moved = gradient + decay * before[name] + 0.9 * new if nesterov else new
            # MXNet's nag_mom_update reads the weight that it has just written when it stores the momentum.
            momentum[name] = 0.9 * old + gradient + decay * after[name] if nesterov else new
            error = np.abs(after[name] - (before[name] - 0.1 * moved)).max()
            assert error < 1e-5 * np.abs(moved).max() + 1e-7, name


def test_training_lowers_the_loss():
    state = make_state(smoothing=0.0, weight_decay=0.0)
    losses = [step.train_step(state, *batch(16)).asscalar() for _ in range(12)]
    assert losses[-1] < 0.3 * losses[0]


def test_learning_rate():
    def rate(number, **options):
        return step.learning_rate(number, **{"base": 2.0, "total": 110, "warmup": 10} | options)

    assert [rate(0), rate(4), rate(9)] == pytest.approx([0.2, 1.0, 2.0])
    assert rate(10) == pytest.approx(2.0) and rate(60) == pytest.approx(1.0) and rate(110) == pytest.approx(0.0)
    assert rate(35) == pytest.approx(1 + np.cos(np.pi / 4))
    assert rate(100, schedule="constant") == 2.0
    with pytest.raises(ValueError, match="'step' is neither"):
        rate(100, schedule="step")


def test_mixup_weights_are_beta_and_depend_on_seed_and_step():
    found = np.array([step.mix_weight(0.2, 1, number) for number in range(3000)])
    assert found.mean() == pytest.approx(0.5, abs=0.03)
    assert found.var() == pytest.approx(0.25 / 1.4, abs=0.01)  # of Beta(a, a): 1 / (4 (2 a + 1))
    assert step.mix_weight(0.2, 1, 7) == found[7] != step.mix_weight(0.2, 2, 7)
    assert step.mix_weight(0.0, 1, 7) is None


def test_trainer_states_survive():
    """Weights and states moved to another network go on as the first does, to the bit."""
    first, second = make_state(), make_state(seed=2)
    for number in range(2):
        step.train_step(first, *batch(seed=number))
    blocks.set_weights(second.network, blocks.get_weights(first.network))
    step.set_trainer_states(second.network, second.trainer, step.get_trainer_states(first.network, first.trainer))
    for state in (first, second):
        step.train_step(state, *batch(seed=9))
    ours, theirs = (blocks.get_weights(state.network) for state in (second, first))
    assert all(np.array_equal(ours[name], theirs[name]) for name in theirs)
    with pytest.raises(ValueError, match=r"file: no parameter fc.weight of shape \(2, 2\)"):
        step.set_trainer_states(first.network, first.trainer, {"fc.weight": np.zeros((2, 2))}, "file")


def test_two_workers_make_the_update_of_one(tmp_path):
    """Through a parameter server, from different first weights: the second worker takes the first one's."""
    script = str(Path(__file__).with_name("two_workers.py"))
    port = runner.free_port()
    code = [[sys.executable, "-c", "import mxnet"]] * 2
    code += [[sys.executable, script, str(tmp_path / "RANK.npz"), "dist_sync"]] * 2
    roles = ["scheduler", "server", "worker", "worker"]
    running = [
        subprocess.Popen(command, env=runner.environment(role, port, 2, 1) | {"OMP_NUM_THREADS": "1"})
        for role, command in zip(roles, code, strict=True)
    ]
    try:
        assert [process.wait(60) for process in running] == [0] * 4
    finally:
        for process in running:
            process.kill()
    alone = tmp_path / "alone.npz"
    subprocess.run(
        [sys.executable, script, str(alone), "local"], check=True, env=os.environ | {"OMP_NUM_THREADS": "1"}
    )  # fmt: skip
    first, second, expected = (np.load(tmp_path / f"{name}.npz") for name in ("0", "1", "alone"))
    assert set(first) == set(expected) and any(name.startswith("state.") for name in first)
    for name in expected:
        np.testing.assert_array_equal(first[name], second[name], err_msg=name)
        np.testing.assert_allclose(first[name], expected[name], rtol=1e-5, atol=1e-6, err_msg=name)


def test_workers_without_a_server_are_refused(monkeypatch):
    monkeypatch.delenv("DMLC_ROLE", raising=False)
    with pytest.raises(ValueError, match="start it with `python -m rn50_mxnet.runner`"):
        Workers("dist_sync")
    with pytest.raises(ValueError, match="kvstore 'horovod' is neither"):
        Workers("horovod")
