"""Ways out of MXNet, int8 and inference: each computes what the trained network does."""

import json
import shutil
from pathlib import Path

import mxnet as mx
import numpy as np
import onnx
import onnxruntime
import pytest
from PIL import Image

from dlx import record
from rn50_mxnet import blocks, checkpoint, convert, export, infer, quantize, recordio, registry, train
from rn50_mxnet.data import build_loader


@pytest.fixture(scope="module")
def run(grey, tmp_path_factory):
    """A trained small network."""
    output = tmp_path_factory.mktemp("run")
    words = {
        "arch": "resnet8_small",
        "epochs": 15,
        "batch_size": 8,
        "lr": 0.1,
        "lr_batch_size": "null",
        "momentum": 0.9,
    }
    words |= {"data_dir": grey.folder, "output_dir": output, "warmup_epochs": 0.5, "device": "cpu"}
    train.main([word for key, value in words.items() for word in (f"--{key}", str(value))])
    return output


def random_model(tmp_path, arch, size, depths=None, channels=3):
    """A checkpoint of an untrained network with norms that do something."""
    network = registry.build(arch, 7, channels, depths=depths, seed=5)
    rng = np.random.default_rng(0)
    weights = {
        name: rng.uniform(0.5, 1.5, value.shape).astype(np.float32) if value.ndim == 1 else value
        for name, value in blocks.get_weights(network).items()
    }
    shape = checkpoint.preprocessing_for(arch, channels, size)
    described = {"arch": arch, "classes": [f"c{i}" for i in range(7)], "preprocessing": shape.to_dict()}
    checkpoint.save(tmp_path / "model", weights, described, checkpoint.Progress())
    return checkpoint.load(tmp_path / "model")


@pytest.mark.parametrize("batch", [None, 4])
def test_onnx_computes_the_same_for_one_batch_or_any(run, tmp_path, batch):
    found = checkpoint.load(run)
    path = tmp_path / "model.onnx"
    assert export.to_onnx(found, path, batch) < 1e-5
    session = onnxruntime.InferenceSession(str(path), providers=["CPUExecutionProvider"])
    (given,) = session.get_inputs()
    images = np.random.default_rng(0).standard_normal((4, 1, 28, 28)).astype(np.float32)
    expected = found.network(mx.nd.array(images)).asnumpy()
    np.testing.assert_allclose(session.run(None, {given.name: images})[0], expected, atol=1e-4)
    assert given.name == "data" and (given.shape[0] == 4 if batch else isinstance(given.shape[0], str))
    if batch:
        with pytest.raises(Exception, match="invalid dimensions"):
            session.run(None, {given.name: images[:2]})
    stored = {entry.key: entry.value for entry in onnx.load(str(path)).metadata_props}
    assert json.loads(stored["classes"]) == found.classes and stored["arch"] == "resnet8_small"


@pytest.mark.parametrize(
    ("arch", "depths", "size"),
    [
        ("resnet50", (1, 1, 1, 1), 64),
        ("resnet50_v1", (1, 1, 1, 1), 64),
        ("resnext101_32x4d", (1, 1, 1, 1), 64),
        ("xception", None, 75),
    ],
)
def test_every_family_exports(tmp_path, arch, depths, size):
    assert export.to_onnx(random_model(tmp_path, arch, size, depths), tmp_path / "m.onnx") < 1e-4


def test_a_graph_that_differs_leaves_no_file(run, tmp_path):
    found = checkpoint.load(run)
    found.weights["fc.bias"] = (
        found.weights["fc.bias"] + 1
    )  # what is exported; the network that it is compared with stays
    with pytest.raises(ValueError, match="differs by .* of the largest logit at batch 1"):
        export.to_onnx(found, tmp_path / "model.onnx")
    assert not list(tmp_path.iterdir())


def test_weights_for_pytorch_come_back(run, tmp_path):
    result = export.main(["--checkpoint", str(run), "--format", "pytorch", "--output_dir", str(tmp_path)])
    again = checkpoint.load(result["path"], arch="resnet8_small")
    images = mx.nd.array(np.random.default_rng(0).standard_normal((3, 1, 28, 28)))
    np.testing.assert_array_equal(again.network(images).asnumpy(), checkpoint.load(run).network(images).asnumpy())
    described = json.loads((tmp_path / "model.json").read_text())
    assert described["classes"] == ["ant", "bee", "cat"] and described["arch"] == "resnet8_small"
    with pytest.raises(ValueError, match="does not say what it is; give --arch"):
        checkpoint.load(result["path"])


def test_networks_without_a_namesake_are_not_converted(tmp_path):
    found = random_model(tmp_path, "resnet50_v1", 64, (1, 1, 1, 1))
    with pytest.raises(ValueError, match="resnet50_v1 has no counterpart .* stride in another convolution"):
        convert.to_pytorch(found, tmp_path)


