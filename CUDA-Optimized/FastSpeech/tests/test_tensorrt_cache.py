"""Kept engines: the key changes with all that an engine depends on, a broken file is made anew. No TensorRT needed."""

from __future__ import annotations

from types import SimpleNamespace

import numpy as np
import pytest
import torch

from fastspeech import registry
from fastspeech.cuda import halves
from fastspeech.model import FastSpeech, FastSpeechConfig
from fastspeech.tensorrt import cache, layers, network

TRT = SimpleNamespace(__name__="tensorrt", __version__="10.1")
BASE = {
    "trt": TRT, "gpu": "H200 9.0", "half": "encoder", "config": FastSpeechConfig(), "dtype": "float16",
    "weights": {"a": np.zeros((2, 3), np.float32), "b": np.ones(6, np.float32)},
    "shapes": network.Shapes(4, 64), "plugins": True,
}  # fmt: skip


@pytest.fixture(autouse=True)
def home(tmp_path, monkeypatch):
    monkeypatch.setenv("DLX_HOME", str(tmp_path))
    return tmp_path


@pytest.mark.parametrize(
    "change",
    [
        {"trt": SimpleNamespace(__name__="tensorrt", __version__="10.2")},
        {"gpu": "A100 8.0"},
        {"half": "decoder"},
        {"config": FastSpeechConfig(heads=3)},
        {"dtype": "bfloat16"},
        {"weights": {"a": np.zeros((3, 2), np.float32), "b": np.ones(6, np.float32)}},
        {"weights": {"a": np.zeros((2, 3), np.float32), "b": np.full(6, 1 + 1e-6, np.float32)}},
        {"weights": {"c": np.zeros((2, 3), np.float32), "b": np.ones(6, np.float32)}},
        {"shapes": network.Shapes(4, 64, 33)},
        {"plugins": False},
    ],
)
def test_whatever_an_engine_depends_on_makes_a_new_one(change):
    made = []

    def make() -> bytes:
        made.append(1)
        return b"engine %d" % len(made)

    assert cache.engine(cache.key(**BASE), make) == b"engine 1"
    again = {**BASE, "weights": dict(reversed(BASE["weights"].items()))}  # the order of names does not matter
    assert cache.engine(cache.key(**again), make) == b"engine 1"
    assert cache.engine(cache.key(**BASE | change), make) == b"engine 2"
    assert cache.engine(cache.key(**BASE), make) == b"engine 1"


def test_sources_count(monkeypatch, tmp_path):
    before = cache.key(**BASE)
    for name in cache.SOURCES:
        (tmp_path / name).write_bytes((cache.HERE / name).read_bytes())
    monkeypatch.setattr(cache, "HERE", tmp_path)
    assert cache.key(**BASE) == before
    (tmp_path / "network.py").write_text("# changed")
    assert cache.key(**BASE) != before


@pytest.mark.parametrize("damage", [lambda b: b[:-1], lambda b: b"", lambda b: b[10:], lambda b: b[:-1] + b"X"])
def test_a_broken_file_is_made_anew(damage):
    cache.engine(cache.key(**BASE), lambda: b"first\nengine")
    (path,) = cache.folder().glob("*.engine")
    path.write_bytes(damage(path.read_bytes()))
    assert cache.engine(cache.key(**BASE), lambda: b"second") == b"second"
    assert cache.engine(cache.key(**BASE), lambda: b"third") == b"second"


def test_a_failure_leaves_nothing():
    def fail() -> bytes:
        raise RuntimeError("no engine")

    with pytest.raises(RuntimeError, match="no engine"):
        cache.engine(cache.key(**BASE), fail)
    assert not list(cache.folder().glob("*.engine"))


def test_profiles_cover_the_bucket():
    config = registry.ARCHITECTURES["fastspeech_compact"].config
    shapes = network.Shapes(batch=8, longest=64, shortest=33, symbols=128)
    encoder = network.profile_shapes("encoder", config, shapes, True)
    assert encoder["text"] == ((1, 33), (1, 64), (8, 64)) and encoder["lengths"] == ((1,), (1,), (8,))
    decoder = network.profile_shapes("decoder", config, shapes, True)
    assert decoder["hidden"] == ((1, 1, 256), (1, 128, 256), (8, 128, 256)) and decoder["frames"][0] == (33,)
    assert network.profile_shapes("decoder", config, shapes, False)["expanded"][2] == (8, 64, 256)


def test_bits_of_bfloat16_are_those_of_pytorch():
    values = np.random.default_rng(0).standard_normal(1000).astype(np.float32) * 1e3
    expected = torch.from_numpy(values).to(torch.bfloat16)
    assert np.array_equal(halves.to_bfloat16(values), expected.view(torch.uint16).numpy())
    assert np.array_equal(halves.from_bfloat16(halves.to_bfloat16(values)), expected.float().numpy())


def test_the_form_needs_tensorrt_and_a_gpu(monkeypatch):
    from fastspeech.cuda import engine

    monkeypatch.setattr(layers, "MODULES", ("no_such_tensorrt",))
    with pytest.raises(ImportError, match="TensorRT is not installed .no_such_tensorrt"):
        engine.build(FastSpeech(FastSpeechConfig(num_symbols=5)).half(), "tensorrt")
    monkeypatch.setattr(layers, "load", lambda: TRT)
    with pytest.raises(ValueError, match="needs a CUDA device, got cpu"):
        engine.build(FastSpeech(FastSpeechConfig(num_symbols=5)).half(), "tensorrt")
