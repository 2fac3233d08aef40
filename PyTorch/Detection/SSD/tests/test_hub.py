"""torch.hub entries: the calls that users know, offline use, weights from any device and of any damage (O01-O09)."""

from __future__ import annotations

import ast
import os
import pickle
import re
import subprocess
import sys
import textwrap
import zipfile
from functools import partial
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image

from dlx import checkpoint as checkpoints
from dlx import fetch, testing
from ssd import hub, pretrained, registry

ROOT = Path(__file__).resolve().parents[4]
ARCH = "ssd300_compact"
nvidia_ssd = partial(hub.nvidia_ssd, arch=ARCH)


@pytest.fixture(scope="module")
def weights_file(tmp_path_factory) -> Path:
    torch.manual_seed(0)
    path = tmp_path_factory.mktemp("weights") / "compact.pt"
    torch.save({"model": registry.build(ARCH, 80).state_dict(), "epoch": 3}, path)
    return path


@pytest.fixture
def offline(tmp_path):
    """Sockets blocked, the cache in a folder that may not be written."""
    with testing.offline(tmp_path) as locked:
        yield locked


def picture_file(folder: Path, mode: str) -> Path:
    """40 x 80, the left half white."""
    grey = np.zeros((40, 80), np.uint8)
    grey[:, :40] = 255
    path = folder / f"{mode}.png"
    if mode == "grey16":
        Image.fromarray(grey.astype(np.uint16) * 257).save(path)
    else:
        Image.fromarray(grey).convert({"grey": "L", "rgba": "RGBA", "palette": "P", "rgb": "RGB"}[mode]).save(path)
    return path


# ------------------------------------------------------------------------------------------- models


def test_untrained_needs_no_network_and_writes_nothing(offline):
    """User case O02."""
    model = nvidia_ssd(pretrained=False)
    assert model.training and model.num_classes == 80 and model.classes[0] == "person"
    assert nvidia_ssd(pretrained=False, num_classes=3).classes == ["class_1", "class_2", "class_3"]
    utils = hub.nvidia_ssd_processing_utils()
    assert len(utils.get_coco_object_dictionary()) == 80 and utils.get_coco_object_dictionary()[79] == "toothbrush"
    with torch.device("meta"):
        full = hub.nvidia_ssd(pretrained=False, device="meta")
    assert sum(parameter.numel() for parameter in full.parameters()) == 22_894_902


def test_weights_saved_on_a_gpu_load_on_the_cpu(weights_file, tmp_path):
    """User case O01: the storages are tagged cuda:0 in the file."""
    path = tmp_path / "tagged.pt"
    with zipfile.ZipFile(weights_file) as source, zipfile.ZipFile(path, "w") as target:
        for entry in source.infolist():
            content = source.read(entry)
            if entry.filename.endswith("data.pkl"):
                assert content.count(b"X\x03\x00\x00\x00cpu") >= 1
                content = content.replace(b"X\x03\x00\x00\x00cpu", b"X\x06\x00\x00\x00cuda:0")
            target.writestr(entry, content)
    model = nvidia_ssd(checkpoint=path)
    expected = torch.load(weights_file, weights_only=True)["model"]
    assert not model.training
    for name, value in model.state_dict().items():
        assert value.device.type == "cpu" and torch.equal(value, expected[name])


def test_any_device_and_precision_of_input(weights_file):
    model = nvidia_ssd(checkpoint=weights_file, model_math="bf16")
    with torch.no_grad():
        offsets, logits = model(torch.zeros(1, 3, 300, 300))
    assert offsets.dtype == torch.bfloat16 and logits.shape == (1, 8732, 81)
    with pytest.raises(ValueError, match="model_math 'int8' is none of fp32, fp16, bf16"):
        nvidia_ssd(checkpoint=weights_file, model_math="int8")
    with pytest.raises(ValueError, match="num_classes=7 is for pretrained=False"):
        nvidia_ssd(checkpoint=weights_file, num_classes=7)


class Exploit:
    def __init__(self, marker: Path):
        self.marker = str(marker)

    def __reduce__(self):
        return (open, (self.marker, "w"))