def test_a_params_file_of_the_model_zoo_is_read(tmp_path):
    zoo = mx.gluon.model_zoo.vision.resnet18_v1(classes=5)
    zoo.initialize()
    images = mx.nd.array(np.random.default_rng(0).standard_normal((2, 3, 64, 64)))
    expected = zoo(images).asnumpy()
    zoo.save_parameters(str(tmp_path / "zoo.params"))
    words = [str(tmp_path / "zoo.params"), "resnet18_v1", str(tmp_path / "zoo.safetensors"), "--num_classes", "5"]
    convert.main(words)
    ours = checkpoint.load(tmp_path / "zoo.safetensors", arch="resnet18_v1").network
    np.testing.assert_allclose(ours(images).asnumpy(), expected, atol=1e-5 * np.abs(expected).max())
    with pytest.raises(ValueError, match="not a .params file of resnet34_v1"):
        convert.from_params(tmp_path / "zoo.params", "resnet34_v1", 5)
    with pytest.raises(ValueError, match="resnet18: MXNet's model zoo shares"):
        convert.from_params(tmp_path / "zoo.params", "resnet18", 5)


def test_damaged_checkpoints_are_named(run, tmp_path):
    (tmp_path / "x.safetensors").write_bytes(b"no tensors")
    with pytest.raises(ValueError, match="x.safetensors: not a readable safetensors file"):
        checkpoint.load(tmp_path / "x.safetensors", arch="resnet18")
    (tmp_path / "state.json").write_text('{"arch": "resnet18"}')
    with pytest.raises(ValueError, match="state.json: lacks 'classes'"):
        checkpoint.load(tmp_path)
    with pytest.raises(ValueError, match="holds a resnet8_small, not a resnet18"):
        checkpoint.load(run, arch="resnet18")
    shutil.copytree(checkpoint.find(run), tmp_path / "bit")
    weights = bytearray((tmp_path / "bit" / "model.safetensors").read_bytes())
    weights[len(weights) // 2] ^= 0x40
    (tmp_path / "bit" / "model.safetensors").write_bytes(weights)
    with pytest.raises(ValueError, match="model.safetensors: damaged, its SHA-256 is not that of state.json"):
        checkpoint.load(tmp_path / "bit")


def test_int8(grey, run, tmp_path):
    """Accuracy before and after, products really in int8, and the files give what was measured."""
    words = ["--checkpoint", str(run), "--data_dir", str(grey.folder), "--output_dir", str(tmp_path)]
    result = quantize.main([*words, "--batch_size", "8", "--calibration_batches", "4", "--latency_iterations", "5"])
    assert result["float"] > 80 and abs(result["int8"] - result["float"]) < 10
    graph = json.loads((tmp_path / "model_int8-symbol.json").read_text())
    operators = [node["op"] for node in graph["nodes"]]
    quantized = [
        node for node in graph["nodes"]
        if node["op"] == "_sg_mkldnn_conv" and node["attrs"].get("quantized", "").lower() == "true"
    ]  # fmt: skip
    assert len(quantized) >= 8, operators
    found = record.load(tmp_path)
    assert found.value("val.top1.int8") == result["int8"] and found.value("latency.int8") > 0
    images = (next(build_loader(grey, "val", batch_size=8, image_size=28, train=False).epoch(0))[0] / 255 - 0.5) / 0.5
    ours, exact = quantize.load_quantized(tmp_path)(images).asnumpy(), checkpoint.load(run).network(images).asnumpy()
    assert 0 < np.abs(ours - exact).max() < 0.3 * np.abs(exact).max()
    with pytest.raises(ValueError, match="no model_int8-symbol.json here"):
        quantize.load_quantized(run)


def test_inference_sees_what_the_loader_gives(grey, run, tmp_path):
    """Pictures as files: the same probabilities as from the records, in a JSON file and under the pictures."""
    for row, (_, _, payload) in zip(range(3), recordio.read_records(grey.path("val")), strict=False):
        (tmp_path / "in").mkdir(exist_ok=True)
        (tmp_path / "in" / f"{row}.png").write_bytes(recordio.decode_picture(payload)[2])
    content = infer.main(
        ["--checkpoint", str(run), "--image", str(tmp_path / "in"), "--topk", "3"]
        + ["--output_dir", str(tmp_path / "out")]
    )  # fmt: skip
    found = checkpoint.load(run)
    images, labels = next(build_loader(grey, "val", batch_size=3, image_size=28, train=False).epoch(0))
    expected = mx.nd.softmax(found.network((images / 255 - 0.5) / 0.5)).asnumpy()
    for row, prediction in enumerate(content["predictions"]):
        shares = {entry["class"]: entry["probability"] for entry in prediction["top"]}
        assert [shares[name] for name in found.classes] == pytest.approx(expected[row], abs=1e-5)
        assert Image.open(prediction["annotated"]).width >= 160
    assert json.loads((tmp_path / "out" / "predictions.json").read_text())["predictions"] == content["predictions"]


def test_inference_of_broken_files(run, tmp_path):
    (tmp_path / "in").mkdir()
    (tmp_path / "in" / "a.png").write_text("nothing")
    words = ["--checkpoint", str(run), "--image", str(tmp_path / "in"), "--output_dir", str(tmp_path / "out")]
    with pytest.raises(ValueError, match="a.png"):
        infer.main(words)
    Image.new("RGB", (50, 30)).save(tmp_path / "in" / "b.jpg")
    content = infer.main([*words, "--tolerant", "true"])
    assert len(content["predictions"]) == 1 and Path(content["skipped"][0][0]).name == "a.png"
