"""Published weights in fewer bits."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from dlx import packing, weights


def example() -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    return {
        "conv.weight": torch.randn(6, 3, 3, 3, generator=generator) * torch.logspace(-4, 3, 6).view(6, 1, 1, 1),
        "conv.bias": torch.randn(6, generator=generator),
        "zeros.weight": torch.zeros(2, 5),
        "steps": torch.tensor(7),
        "empty.weight": torch.zeros(0, 4),
    }


def test_int8_is_within_half_a_level_of_each_row() -> None:
    given = example()
    packed = packing.pack(given, "int8")
    assert packed["conv.weight"].dtype == torch.int8 and packed["conv.bias"].dtype == torch.float32
    found = packing.unpack(packed)
    assert found.keys() == given.keys()
    rows, exact = found["conv.weight"].flatten(1).double(), given["conv.weight"].flatten(1).double()
    half_level = exact.abs().amax(1) / 254
    assert ((rows - exact).abs().amax(1) <= half_level * (1 + 1e-5)).all()
    assert ((rows - exact).abs().amax(1) > half_level / 2).all()  # and no more precise than eight bits can be
    for name in ("conv.bias", "zeros.weight", "steps", "empty.weight"):
        assert torch.equal(found[name], given[name])


def test_packing_again_changes_nothing() -> None:
    packed = packing.pack(example(), "int8")
    again = packing.pack(packing.unpack(packed), "int8")
    assert torch.equal(again["conv.weight"], packed["conv.weight"])
    np.testing.assert_allclose(again["conv.weight.row_scale"], packed["conv.weight.row_scale"], rtol=1e-6)


def test_fp16_and_fp32() -> None:
    given = example()
    halves = packing.pack(given, "fp16")
    assert halves["conv.weight"].dtype == torch.float16 and halves["conv.bias"].dtype == torch.float32
    assert torch.equal(packing.pack({"w": given["conv.weight"].double()}, "fp32")["w"], given["conv.weight"])


@pytest.mark.parametrize(
    ("tensors", "store", "message"),
    [
        ({"w": torch.tensor([[1.0, float("nan")]])}, "int8", "w: has values that are not finite"),
        ({"w": torch.tensor([[1e6]])}, "fp16", "w: 1e\\+06 is more than float16 holds"),
        ({"w": torch.ones(1, 1)}, "int4", "unknown store 'int4'"),
    ],
)
def test_refusals(tensors: dict[str, torch.Tensor], store: str, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        packing.pack(tensors, store)


def test_damaged_files_are_refused() -> None:
    packed = packing.pack(example(), "int8")
    with pytest.raises(ValueError, match="scales without their tensors: conv.weight"):
        packing.unpack({name: tensor for name, tensor in packed.items() if name != "conv.weight"})
    with pytest.raises(ValueError, match="does not go with scales of shape \\[5\\]"):
        packing.unpack(packed | {"conv.weight.row_scale": torch.ones(5)})


def test_files_come_unpacked(tmp_path, capsys: pytest.CaptureFixture[str]) -> None:
    given = {"model": {"layer.weight": torch.randn(4, 8), "layer.bias": torch.randn(4)}}
    torch.save(given, tmp_path / "whole.pth")
    arguments = ["convert", str(tmp_path / "whole.pth"), str(tmp_path / "small.safetensors"), "--store", "int8"]
    assert weights.main(arguments) == 0
    assert "2 tensors written" in capsys.readouterr().out
    found = weights.load_state_dict(tmp_path / "small.safetensors")
    assert found.keys() == given["model"].keys()
    model = torch.nn.ModuleDict({"layer": torch.nn.Linear(8, 4)})
    assert weights.load_into(model, found).complete
    torch.testing.assert_close(model["layer"].weight.detach(), given["model"]["layer.weight"], atol=0.02, rtol=0)