def test_a_pickle_that_would_run_code_is_refused(tmp_path):
    """User case O04."""
    marker, path = tmp_path / "marker", tmp_path / "bad.pt"
    torch.save({"model": {"a": torch.zeros(1)}, "x": Exploit(marker)}, path)
    with pytest.raises(ValueError, match="convert"):
        nvidia_ssd(checkpoint=path)
    plain = tmp_path / "plain.pkl"
    plain.write_bytes(pickle.dumps(Exploit(marker), protocol=2))
    with pytest.raises(ValueError):
        nvidia_ssd(checkpoint=plain)
    assert not marker.exists()


def test_metadata_of_training_scripts_is_no_obstacle(weights_file, tmp_path):
    """User case O04: plain and numpy values beside the tensors."""
    content = torch.load(weights_file, weights_only=True)
    content |= {"map": np.float64(0.25), "n": np.int64(3), "list": [1, "a", 2.5], "label_map": {0: "background"}}
    torch.save(content, tmp_path / "more.pt")
    assert nvidia_ssd(checkpoint=tmp_path / "more.pt").num_classes == 80


def test_other_widths_are_reported_key_by_key(tmp_path):
    """User case O05."""
    torch.save(registry.build("ssd300_resnet18", 80).state_dict(), tmp_path / "wide.pt")
    with pytest.raises(ValueError) as caught:
        nvidia_ssd(checkpoint=tmp_path / "wide.pt")
    text = str(caught.value)
    assert "extra.0.conv1.weight: [256, 256, 1, 1] in the file, [128, 256, 1, 1] in the model" in text
    assert "heads.5.weight" in text and "backbone" not in text


def test_a_run_knows_its_classes(tmp_path):
    found = pretrained.Detector(
        registry.build(ARCH, 2), ARCH, ["cup", "pen"], [5, 9], pretrained.Preprocessing(size=320), "test"
    )
    store = checkpoints.Checkpoints(tmp_path / "checkpoints")
    store.save(1, model={"model": found.model.state_dict()}, metadata=found.describe())
    for model in (hub.ssd300(tmp_path), hub.nvidia_ssd(checkpoint=tmp_path)):
        assert model.classes == ["cup", "pen"] and model.category_ids == [5, 9]
        utils = hub.nvidia_ssd_processing_utils(model)
        assert utils.get_coco_object_dictionary() == ["cup", "pen"]
        batch = utils.prepare_tensor(utils.prepare_input(Image.new("RGB", (64, 48))))
        assert batch.shape == (1, 3, 320, 320)
        with torch.no_grad():
            assert len(utils.decode_results(model(batch))) == 1


# ------------------------------------------------------------------------------------------- NVIDIA's file


@pytest.fixture
def publisher(monkeypatch, tmp_path):
    monkeypatch.setenv("DLX_HOME", str(tmp_path))
    with testing.publisher() as server:
        monkeypatch.setattr(hub, "NGC", f"{server.url}/nvidia_ssdpyt.pt")
        yield server


