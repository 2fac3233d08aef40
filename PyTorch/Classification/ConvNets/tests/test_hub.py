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
from convnets.convert import strip_prefixes, to_canonical
from dlx import weights

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
        hub._model("resnet18", True, str(path), None, {"num_classes": 12})


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
