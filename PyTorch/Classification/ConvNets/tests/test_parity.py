"""Forward parity with torchvision and timm under shared weights; their outputs are stored in golden/forward.json."""

from __future__ import annotations

import importlib.util
import json
from pathlib import Path

import pytest
import torch

from convnets import registry

GOLDEN = Path(__file__).parent / "golden"
specification = importlib.util.spec_from_file_location("make_forward", GOLDEN / "make_forward.py")
make_forward = importlib.util.module_from_spec(specification)
specification.loader.exec_module(make_forward)
EXPECTED = json.loads((GOLDEN / "forward.json").read_text())
SLOW = {"resnet101", "resnet152", "resnext101_32x4d", "se_resnext101_32x4d"} | {
    f"efficientnet_b{i}" for i in range(1, 8)
}
OTHER_EPS = {f"efficientnet_b{i}" for i in range(5)}  # torchvision's have 1e-5 where the paper's code has 1e-3


@pytest.mark.parametrize(
    "arch", [pytest.param(arch, marks=pytest.mark.slow if arch in SLOW else []) for arch in EXPECTED]
)
def test_logits_equal_the_peers(arch):
    """float64, strict keys: the same logits to ten digits."""
    with torch.device("meta"):
        model = registry.build(arch).double()
    own = {name: make_forward.tensor_for(name, tuple(value.shape)) for name, value in model.state_dict().items()}
    model.load_state_dict(own, assign=True)
    model.eval()
    golden = EXPECTED[arch]
    for module in model.modules():
        if isinstance(module, torch.nn.BatchNorm2d):
            assert arch in OTHER_EPS or module.eps == golden["batch_norm_eps"]
            module.eps = golden["batch_norm_eps"]
    with torch.no_grad():
        logits = model(make_forward.example())
    expected = torch.tensor(golden["logits"], dtype=torch.float64)
    scale = expected.abs().max()
    assert torch.allclose(logits[:, : expected.shape[1]], expected, rtol=0, atol=1e-10 * scale), golden["library"]
    assert logits.norm().item() == pytest.approx(golden["norm"], rel=1e-10)


def test_every_published_architecture_has_a_peer():
    """What has no peer is ours alone (WideSE is NVIDIA's, the small ResNets are this repository's)."""
    assert set(registry.ARCHITECTURES) - set(EXPECTED) == {
        "efficientnet_widese_b0", "efficientnet_widese_b4", "resnet8_small", "resnet14_small",
    }  # fmt: skip
