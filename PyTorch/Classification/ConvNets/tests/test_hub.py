"""torch.hub entries from another folder, the call signatures users know, published key layouts."""

from __future__ import annotations

import os
import re
import socket
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image

from convnets import hub, registry
from convnets.convert import to_canonical
from dlx import fetch, vision, weights
from dlx.weights import strip_prefixes

ROOT = Path(__file__).resolve().parents[4]
MODELS = [name for name in dir(hub) if name.startswith("nvidia_") and "utils" not in name]
needs_hubconf = pytest.mark.skipif(
    not (ROOT / "hubconf.py").is_file(), reason="needs the whole repository (hubconf.py)"
)


@needs_hubconf
def test_entries_list_and_load_from_any_folder(tmp_path):
    """In a process of its own, in another folder: listing imports no task; loading needs no set-up."""
    program = f"""
import importlib.util, sys, torch
spec = importlib.util.spec_from_file_location("hubconf", {str(ROOT / "hubconf.py")!r})
hubconf = importlib.util.module_from_spec(spec)
spec.loader.exec_module(hubconf)
names = [name for name in dir(hubconf) if callable(getattr(hubconf, name)) and name[0] != "_"]  # as torch.hub.list
assert {{"nvidia_resnet50", "nvidia_convnets_processing_utils", "mobilenet_v2"}} <= set(names), names
assert "convnets" not in sys.modules and "dlx" not in sys.modules
assert "25.6 M" in hubconf.nvidia_resnet50.__doc__
model = torch.hub.load({str(ROOT)!r}, "nvidia_resnet50", source="local", pretrained=False, num_classes=3)
assert model(torch.zeros(2, 3, 64, 64)).shape == (2, 3)
utils = torch.hub.load({str(ROOT)!r}, "nvidia_convnets_processing_utils", source="local")
assert utils.get_imgnet_classes()[0] == "tench"
"""
    environment = {key: value for key, value in os.environ.items() if key != "PYTHONPATH"}
    done = subprocess.run(
        [sys.executable, "-c", program], cwd=tmp_path, env=environment, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("name", MODELS)
def test_untrained_needs_no_network_and_writes_nothing(name, tmp_path, monkeypatch):
    """User case O02: sockets blocked, cache in a folder that may not be written."""

    def refuse(*args, **kwargs):
        raise AssertionError("network used")

    locked = tmp_path / "locked"
    locked.mkdir()
    locked.chmod(0o500)
    monkeypatch.setenv("DLX_HOME", str(locked / "home"))
    monkeypatch.setattr(socket, "socket", refuse)
    monkeypatch.setattr(torch.nn.init, "kaiming_normal_", lambda tensor, **kwargs: tensor)  # speed
    with torch.device("meta"):
        model = getattr(hub, name)(pretrained=False, num_classes=7)
    assert isinstance(model, torch.nn.Module)
    assert not list(locked.iterdir())


def test_generic_efficientnet_default_type_exists():
    with torch.device("meta"):
        assert hub.nvidia_efficientnet(pretrained=False).num_classes == 1000
    with pytest.raises(ValueError, match="efficientnet_b0"):
        hub.nvidia_efficientnet("efficient-b0", pretrained=False)


@pytest.mark.parametrize(
    ("name", "parameter", "near"),
    [
        ("nvidia_resnet50", "num_clases", "num_classes"),
        ("nvidia_efficientnet", "zero_init", "zero_init_residual"),
        ("mobilenet_v2", "num_class", "num_classes"),
        ("fashion_mnist_resnet14", "inchannels", "in_channels"),
    ],
)
@pytest.mark.parametrize("pretrained", [False, True])
def test_unknown_options_are_named(name, parameter, near, pretrained):
    with pytest.raises(
        TypeError, match=rf"^{name}\(\) has no option '{parameter}'.*{near}.*takes .*pretrained"
    ) as found:
        getattr(hub, name)(pretrained=pretrained, **{parameter: 3})
    assert "num_classes" in str(found.value) and "model_params" not in str(found.value)


def test_untrained_models_know_their_inputs_and_classes():
    with torch.device("meta"):
        models = [hub.mobilenet_v2(pretrained=False), hub.nvidia_resnet50(pretrained=False)]
        few = hub.mobilenet_v2(pretrained=False, num_classes=3)
        b4 = hub.nvidia_efficientnet_b4(pretrained=False, in_channels=1)
        fashion = hub.fashion_mnist_resnet14(pretrained=False)
        colours = hub.fashion_mnist_resnet14(pretrained=False, in_channels=3)
    published = weights.card("mobilenet_v2.imagenet").raw["preprocessing"]
    assert models[0].preprocessing.to_dict() == vision.Preprocessing.from_dict(published).to_dict()
    assert all(len(model.classes) == 1000 and model.classes[0] == "tench" for model in models)
    assert few.classes == ["class_0", "class_1", "class_2"] and few.preprocessing == models[0].preprocessing
    assert b4.preprocessing.crop == 380 and b4.preprocessing.channels == 1
    assert fashion.classes[9] == "Ankle boot" and fashion.preprocessing.channels == 1
    assert colours.preprocessing.channels == 3
    assert fashion.preprocessing(np.zeros((28, 28), np.uint8)).shape == (1, 28, 28)


def test_convnet_with_fresh_weights(tmp_path):
    model = registry.build("resnet8_small", 5, in_channels=1)
    torch.save(model.state_dict(), tmp_path / "grey.pth")
    fresh = hub.convnet(tmp_path / "grey.pth", arch="resnet8_small", pretrained=False)
    same = hub.convnet(tmp_path / "grey.pth", arch="resnet8_small", pretrained=True)
    assert fresh.training and not same.training and fresh.preprocessing == same.preprocessing
    assert fresh.classes == same.classes and len(fresh.classes) == 5
    assert torch.equal(same.fc.weight, model.fc.weight) and not torch.equal(fresh.fc.weight, model.fc.weight)


def test_nvidia_weights_without_network(tmp_path, monkeypatch):
    """The error says what to do, nothing is left behind, and a file put in the named place is used."""
    monkeypatch.setenv("DLX_HOME", str(tmp_path))
    monkeypatch.setattr(hub, "NGC", "file:///nowhere/{file}")
    place = tmp_path / "weights" / "nvidia" / "nvidia_resnet50_200821.pth.tar"
    with pytest.warns(UserWarning, match="no hash"), pytest.raises(fetch.FetchError) as caught:
        hub.nvidia_resnet50()
    text = str(caught.value)
    assert f"wanted at {place}\n" in text and "sha256" not in text and "file:///nowhere/nvidia_resnet50" in text
    assert "put the file there yourself, or pass pretrained_from_file=" in text
    assert not place.parent.exists()
    place.parent.mkdir(parents=True)
    model = registry.build("resnet50", 1000)
    torch.save({"state_dict": model.state_dict()}, place)
    for _ in range(2):
        assert torch.equal(hub.nvidia_resnet50().fc.weight, model.fc.weight)
    place.write_bytes(b"changed")
    with (
        pytest.warns(UserWarning, match="no hash"),
        pytest.raises(fetch.FetchError, match="with sha256 [0-9a-f]{64} at"),
    ):
        hub.nvidia_resnet50()


def nvidia_layout(arch: str, state_dict: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Our tensors under the names of NVIDIA's training checkpoints, written independently of the converter."""
    if arch.startswith("efficientnet"):
        return {f"module.{key}": value for key, value in state_dict.items()}
    renamed = {}
    for key, value in state_dict.items():
        match = re.match(r"layer(\d)\.(.*)", key)
        if match:
            key = f"layers.{int(match[1]) - 1}.{match[2]}".replace(".se.", ".squeeze.")
        renamed[f"module.{key}"] = value
    return renamed


@pytest.mark.parametrize("arch", ["resnet50", "se_resnext101_32x4d", "efficientnet_b0"])
def test_nvidia_layout_loads_strictly(arch, tmp_path):
    torch.manual_seed(0)
    model = registry.build(arch, num_classes=10)
    path = tmp_path / "nvidia.pth.tar"
    torch.save({"epoch": 3, "state_dict": nvidia_layout(arch, model.state_dict())}, path)
    entry = getattr(hub, f"nvidia_{arch}")
    loaded = entry(pretrained_from_file=str(path), num_classes=10)
    for (name, expected), actual in zip(model.state_dict().items(), loaded.state_dict().values(), strict=True):
        assert torch.equal(expected, actual), name


def test_prefix_is_stripped_at_the_front_only():
    assert list(strip_prefixes({"module.module.weight": 0})) == ["weight"]
    assert list(strip_prefixes({"module.a": 0, "b.module.c": 0})) == ["module.a", "b.module.c"]


def test_convolutional_squeeze_becomes_linear():
    model = registry.build("efficientnet_b0", num_classes=3)
    state_dict = {
        key: value[:, :, None, None] if ".se." in key and key.endswith("weight") else value
        for key, value in model.state_dict().items()
    }
    assert weights.load_into(model, to_canonical(state_dict, "efficientnet_b0")).complete


def test_wrong_width_is_reported_with_shapes(tmp_path):
    path = tmp_path / "wide.pth"
    torch.save(registry.build("resnet18", num_classes=10).state_dict(), path)
    with pytest.raises(ValueError, match=r"fc\.weight.*10"):
        hub._model("nvidia_resnet50", "resnet18", True, str(path), None, {"num_classes": 12})


def test_processing_utils(tmp_path, capsys):
    utils = hub.nvidia_convnets_processing_utils()
    picture = np.zeros((40, 80), np.uint8)
    picture[:, :40] = 255
    path = tmp_path / "grey.png"
    Image.fromarray(picture).save(path)
    batch = utils.prepare_input_from_uri(str(path))
    assert batch.shape == (1, 3, 224, 224) and torch.isfinite(batch).all()
    assert batch[0, 0, 112, 20] > batch[0, 0, 112, 200]
    probabilities = torch.zeros(2, 1000)
    probabilities[0, 3], probabilities[1, 5] = 0.75, 1.0
    best = utils.pick_n_best(probabilities, n=1)
    classes = utils.get_imgnet_classes()
    assert best == [[(classes[3], "75.0%")], [(classes[5], "100.0%")]]
    assert classes[3] in capsys.readouterr().out
    with pytest.raises(ValueError, match="no GPU"):
        if torch.cuda.is_available():
            raise ValueError("no GPU")
        utils.prepare_input_from_uri(str(path), cuda=True)


@pytest.mark.parametrize("name", ["mobilenet_v2.imagenet", "efficientnet_lite0.imagenet"])
def test_published_weights_classify_photographs(name, tmp_path):
    """At least 18 of foolbox's 20 ImageNet photographs, from weights that a package carries."""
    from convnets import evaluate

    result = evaluate.main(
        ["--checkpoint", name, "--data", "foolbox-images", "--output_dir", str(tmp_path), "--workers", "0"]
        + ["--device", "cpu", "--batch_size", "20"]
    )
    assert result["samples"] == 20
    assert result["top1"] >= 90.0


@needs_hubconf
def test_the_documented_snippet_runs(tmp_path):
    """docs/hub.md, with this repository and a generated picture in place of the names there."""
    code = re.search(r"```python\n(.*?)```", (ROOT / "docs" / "hub.md").read_text(), re.DOTALL)[1]
    Image.fromarray(np.random.default_rng(0).integers(0, 256, (300, 400, 3), np.uint8)).save(tmp_path / "photo.jpg")
    code = code.replace("path/to/this/clone", str(ROOT))
    environment = {key: value for key, value in os.environ.items() if key != "PYTHONPATH"}
    done = subprocess.run([sys.executable, "-c", code], cwd=tmp_path, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert len(done.stdout.split(",")) >= 3
