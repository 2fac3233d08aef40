"""Groups of parameters with a rate of their own."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from dlx import optim


def make() -> nn.ModuleDict:
    torch.manual_seed(0)
    return nn.ModuleDict({"backbone": nn.Linear(4, 4), "head": nn.Linear(4, 2)})


def test_groups_of_a_slow_part() -> None:
    model = make()
    groups = optim.parameter_groups(model, 0.1, slow=model["backbone"], slow_factor=0.5)
    found = [
        (group.get("lr_factor", 1.0), group["weight_decay"], [tuple(p.shape) for p in group["params"]])
        for group in groups
    ]
    assert found == [(1.0, 0.1, [(2, 4)]), (1.0, 0.0, [(2,)]), (0.5, 0.1, [(4, 4)]), (0.5, 0.0, [(4,)])]
    assert len(optim.parameter_groups(model, 0.1, slow=model["backbone"], slow_factor=1.0)) == 2


@pytest.mark.parametrize("name", ["sgd", "adamw"])
def test_a_slow_part_moves_less(name: str) -> None:
    """With plain SGD, steps are the factor times those without one; Adam's are so from the second moment on."""
    moved = {}
    for factor in (1.0, 0.25):
        model = make()
        optimizer = optim.build_optimizer(
            model, name, lr=9.0, momentum=0.0, weight_decay=0.0, slow=model["backbone"], slow_factor=factor
        )
        optim.set_learning_rate(optimizer, 0.01)
        before = {key: value.clone() for key, value in model.state_dict().items()}
        model["head"](model["backbone"](torch.ones(3, 4))).square().sum().backward()
        optimizer.step()
        moved[factor] = {key: value - before[key] for key, value in model.state_dict().items()}
    for key, whole in moved[1.0].items():
        expected = whole * (0.25 if key.startswith("backbone") else 1.0)
        torch.testing.assert_close(moved[0.25][key], expected, rtol=1e-5, atol=1e-8)
        assert whole.abs().max() > 0


def test_factors_survive_a_checkpoint() -> None:
    model = make()
    options = {"lr": 0.1, "momentum": 0.9, "weight_decay": 0.0, "slow": model["backbone"], "slow_factor": 0.5}
    saved = optim.build_optimizer(model, "sgd", **options).state_dict()
    other = optim.build_optimizer(model, "sgd", **options)
    other.load_state_dict(saved)
    optim.set_learning_rate(other, 0.2)
    assert [group["lr"] for group in other.param_groups] == [0.2, 0.2, 0.1, 0.1]