def test_a_damaged_file_is_replaced_once(publisher, weights_file, tmp_path):
    """User case O03."""
    publisher.content = weights_file.read_bytes()
    place = tmp_path / "weights" / "nvidia" / "nvidia_ssdpyt.pt"
    with pytest.warns(UserWarning, match="no hash"):
        nvidia_ssd()
    nvidia_ssd()
    assert publisher.requests == 1 and place.read_bytes() == publisher.content
    place.write_bytes(publisher.content[: len(publisher.content) * 9 // 10])
    nvidia_ssd()
    assert publisher.requests == 2 and place.read_bytes() == publisher.content
    nvidia_ssd(force_reload=True)
    assert publisher.requests == 3
    publisher.content = publisher.content[:-1] + b"x"  # another file than before
    with pytest.raises(fetch.FetchError, match="sha256"):
        nvidia_ssd(force_reload=True)


@pytest.mark.parametrize("answer", [(404, b"gone"), (200, b"{}")])
def test_nothing_good_to_be_had(publisher, answer, tmp_path):
    """User case O03: one error with address and place; nothing half-done stays."""
    publisher.status, publisher.content = answer
    with pytest.warns(UserWarning, match="no hash"), pytest.raises(fetch.FetchError) as caught:
        nvidia_ssd()
    text = str(caught.value)
    assert hub.NGC in text and str(tmp_path / "weights" / "nvidia" / "nvidia_ssdpyt.pt") in text
    assert ("pass checkpoint=PATH" if answer[0] == 404 else "2 bytes") in text
    assert not list((tmp_path / "weights").rglob("*.pt*"))


def test_a_file_put_in_the_place_is_used(monkeypatch, weights_file, tmp_path):
    monkeypatch.setenv("DLX_HOME", str(tmp_path))
    place = tmp_path / "weights" / "nvidia" / hub.NGC.rpartition("/")[2]
    place.parent.mkdir(parents=True)
    place.write_bytes(weights_file.read_bytes())
    assert nvidia_ssd().num_classes == 80


# ------------------------------------------------------------------------------------------- pictures


@pytest.mark.parametrize("mode", ["grey", "rgba", "palette", "grey16", "rgb"])
def test_pictures_of_every_kind(mode, tmp_path):
    """User case O07."""
    utils = hub.nvidia_ssd_processing_utils()
    path = picture_file(tmp_path, mode)
    colour = picture_file(tmp_path, "rgb")
    found = utils.prepare_tensor([utils.prepare_input(path), utils.prepare_input(str(colour))])
    assert found.shape == (2, 3, 300, 300) and torch.isfinite(found).all()
    assert (found[:, :, :, 20] > found[:, :, :, 280] + 1).all()
    assert (found[0] - found[1]).abs().max() <= 1e-6


def test_sources_of_pictures(tmp_path, publisher):
    utils = hub.nvidia_ssd_processing_utils()
    path = picture_file(tmp_path, "rgb")
    expected = utils.prepare_input(path)
    assert expected.shape == (300, 300, 3) and expected.dtype == np.float32
    publisher.content = path.read_bytes()
    opened = Image.open(path)
    sources = [str(path), path.read_bytes(), opened, np.asarray(opened), hub.NGC.replace(".pt", ".png")]
    for source in sources:
        np.testing.assert_array_equal(utils.prepare_input(source), expected)
    assert utils.prepare_tensor(expected).shape == (1, 3, 300, 300)
    assert utils.prepare_tensor([expected] * 2, fp16=True).dtype == torch.float16
    with pytest.raises(ValueError, match=r"input 1 has shape \(3, 300, 300\)"):
        utils.prepare_tensor([expected, expected.transpose(2, 0, 1)])


def one_object(index: int, label: int) -> tuple[torch.Tensor, torch.Tensor]:
    offsets, logits = torch.zeros(1, 8732, 4), torch.zeros(1, 8732, 81)
    logits[..., 0] = 20
    logits[0, index, label] = 23
    return offsets, logits


def test_results_are_decoded_and_picked():
    utils = hub.nvidia_ssd_processing_utils()
    boxes, labels, confidences = utils.decode_results(one_object(8731, 18))[0]
    assert labels.tolist() == [18] and utils.get_coco_object_dictionary()[labels[0] - 1] == "horse"
    np.testing.assert_allclose(boxes, [[0.5 - 0.3076, 0, 0.5 + 0.3076, 1]], atol=1e-3)
    assert confidences[0] == pytest.approx(1 / (1 + np.exp(-3)), abs=1e-3)
    best = utils.pick_best((boxes, labels, confidences), 0.4)
    assert [len(array) for array in best] == [1, 1, 1]
    assert [len(array) for array in utils.pick_best((boxes, labels, confidences), 0.99)] == [0, 0, 0]
    with pytest.raises(ValueError, match="predictions of 100 default boxes; an input of 300 pixels has 8732"):
        utils.decode_results((torch.zeros(1, 100, 4), torch.zeros(1, 100, 81)))


def test_nothing_found():
    """User case O09."""
    utils = hub.nvidia_ssd_processing_utils()
    logits = torch.zeros(1, 8732, 81)
    logits[..., 0] = 200
    result = utils.decode_results((torch.zeros(1, 8732, 4), logits))[0]
    for boxes, labels, confidences in (result, utils.pick_best(result, 0.4)):
        assert boxes.shape == (0, 4) and labels.shape == (0,) and confidences.shape == (0,)
        assert boxes.dtype == np.float32 and labels.dtype == np.int64 and confidences.dtype == np.float32
    assert utils.to_pixels(result[0], Image.new("RGB", (640, 480))).shape == (0, 4)


def test_boxes_of_a_picture_that_is_not_square():
    """User case O08."""
    picture = Image.new("RGB", (640, 480))
    box = np.array([[0.1, 0.2, 0.5, 0.6]], np.float32)
    whole = hub.nvidia_ssd_processing_utils()
    np.testing.assert_allclose(whole.to_pixels(box, picture), [[64, 96, 320, 288]], atol=1e-3)
    centre = hub.nvidia_ssd_processing_utils(crop="centre")
    np.testing.assert_allclose(centre.to_pixels(box, picture), [[128, 96, 320, 288]], atol=1e-3)


# ------------------------------------------------------------------------------------------- documentation


def test_the_snippet_of_the_module_runs(tmp_path, weights_file, monkeypatch):
    """User case O06: against random weights."""
    code = textwrap.dedent(hub.__doc__.split("\n\n")[1])
    assert "pick_best" in code
    Image.new("RGB", (64, 48), "red").save(tmp_path / "street.jpg")
    monkeypatch.chdir(tmp_path)

    def load(repository, entry, source, **options):
        if "checkpoint" in options:
            options |= {"checkpoint": weights_file, "arch": ARCH}
        return getattr(hub, entry)(**options)

    monkeypatch.setattr(torch.hub, "load", load)
    with torch.no_grad():
        space = {"torch": torch, "REPOSITORY": "."}
        exec(compile(ast.parse(code), "snippet", "exec"), space)
    assert len(space["boxes"]) == len(space["confidences"])


@pytest.mark.skipif(
    not (ROOT / "hubconf.py").is_file() or "ssd.hub" not in (ROOT / "hubconf.py").read_text(),
    reason="needs the whole repository (hubconf.py with the entries of SSD)",
)
def test_entries_load_from_any_folder(tmp_path):
    """User case O06: in another folder, with the packages of text tasks hidden; listing imports no task."""
    program = f"""
import sys, torch
class Hidden:
    def find_spec(self, name, path=None, target=None):
        if name.split(".")[0] in ("librosa", "inflect", "unidecode", "pycocotools"):
            raise ModuleNotFoundError(name, name=name)
sys.meta_path.insert(0, Hidden())
model = torch.hub.load({str(ROOT)!r}, "nvidia_ssd", source="local", pretrained=False, num_classes=3,
                       arch="ssd300_compact")
assert "convnets" not in sys.modules
assert model.eval()(torch.zeros(1, 3, 300, 300))[1].shape == (1, 8732, 4)
utils = torch.hub.load({str(ROOT)!r}, "nvidia_ssd_processing_utils", source="local")
assert utils.get_coco_object_dictionary()[0] == "person"
"""
    environment = {key: value for key, value in os.environ.items() if key != "PYTHONPATH"}
    done = subprocess.run(
        [sys.executable, "-c", program], cwd=tmp_path, env=environment, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
    assert not list(tmp_path.iterdir())


@pytest.mark.skipif(
    not (ROOT / "docs" / "hub.md").is_file() or not (ROOT / "hubconf.py").is_file(),
    reason="needs the whole repository (docs/hub.md, hubconf.py)",
)
def test_the_documented_snippet_runs(tmp_path, weights_file):
    """User case O06: docs/hub.md with this repository, random weights and a picture in place of the names there."""
    blocks = re.findall(r"```python\n(.*?)```", (ROOT / "docs" / "hub.md").read_text(), re.DOTALL)
    code = next(block for block in blocks if "nvidia_ssd" in block)
    Image.new("RGB", (400, 300), "red").save(tmp_path / "photo.jpg")
    code = code.replace("path/to/this/clone", str(ROOT)).replace(", 0.4)", ", 0.02)")
    code = code.replace('checkpoint="runs/coco"', f'checkpoint={str(weights_file)!r}, arch="{ARCH}"')
    environment = {key: value for key, value in os.environ.items() if key != "PYTHONPATH"}
    done = subprocess.run([sys.executable, "-c", code], cwd=tmp_path, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert re.match(r"[a-z ]+ \d+% at \[", done.stdout)


def test_every_backbone_takes_images_from_anywhere(tmp_path):
    found = pretrained.Detector(
        registry.build("ssd300_mobilenet_v2", 2), "ssd300_mobilenet_v2", ["cup", "pen"], [5, 9],
        pretrained.Preprocessing(), "test",
    )  # fmt: skip
    store = checkpoints.Checkpoints(tmp_path / "checkpoints")
    store.save(1, model={"model": found.model.state_dict()}, metadata=found.describe())
    with torch.no_grad():
        offsets, scores = hub.nvidia_ssd(checkpoint=tmp_path)(torch.zeros(1, 3, 300, 300, dtype=torch.float64))
    assert offsets.dtype == torch.float32 and 8732 in offsets.shape and 8732 in scores.shape
