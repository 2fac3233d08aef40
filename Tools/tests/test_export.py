"""Export, parity, the build cache, the Triton repository and the local runner (case O35)."""

import re

import numpy as np
import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("onnx")
pytest.importorskip("onnxruntime")

from dlx import export, serve  # noqa: E402


class Net(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.conv = torch.nn.Conv2d(3, 4, 3)
        self.norm = torch.nn.BatchNorm2d(4)
        self.dropout = torch.nn.Dropout(0.5)
        self.fc = torch.nn.Linear(4, 5)

    def forward(self, x):
        return self.fc(self.dropout(self.norm(self.conv(x)).relu().mean((2, 3))))


class Fixed(torch.nn.Module):
    def forward(self, x):
        return x.reshape(2, -1)


def pictures(batch: int):
    return torch.randn((batch, 3, 8, 8), generator=torch.Generator().manual_seed(batch))


@pytest.fixture(scope="module")
def graph(tmp_path_factory):
    torch.manual_seed(0)
    model = Net().train()
    path = tmp_path_factory.mktemp("onnx") / "net.onnx"
    metadata = {"arch": "net", "labels": ["a", "b"]}
    export.to_onnx(model, pictures(1), path, input_names=["images"], output_names=["logits"], metadata=metadata)
    assert model.training, "the model's mode is put back"
    return model, path


def test_graph_equals_model_at_any_batch(graph):
    model, path = graph
    assert export.check_onnx(path, model, pictures, batches=(1, 3, 7)) < 1e-5
    assert [p.name for p in path.parent.iterdir()] == ["net.onnx"], "one file, nothing left beside it"


def test_other_sizes_may_vary_too(tmp_path):
    batch, length = torch.export.Dim("batch"), torch.export.Dim("length")
    model, path = torch.nn.Conv1d(3, 4, 3, padding=1), tmp_path / "net.onnx"
    export.to_onnx(model, torch.randn(2, 3, 9), path, dynamic_shapes=[{0: batch, 2: length}])
    for size in (5, 31):
        assert export.check_onnx(path, model, lambda count, size=size: torch.randn(count, 3, size)) < 1e-5


def test_metadata_comes_back(graph):
    assert export.read_metadata(graph[1]) == {"arch": "net", "labels": ["a", "b"]}


def test_parity_error_names_output_and_batch(graph):
    model, path = graph
    other = Net()
    with pytest.raises(export.ParityError, match=r"output logits at batch 1: differs by up to"):
        export.check_onnx(path, other, pictures)
    assert model.training and other.training


def test_model_that_fixes_its_batch_is_refused(tmp_path):
    with pytest.raises(ValueError, match=r"output has a fixed batch \(2\); the model depends on its batch size"):
        export.to_onnx(Fixed(), torch.zeros(2, 4), tmp_path / "x.onnx")
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("change", ["weights", "precision", "max_shape", "builder"])
def test_build_cache(tmp_path, change):
    built = []

    def build(path):
        built.append(path)
        path.write_text(str(len(built)))

    key = {"weights": "abc", "precision": "fp16", "max_shape": [8, 3, 224, 224], "builder": "1.0"}
    first = export.build_once(tmp_path, key, build)
    assert export.build_once(tmp_path, dict(reversed(key.items())), build) == first and len(built) == 1
    assert export.build_once(tmp_path, key | {change: "other"}, build) != first and len(built) == 2

    def fail(path):
        path.write_text("half")
        raise RuntimeError("no")

    with pytest.raises(RuntimeError):
        export.build_once(tmp_path, {"new": 1}, fail)
    assert len([p for p in tmp_path.iterdir() if p.suffix != ".lock"]) == 2


def test_repository_lists_the_graphs_own_ports(graph, tmp_path):
    _, path = graph
    labels = ["one", "two", "three", "four", "five"]
    folder = serve.model_repository(path, tmp_path, "net", max_batch_size=8, labels=labels, instance_kind="cpu")
    assert sorted(p.relative_to(folder).as_posix() for p in folder.rglob("*")) == [
        "1", "1/model.onnx", "config.pbtxt", "labels.txt",
    ]  # fmt: skip
    text = (folder / "config.pbtxt").read_text()
    assert re.findall(r'name: "(\w+)"', text) == ["net", "images", "logits"]
    assert re.findall(r"dims: \[ (.*?) \]", text) == ["3, 8, 8", "5"]
    assert re.findall(r"data_type: (\w+)", text) == ["TYPE_FP32", "TYPE_FP32"]
    assert "max_batch_size: 8" in text and "KIND_CPU" in text and 'label_filename: "labels.txt"' in text
    assert text.count("{") == text.count("}") and text.count("[") == text.count("]")
    assert (folder / "labels.txt").read_text().split() == labels
    # Once more over the old one.
    serve.model_repository(path, tmp_path, "net", max_batch_size=0)
    assert "dims: [ -1, 3, 8, 8 ]" in (folder / "config.pbtxt").read_text()
    assert not (folder / "labels.txt").exists()


def test_repository_refuses_what_the_graph_cannot_take(graph, tmp_path):
    model, path = graph
    fixed = tmp_path / "fixed.onnx"
    export.to_onnx(model, pictures(2), fixed, input_names=["images"], output_names=["logits"], dynamic_batch=False)
    with pytest.raises(ValueError, match=r"up to 8, images has the fixed shape \[2, 3, 8, 8\]"):
        serve.model_repository(fixed, tmp_path / "r", "net", max_batch_size=8)
    with pytest.raises(ValueError, match=r"3 labels fit no output \(logits \[-1, 5\]\)"):
        serve.model_repository(path, tmp_path / "r", "net", max_batch_size=8, labels=["a", "b", "c"])
    with pytest.raises(ValueError, match="model name"):
        serve.model_repository(path, tmp_path / "r", "../net", max_batch_size=8)
    with pytest.raises(ValueError, match="instance_kind 'tpu'"):
        serve.model_repository(path, tmp_path / "r", "net", max_batch_size=8, instance_kind="tpu")
    assert not (tmp_path / "r").exists()


def test_runner_splits_and_checks(graph):
    _, path = graph
    images = pictures(9).numpy()
    whole = serve.OnnxModel(path)(images)["logits"]
    runner = serve.OnnxModel(path, max_batch_size=8)
    np.testing.assert_allclose(runner(images=images)["logits"], whole, rtol=0, atol=1e-6)
    assert whole.shape == (9, 5)
    with pytest.raises(ValueError, match=r"images is float32\[-1, 3, 8, 8\], got float64\[9, 3, 8, 8\]"):
        runner(images.astype(np.float64))
    with pytest.raises(ValueError, match=r"got float32\[9, 8, 8, 3\]"):
        runner(images.transpose(0, 2, 3, 1).copy())
    with pytest.raises(ValueError, match="takes the inputs images, got pixels"):
        runner(pixels=images)
    assert serve.describe(path) == {"inputs": ["images float32[-1, 3, 8, 8]"], "outputs": ["logits float32[-1, 5]"]}
