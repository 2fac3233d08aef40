"""Exported graphs in onnxruntime, the server's repository (case O35), and what a benchmark's record says (O27)."""

from __future__ import annotations

import functools
import json
import re
import sys
import types
from pathlib import Path

import numpy as np
import onnxruntime
import pytest
import torch
from torch import nn

from convnets import benchmark, export, options, pretrained, registry, serve
from convnets.memory import Tensors
from dlx import bench, inference
from dlx import checkpoint as checkpoints
from dlx import export as exports
from dlx import record as records
from dlx.serve import OnnxModel

CLASSES = ["ant", "bee", "cat", "dog"]
SIZES = {"resnet8_small": 28, "mobilenet_v2": 64, "efficientnet_b0": 64}


@pytest.fixture(autouse=True, scope="module")
def one_thread():
    """The models are small: on a busy machine threads would only wait for each other."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


@functools.cache
def classifier(arch: str) -> pretrained.Classifier:
    """Fresh weights, and batch-norm statistics and gains as a training leaves them: none is 0 or 1."""
    torch.manual_seed(0)
    model = registry.build(arch, len(CLASSES)).train()
    for module in model.modules():
        if isinstance(module, nn.BatchNorm2d):
            module.momentum = None  # the statistics of the pictures below, so that activations keep their size
            nn.init.uniform_(module.weight, 0.7, 1.3)
            nn.init.normal_(module.bias, 0.0, 0.1)
    with torch.no_grad():
        model(torch.randn(8, 3, SIZES[arch], SIZES[arch]))
    shape = pretrained.default_preprocessing(arch, SIZES[arch])
    return pretrained.Classifier(model.eval(), arch, shape, CLASSES, "test")


@pytest.fixture(scope="module")
def exported(tmp_path_factory) -> dict[str, Path]:
    folder = tmp_path_factory.mktemp("exported")
    paths = {arch: folder / f"{arch}.onnx" for arch in SIZES}
    for arch, path in paths.items():
        assert export.export(classifier(arch), path) <= 1e-4
    return paths


@pytest.fixture(scope="module")
def run_folder(tmp_path_factory) -> Path:
    """A run with one checkpoint."""
    folder = tmp_path_factory.mktemp("run")
    found = classifier("resnet8_small")
    store = checkpoints.Checkpoints(folder / "checkpoints")
    store.save(1, model={"model": found.model.state_dict()}, metadata=found.describe())
    return folder


def images(arch: str, batch: int) -> torch.Tensor:
    return torch.randn(batch, 3, SIZES[arch], SIZES[arch], generator=torch.Generator().manual_seed(batch + 100))


# ---------------------------------------------------------------------------------------------------- export


@pytest.mark.parametrize("arch", SIZES)
def test_graph_equals_the_model_at_any_batch(exported, arch):
    """User case O35: 1e-4 relative to the largest logit, in another runtime."""
    session = onnxruntime.InferenceSession(str(exported[arch]), providers=["CPUExecutionProvider"])
    (given,), (result,) = session.get_inputs(), session.get_outputs()
    assert (given.name, given.shape[1:], result.name, result.shape[1:]) == (
        "images", [3, SIZES[arch], SIZES[arch]], "logits", [len(CLASSES)]
    )  # fmt: skip
    for batch in (1, 3, 7):
        x = images(arch, batch)
        with torch.no_grad():
            expected = classifier(arch).model(x).numpy()
        (found,) = session.run(None, {"images": x.numpy()})
        assert found.shape == (batch, len(CLASSES))
        assert np.abs(found - expected).max() <= 1e-4 * max(1.0, np.abs(expected).max()), batch


@pytest.mark.parametrize("arch", SIZES)
def test_file_carries_all_that_is_needed_to_use_it(exported, arch):
    """One file, from which preprocessing and class names are read back."""
    assert sorted(path.name for path in exported[arch].parent.iterdir()) == sorted(f"{name}.onnx" for name in SIZES)
    session = onnxruntime.InferenceSession(str(exported[arch]), providers=["CPUExecutionProvider"])
    stored = {key: value for key, value in session.get_modelmeta().custom_metadata_map.items()}
    assert json.loads(stored["classes"]) == CLASSES and stored["arch"].strip('"') == arch
    assert json.loads(stored["preprocessing"]) == classifier(arch).preprocessing.to_dict()
    assert exports.read_metadata(exported[arch])["arch"] == arch


def test_exporting_leaves_the_model_as_it_was(tmp_path):
    found = classifier("resnet8_small")
    before = {name: value.clone() for name, value in found.model.state_dict().items()}
    export.export(found, tmp_path / "a.onnx", batches=(2,))
    for name, value in found.model.state_dict().items():
        assert torch.equal(value, before[name]), name
    assert isinstance(found.model.conv1, nn.Conv2d) and found.model.fc.weight.requires_grad


def test_disagreement_leaves_no_file(tmp_path, monkeypatch):
    fold = inference.fold

    def wrong(model):
        folded = fold(model)
        folded.fc.bias[1] += 0.01
        return folded

    monkeypatch.setattr(inference, "fold", wrong)
    with pytest.raises(exports.ParityError, match=r"a\.onnx: output logits at batch 1: differs by up to 0\.01"):
        export.export(classifier("resnet8_small"), tmp_path / "a.onnx")
    assert not list(tmp_path.iterdir())


def test_any_failure_of_the_check_leaves_no_file(tmp_path, monkeypatch):
    def refused(*args, **kwargs):
        raise RuntimeError("the runtime does not know this operator")

    monkeypatch.setattr(onnxruntime, "InferenceSession", refused)
    with pytest.raises(RuntimeError, match="does not know"):
        export.export(classifier("resnet8_small"), tmp_path / "a.onnx")
    assert not list(tmp_path.iterdir())


def test_export_verb(run_folder, tmp_path, capsys):
    arguments = ["--checkpoint", str(run_folder), "--output_dir", str(tmp_path / "out"), "--batches", "1", "5"]
    result = export.main(arguments)
    assert result["path"] == str(tmp_path / "out" / "model.onnx") and result["difference"] <= 1e-4
    assert "resnet8_small" in capsys.readouterr().out
    with pytest.raises(ValueError, match="nowhere"):
        export.main(["--checkpoint", "nowhere", "--output_dir", str(tmp_path / "none")])
    assert not (tmp_path / "none").exists()


# ---------------------------------------------------------------------------------------------------- server


def read_pbtxt(text: str) -> dict:
    """Names, types and dims of the two port lists, and the plain keys."""
    found: dict = {"plain": dict(re.findall(r'^(\w+): "?([^"\n]+)"?$', text, re.M))}
    for group in ("input", "output"):
        block = re.search(rf"^{group} \[\n(.*?)^\]", text, re.M | re.S)[1]
        found[group] = [
            (name, kind, [int(size) for size in dims.split(",")])
            for name, kind, dims in re.findall(r'name: "(\w+)"\s+data_type: (\w+)\s+dims: \[ ([^\]]+) \]', block)
        ]
    return found


def test_repository_lists_the_graphs_own_ports(run_folder, tmp_path):
    """User case O35."""
    arguments = ["--checkpoint", str(run_folder), "--output_dir", str(tmp_path), "--name", "pets"]
    serve.main([*arguments, "--max_batch_size", "16", "--instance_kind", "cpu"])
    folder = tmp_path / "pets"
    assert sorted(path.relative_to(tmp_path).as_posix() for path in tmp_path.rglob("*") if path.is_file()) == [
        "pets/1/model.onnx", "pets/config.pbtxt", "pets/labels.txt"
    ]  # fmt: skip
    session = onnxruntime.InferenceSession(str(folder / "1" / "model.onnx"), providers=["CPUExecutionProvider"])
    config = read_pbtxt((folder / "config.pbtxt").read_text())
    types_of = {"tensor(float)": "TYPE_FP32"}
    for group, values in (("input", session.get_inputs()), ("output", session.get_outputs())):
        assert config[group] == [(value.name, types_of[value.type], value.shape[1:]) for value in values]
    assert config["plain"] == {"name": "pets", "backend": "onnxruntime", "max_batch_size": "16"}
    text = (folder / "config.pbtxt").read_text()
    assert 'label_filename: "labels.txt"' in text and "KIND_CPU" in text
    assert (folder / "labels.txt").read_text().split() == CLASSES
    serve.main([*arguments, "--max_batch_size", "4"])  # a new version of the weights replaces the folder whole
    assert "max_batch_size: 4" in (folder / "config.pbtxt").read_text()
    assert [path.name for path in tmp_path.iterdir()] == ["pets"]


def test_batch_above_the_maximum_is_split(exported):
    small, whole = OnnxModel(exported["resnet8_small"], max_batch_size=8), OnnxModel(exported["resnet8_small"])
    x = images("resnet8_small", 9).numpy()
    sizes = []
    run = small.session.run
    small.session = types.SimpleNamespace(
        run=lambda names, given: sizes.append(len(given["images"])) or run(names, given)
    )
    np.testing.assert_allclose(small(x)["logits"], whole(images=x)["logits"], atol=1e-5)
    assert sizes == [8, 1]
    with pytest.raises(ValueError, match=r"images is float32\[-1, 3, 28, 28\], got float32\[2, 3, 32, 32\]"):
        small(np.zeros((2, 3, 32, 32), np.float32))
    with pytest.raises(ValueError, match="got uint8"):
        small(np.zeros((2, 3, 28, 28), np.uint8))


def test_refused_name_leaves_nothing(run_folder, tmp_path):
    with pytest.raises(ValueError, match="my pets"):
        serve.main(["--checkpoint", str(run_folder), "--output_dir", str(tmp_path), "--name", "my pets"])
    assert not list(tmp_path.iterdir())


# ------------------------------------------------------------------------------------------------- benchmark

QUICK = (
    "--arch resnet8_small --image_size 16 --precision fp32 --device cpu --warmup 1 --iterations 3 --pairs 2 --workers 0"
).split()


def measured(tmp_path: Path, *more: str) -> dict:
    return benchmark.main([*QUICK, "--output", str(tmp_path / "deep" / "record.json"), *more])


def test_warm_up_must_be_shorter_than_the_measurement(tmp_path, monkeypatch):
    """User case O27: said before anything runs."""
    monkeypatch.setattr(benchmark, "measure_model", None)
    with pytest.raises(ValueError, match="warmup 200 must be less than iterations 100"):
        measured(tmp_path, "--warmup", "200", "--iterations", "100")
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("mode", ["inference", "latency", "training"])
def test_record_says_what_was_measured_where(tmp_path, mode):
    """User case O27."""
    measured(tmp_path, "--mode", mode, "--batch_sizes", "2", "3")
    fields = records.load(tmp_path / "deep" / "record.json").fields
    assert fields["verb"] == "benchmark" and fields["config"]["mode"] == mode and fields["hardware"]["cpu"]
    rows = fields["attachments"]["rows"]
    assert [row["batch"] for row in rows] == [2, 3]
    for row in rows:
        assert row["program"] == "ours" and row["arch"] == "resnet8_small" and row["unit"] == "images/s"
        assert row["shape"] == [row["batch"], 3, 16, 16] and row["device"] == "cpu" and row["device_name"]
        assert row["versions"]["torch"] == torch.__version__ and row["precision"] == "fp32"
        assert (row["warmup"], row["iterations"]) == (1, 3)
        assert row["throughput"] == pytest.approx(row["batch"] * 3 / row["seconds"])
        assert 0 < row["p50_ms"] <= row["p90_ms"] <= row["p99_ms"]


@pytest.mark.parametrize("mode", ["inference", "training"])
def test_peer_that_is_not_installed(tmp_path, monkeypatch, mode):
    monkeypatch.setitem(sys.modules, "torchvision", None)
    with pytest.raises(ValueError, match="peer torchvision needs the package torchvision"):
        measured(tmp_path, "--mode", mode, "--peers", "torchvision")
    with pytest.raises(ValueError, match="unknown peer 'keras'; known: torchvision"):
        measured(tmp_path, "--mode", mode, "--peers", "keras")
    assert not list(tmp_path.iterdir())


def test_peers_are_measured_in_turns(tmp_path, monkeypatch):
    """With a stand-in for the other library: a row each, and our throughput over theirs per turn."""
    models = types.SimpleNamespace(get_model=lambda arch: registry.build(arch))
    monkeypatch.setitem(sys.modules, "torchvision", types.SimpleNamespace(models=models))
    measured(tmp_path, "--mode", "training", "--batch_sizes", "2", "--peers", "torchvision")
    ours, peer = records.load(tmp_path / "deep" / "record.json").fields["attachments"]["rows"]
    assert (ours["program"], peer["program"]) == ("ours", "torchvision")
    low, high = peer["ours_over_this_pairs"]
    assert peer["ours_over_this"] == pytest.approx((low + high) / 2) and ours["ours_over_this"] == 1.0
    assert ours["iterations"] == peer["iterations"] == 6


def test_loaders_are_measured_alone_and_in_training(tmp_path, monkeypatch):
    generator = torch.Generator().manual_seed(0)
    pictures = torch.randint(0, 256, (40, 16, 16, 3), generator=generator, dtype=torch.uint8)
    splits = {name: Tensors(name, CLASSES, pictures, torch.arange(40) % 4) for name in ("train", "val")}
    monkeypatch.setattr(options, "open_data", lambda *args, **kwargs: splits)
    monkeypatch.setattr(bench, "drain", functools.partial(bench.drain, seconds=0.05))
    monkeypatch.setattr(bench, "fed", functools.partial(bench.fed, seconds=0.05))
    measured(tmp_path, "--mode", "loader", "--backends", "pytorch", "--batch_sizes", "4")
    rows = records.load(tmp_path / "deep" / "record.json").fields["attachments"]["rows"]
    assert [row["loader"] for row in rows] == ["pytorch", "synthetic"]
    for row in rows:
        assert row["loader_images_per_second"] > row["training_images_per_second"] > 0
    assert rows[1]["of_synthetic"] == 1.0
