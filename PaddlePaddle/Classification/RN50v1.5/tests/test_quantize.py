"""int8: rounding against onnxruntime, gradients, calibration, and the exported file against the simulation."""

from __future__ import annotations

import numpy as np
import onnx
import onnxruntime
import paddle
import pytest
from onnx import helper, numpy_helper

from dlx import record
from rn50_paddle import convert, fold, quantize, quantized_onnx, quantizers, train
from rn50_paddle.model import build

SMALL = ["--data", "synthetic", "--num_classes", "4", "--num_samples", "256"]


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    """A small classifier that has learnt something."""
    folder = tmp_path_factory.mktemp("run")
    train.main([*SMALL, "--arch", "resnet8_small", "--batch_size", "32", "--epochs", "3", "--lr", "0.05",
                "--lr_batch_size", "null", "--warmup_epochs", "0", "--output_dir", str(folder)])  # fmt: skip
    return folder


@pytest.mark.parametrize("limits", [(-128, 127), (0, 255)])
def test_rounding_is_that_of_onnxruntime(limits):
    values = np.random.default_rng(0).normal(size=4000).astype(np.float32) * 3
    scale = np.float32(0.0173)
    zero = np.uint8(128 if limits[0] else 0)
    nodes = [
        helper.make_node("QuantizeLinear", ["x", "scale", "zero"], ["levels"]),
        helper.make_node("DequantizeLinear", ["levels", "scale", "zero"], ["y"]),
    ]
    places = [helper.make_tensor_value_info(name, onnx.TensorProto.FLOAT, [4000]) for name in "xy"]
    tensors = [numpy_helper.from_array(np.asarray(scale), "scale"), numpy_helper.from_array(np.asarray(zero), "zero")]
    graph = helper.make_graph(nodes, "pair", places[:1], places[1:], tensors)
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=8)
    session = onnxruntime.InferenceSession(model.SerializeToString(), providers=["CPUExecutionProvider"])
    expected = session.run(None, {"x": values})[0]
    found = quantizers.round_to(paddle.to_tensor(values), paddle.to_tensor(scale), *limits).numpy()
    np.testing.assert_allclose(found, expected, atol=1e-6)
    assert len(np.unique(found)) > 100


def test_the_gradient_passes_inside_the_range_only():
    x = paddle.to_tensor([-300.0, -5.2, 0.3, 99.0, 400.0], stop_gradient=False)
    (quantizers.round_to(x, paddle.to_tensor(1.0), -128, 127) * paddle.arange(1.0, 6.0)).sum().backward()
    assert x.grad.tolist() == [0.0, 2.0, 3.0, 4.0, 0.0]


def test_an_observer_finds_range_and_sign():
    watched = quantizers.Observer(100)
    with pytest.raises(ValueError, match="nothing was observed"):
        _ = watched.scale
    watched.watch(paddle.to_tensor([0.0, 2.0]))
    watched.watch(paddle.to_tensor([1.0, 4.0]))
    assert not watched.signed and abs(watched.scale - 3 / 255) < 1e-9
    watched.watch(paddle.to_tensor([-6.0, 4.0]))
    assert watched.signed and abs(watched.scale - 4 / 127) < 1e-9
    with pytest.raises(ValueError, match="percentile"):
        quantizers.Observer(20)


def test_float_mode_changes_nothing_and_rounding_a_little():
    model = fold.fold(build("resnet18", 10), "resnet18")
    images = paddle.to_tensor(np.random.default_rng(0).normal(size=(2, 3, 64, 64)).astype(np.float32))
    expected = model(images).numpy()
    layers = quantizers.wrap(model)
    assert len(layers) == 21  # 20 convolutions, 1 linear
    np.testing.assert_array_equal(model(images).numpy(), expected)
    quantizers.set_mode(layers, "observe")
    model(images)
    quantizers.set_mode(layers, "quantise")
    error = np.abs(model(images).numpy() - expected).max() / np.abs(expected).max()
    assert 1e-4 < error < 0.1


