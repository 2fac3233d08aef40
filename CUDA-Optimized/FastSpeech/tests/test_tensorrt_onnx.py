"""The ONNX route and the plugins, where TensorRT or TensorRT-RTX is installed; neither needs a GPU here."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from fastspeech.cuda import reference
from fastspeech.model import FastSpeech, FastSpeechConfig
from fastspeech.tensorrt import layers, onnx_route, plugins

try:
    trt = layers.load()
except ImportError as error:
    pytest.skip(f"needs tensorrt or tensorrt-rtx: {error}", allow_module_level=True)

HERE = Path(__file__).parent


class Decoder(torch.nn.Module):
    def __init__(self, model: FastSpeech) -> None:
        super().__init__()
        self.model = model

    def forward(self, expanded: torch.Tensor, lengths: torch.Tensor) -> torch.Tensor:
        return self.model.mel(self.model.decoder(expanded, lengths))


@pytest.mark.skipif(not layers.is_rtx(trt), reason="needs tensorrt-rtx: TensorRT itself builds only beside a GPU")
def test_an_onnx_file_becomes_an_engine(tmp_path):
    config = FastSpeechConfig(channels=32, heads=1, feed_forward=40, encoder_blocks=1, decoder_blocks=1, predictor=24)
    given = (torch.randn(2, 9, 32), torch.tensor([9, 5]))
    batch, frames = torch.export.Dim("batch", min=1, max=4), torch.export.Dim("frames", min=2, max=64)
    path = tmp_path / "decoder.onnx"
    torch.onnx.export(
        Decoder(FastSpeech(config).eval()), given, path, input_names=["expanded", "lengths"], output_names=["mel"],
        dynamic_shapes=({0: batch, 1: frames}, {0: batch}), dynamo=True, external_data=False,
    )  # fmt: skip
    shapes = {"expanded": ((1, 2, 32), (1, 64, 32), (4, 64, 32)), "lengths": ((1,), (1,), (4,))}
    assert len(onnx_route.build(trt, path, shapes, "SM80")) > 20_000
    with pytest.raises(ValueError, match="no shapes for \\['lengths'\\], unknown \\['text'\\]"):
        onnx_route.build(trt, path, {"expanded": shapes["expanded"], "text": ((1,), (1,), (1,))}, "SM80")
    path.write_bytes(b"no model")
    with pytest.raises(ValueError, match="cannot read it"):
        onnx_route.build(trt, path, shapes, "SM80")


@pytest.fixture
def made(host) -> plugins.Plugins:
    """Plugins whose launches go to the kernels as the CPU plays them."""
    return plugins.Plugins(trt, lambda: host)


def described(*tensors: torch.Tensor) -> list[SimpleNamespace]:
    types = {
        torch.float16: trt.float16,
        torch.bfloat16: trt.bfloat16,
        torch.float32: trt.float32,
        torch.int32: trt.int32,
    }
    return [SimpleNamespace(dims=tuple(x.shape), type=types[x.dtype], format=trt.TensorFormat.LINEAR) for x in tensors]


def addresses(*tensors: torch.Tensor) -> list[int]:
    return [x.data_ptr() for x in tensors]


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32])
def test_positions(made, dtype):
    x, lengths = torch.randn(2, 5, 16).to(dtype), torch.tensor([5, 2], dtype=torch.int32)
    out = torch.full_like(x, float("nan"))
    plugin = made.positions().clone()
    plugin.enqueue(described(x, lengths), described(out), addresses(x, lengths), addresses(out), 0, 0)
    torch.testing.assert_close(out, reference.add_positions(x, lengths), atol=1e-5, rtol=1e-2)
    assert (out[1, 2:] == 0).all()


@pytest.mark.parametrize("least", [0, 1])
def test_length_regulation(made, least):
    x, durations = torch.randn(2, 3, 8).half(), torch.tensor([[2, 0, 3], [0, 0, 0]], dtype=torch.int32)
    frames, out = torch.empty(7, dtype=torch.int32), torch.full((2, 7, 8), float("nan")).half()
    lengths = torch.full((2,), -1, dtype=torch.int32)
    plugin = made.regulation(least).clone()
    inputs, outputs = (x, durations, frames), (out, lengths)
    plugin.enqueue(described(*inputs), described(*outputs), addresses(*inputs), addresses(*outputs), 0, 0)
    expected, counted = reference.regulate(x, durations, 7, least, False)
    assert torch.equal(out, expected) and torch.equal(lengths, counted) and lengths.tolist() == [5, least]


def test_what_plugins_say_of_themselves(made):
    x, ints = torch.randn(1, 2, 8).half(), torch.ones(1, 2, dtype=torch.int32)
    regulation, positions = made.regulation(), made.positions()
    assert (regulation.num_outputs, positions.num_outputs) == (2, 1)
    assert regulation.get_output_data_types([trt.float16, trt.int32, trt.int32]) == [trt.float16, trt.int32]
    good = described(x, ints, ints, x, ints)
    assert all(regulation.supports_format_combination(place, good, 3) for place in range(5))
    assert not regulation.supports_format_combination(3, described(x, ints, ints, x.float(), ints), 3)
    assert not regulation.supports_format_combination(1, described(x, x, ints, x, ints), 3)
    assert not positions.supports_format_combination(0, described(ints, ints, ints), 2)
    good[0].format = trt.TensorFormat.CHW2
    assert not regulation.supports_format_combination(0, good, 3)
    (field,) = list(regulation.get_fields_to_serialize())
    assert field.name == "least" and int(field.data[0]) == 1


def test_creators_are_registered_once(made):
    for _ in range(2):
        plugins.register(trt, made.library)
    registry = trt.get_plugin_registry()
    creator = registry.get_creator(plugins.REGULATION, plugins.VERSION, plugins.NAMESPACE)
    assert creator is not None and registry.get_creator(plugins.POSITIONS, "2", plugins.NAMESPACE) is None