@pytest.mark.parametrize("arch, size", [("resnet8_small", 28), ("resnet50", 64)])
def test_the_exported_file_computes_the_simulation(arch, size, tmp_path):
    paddle.seed(2)
    model = build(arch, 10)
    for _ in range(4):  # running statistics that fit, so that the activations are of one size
        model(paddle.randn([4, 3, size, size]))
    folded = fold.fold(model, arch)
    layers = quantizers.wrap(folded)
    images = np.random.default_rng(1).normal(size=(4, 3, size, size)).astype(np.float32)
    quantizers.set_mode(layers, "observe")
    folded(paddle.to_tensor(images))
    quantizers.set_mode(layers, "quantise")
    with paddle.no_grad():
        expected = folded(paddle.to_tensor(images)).numpy()
    path = tmp_path / "int8.onnx"
    quantized_onnx.export(folded, layers, 3, size, path)
    session = quantized_onnx.session(path)
    for batch in (1, 4):
        found = session.run(None, {"images": images[:batch]})[0]
        # A value on the edge of a level may go either way; it must stay far below the error of rounding itself.
        assert np.abs(found - expected[:batch]).max() < 0.05 * np.abs(expected).max()
    kernels = quantized_onnx.integer_kernels(path)
    assert kernels["integer"] >= len(layers) - 1 and kernels["float"] <= 1
    kinds = {tensor.data_type for tensor in onnx.load(str(path)).graph.initializer if tensor.name.endswith("levels")}
    assert kinds == {onnx.TensorProto.UINT8, onnx.TensorProto.INT32}
    with paddle.no_grad():  # exporting leaves the simulation as it was
        np.testing.assert_array_equal(folded(paddle.to_tensor(images)).numpy(), expected)


def test_all_stages_of_a_run(run, tmp_path):
    arguments = [*SMALL, "--checkpoint", str(run), "--calibration_batches", "2", "--batch_size", "32", "--steps", "6"]
    fields = quantize.main([*arguments, "--output_dir", str(tmp_path)])
    found = record.load(tmp_path)
    stages = {name: found.value(f"val.top1.{name}") for name in ("float", "calibrated", "finetuned", "onnxruntime")}
    assert stages["float"] > 60
    assert abs(stages["onnxruntime"] - stages["finetuned"]) <= 1.0
    assert min(stages.values()) > stages["float"] - 10
    assert found.value("size.int8") < 0.4 * found.value("size.float")
    assert len(fields["curve"]["train.loss"]) == 6 and (tmp_path / "model_int8.onnx").is_file()


def test_a_file_with_other_numbers_is_refused(run, tmp_path, monkeypatch):
    weight = quantized_onnx._Rewriter.weight

    def wrong(self, name, layer):
        found = weight(self, name, layer)
        scale = next(tensor for tensor in self.tensors if tensor.name == f"{name}.weight.scale")
        values = numpy_helper.to_array(scale) * np.where(np.arange(len(numpy_helper.to_array(scale))) % 2, -1, 1)
        scale.CopyFrom(numpy_helper.from_array(values.astype(np.float32), scale.name))
        return found

    monkeypatch.setattr(quantized_onnx._Rewriter, "weight", wrong)
    arguments = [*SMALL, "--checkpoint", str(run), "--calibration_batches", "1", "--steps", "0"]
    with pytest.raises(ValueError, match="refused and removed"):
        quantize.main([*arguments, "--output_dir", str(tmp_path)])
    assert not (tmp_path / "model_int8.onnx").exists()


def test_fine_tuning_moves_the_weights(run):
    from rn50_paddle import pretrained
    from rn50_paddle.data import Order, open_data
    from rn50_paddle.loader import Loader

    found = pretrained.load(run)
    model = fold.fold(found.model, found.arch)
    layers = quantizers.wrap(model)
    split = open_data("synthetic", num_classes=4, num_samples=256)["train"]
    loader = Loader(split, Order(256, 32, True, 1), size=28, resize=28, augment=False)
    quantize.calibrate(layers, model, loader, found.preprocessing, 2)
    inner = layers["layer2.0.conv1"].inner.weight  # as a 2:4 sparse model has it
    inner.set_value(inner * paddle.to_tensor(np.arange(inner.size).reshape(inner.shape) % 2, "float32"))
    before = convert.arrays_of(model)
    losses = quantize.fine_tune(model, loader, found.preprocessing, 10, 0.01)
    after = convert.arrays_of(model)
    assert len(losses) == 10 and np.mean(losses[-3:]) < np.mean(losses[:3]) + 0.1
    assert all(np.abs(after[key] - before[key]).max() > 0 for key in before if key.endswith("weight"))
    assert np.mean(inner.numpy() == 0) == 0.5
