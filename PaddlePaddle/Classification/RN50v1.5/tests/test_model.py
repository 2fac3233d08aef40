"""Shapes, parameter counts, parity with Paddle's own models and with PyTorch's, layouts, weights from elsewhere."""

from __future__ import annotations

import pickle
import zlib
from pathlib import Path

import numpy as np
import paddle
import pytest
from paddle.vision import models as vision_models
from safetensors.numpy import save_file

from rn50_paddle import convert, fold, pretrained
from rn50_paddle.model import ARCHITECTURES, BasicBlock, Bottleneck, architecture, build, count_parameters

GOLDEN = Path(__file__).parent / "golden"


def pictures(count=2, size=64, channels=3, seed=0):
    return np.random.default_rng(seed).normal(size=(count, channels, size, size)).astype(np.float32)


def logits(model, images):
    model.eval()
    with paddle.no_grad():
        return model(paddle.to_tensor(images)).numpy()


def made_up(name, shape):
    """Values that depend on torchvision's name of a tensor only; the golden logits were made with the same ones."""
    values = np.random.default_rng(zlib.crc32(name.encode())).normal(size=shape)
    if len(shape) == 4:
        values *= np.sqrt(2 / np.prod(shape[1:]))
    elif name.endswith("running_var"):
        values = np.exp(0.1 * values)
    elif name.endswith("weight") and len(shape) == 1:
        values = 0.7 + 0.1 * values
    else:
        values *= 0.05
    return values.astype(np.float32)


def torchvision_weights(model):
    own = convert.to_torchvision(convert.arrays_of(model))
    return {name: made_up(name, value.shape) for name, value in own.items()}


@pytest.mark.parametrize("name", ["resnet18", "resnet50", "resnet101", "resnet8_small"])
def test_parameter_counts(name):
    assert count_parameters(build(name)) == ARCHITECTURES[name].parameters


@pytest.mark.parametrize("name", ["resnet18", "resnet50"])
def test_logits_are_those_of_paddles_own_model(name):
    theirs = getattr(vision_models, name)()
    ours = build(name)
    convert.load_into(ours, convert.arrays_of(theirs))
    images = pictures()
    np.testing.assert_allclose(logits(ours, images), logits(theirs, images), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("name", ["resnet18", "resnet50"])
def test_logits_are_those_of_the_pytorch_model(name):
    """golden/*.npz: the logits of this repository's PyTorch ConvNets in float64, with the weights of `made_up`."""
    with np.load(GOLDEN / f"{name}.npz", allow_pickle=False) as golden:
        model = build(name)
        convert.load_into(model, convert.from_torchvision(torchvision_weights(model)))
        found = logits(model, pictures(size=int(golden["size"])))
        assert np.abs(golden["logits"]).max() > 0.05
        np.testing.assert_allclose(found, golden["logits"], rtol=2e-4, atol=2e-5)


def test_nhwc_computes_what_nchw_does():
    first, second = build("resnet18", 10), build("resnet18", 10, data_format="NHWC")
    convert.load_into(second, convert.arrays_of(first))
    np.testing.assert_allclose(logits(first, pictures()), logits(second, pictures()), rtol=1e-4, atol=1e-4)


def test_the_stride_of_v15_is_in_the_3x3_convolution():
    block = build("resnet50").layer2[0]
    assert (block.conv1._stride, block.conv2._stride) == ([1, 1], [2, 2])


@pytest.mark.parametrize("name", ["resnet18", "resnet50"])
def test_zero_init_makes_every_block_its_shortcut(name):
    model = build(name, 10, zero_init_residual=True)
    model.eval()
    blocks = [layer for layer in model.sublayers() if isinstance(layer, BasicBlock | Bottleneck)]
    block = blocks[1]  # the second of a stage has the identity for a shortcut
    x = paddle.abs(paddle.randn([1, block.conv1._in_channels, 8, 8]))
    np.testing.assert_array_equal(block(x).numpy(), x.numpy())
    plain = build(name, 10).layer1[1]
    plain.eval()
    assert not np.array_equal(plain(x).numpy(), x.numpy())


def test_a_static_graph_computes_the_same():
    model = build("resnet8_small", 10, in_channels=1)
    images = pictures(3, 28, 1)
    expected = logits(model, images)
    static = paddle.jit.to_static(model, full_graph=True)
    np.testing.assert_allclose(logits(static, images), expected, rtol=1e-5, atol=1e-5)


def test_folding_the_norms_changes_nothing():
    for name, size in (("resnet8_small", 28), ("resnet50", 64)):
        model = build(name, 10)
        convert.load_into(model, convert.from_torchvision(torchvision_weights(model)))
        folded = fold.fold(model, name)
        model.eval()
        assert fold.largest_difference(model, folded, pictures(2, size)) < 1e-5
        assert not any(isinstance(layer, paddle.nn.BatchNorm2D) for layer in folded.sublayers())


def test_errors_name_the_value():
    with pytest.raises(ValueError, match="did you mean resnet50"):
        architecture("resnet51")
    with pytest.raises(ValueError, match="NCWH"):
        build("resnet18", data_format="NCWH")
    model = build("resnet8_small", 10)
    weights = convert.arrays_of(model)
    weights["extra"] = weights.pop("conv1.weight")
    with pytest.raises(ValueError, match="missing conv1.weight; unexpected extra"):
        convert.load_into(model, weights)


# Weights from elsewhere


def shapes_of(model):
    return {key: tuple(value.shape) for key, value in model.state_dict().items()}


def static_names(arch, weights, shortcut_first):
    """NVIDIA's numbering of a program's layers, written down again from its rule."""
    entry = architecture(arch)
    order = ["conv1/bn1"]
    for stage, depth in enumerate(entry.depths):
        for position in range(depth):
            prefix = f"layer{stage + 1}.{position}"
            block = [f"{prefix}.conv{n}/{prefix}.bn{n}" for n in (1, 2, 3)]
            short = [f"{prefix}.downsample.0/{prefix}.downsample.1"] if position == 0 else []
            order += short + block if shortcut_first else block + short
    flat = {"linear_0.w_0": weights["fc.weight"], "linear_0.b_0": weights["fc.bias"]}
    for number, pair in enumerate(order):
        conv, norm = pair.split("/")
        flat[f"conv2d_{number}.w_0"] = weights[f"{conv}.weight"]
        for leaf, ours in (("w_0", "weight"), ("b_0", "bias"), ("w_1", "_mean"), ("w_2", "_variance")):
            flat[f"batch_norm_{number}.{leaf}"] = weights[f"{norm}.{ours}"]
    return flat


def assert_same(found, expected):
    assert found.keys() == expected.keys()
    assert all(np.array_equal(found[key], expected[key]) for key in expected)


@pytest.mark.parametrize("shortcut_first", [False, True])
def test_nvidias_numbered_layout(shortcut_first):
    model = build("resnet50", 10)
    weights = convert.arrays_of(model)
    flat = static_names("resnet50", weights, shortcut_first)
    assert_same(convert.to_canonical(flat, "resnet50", shapes_of(model)), weights)
    with pytest.raises(ValueError, match=r"resnet18 has 20 convolutions"):
        convert.to_canonical(flat, "resnet18", shapes_of(build("resnet18", 10)))


def test_nvidias_structured_layout():
    model = build("resnet50", 10)
    weights = convert.arrays_of(model)
    blocks = [f"layer{stage + 1}.{n}" for stage, depth in enumerate((3, 4, 6, 3)) for n in range(depth)]
    named = {}
    for key, value in weights.items():
        stage, _, rest = key.partition(".")
        if stage.startswith("layer"):
            position, part, leaf = rest.split(".", 2)
            prefix = f"blocks.{blocks.index(f'{stage}.{position}')}"
            if part == "downsample":
                number, leaf = leaf.split(".")
                named[f"{prefix}.short.{'conv' if number == '0' else 'bn'}.{leaf}"] = value
            else:
                named[f"{prefix}.conv{int(part[-1]) - 1}.{part[:-1]}.{leaf}"] = value
        else:
            named[key if stage == "fc" else f"stem.0.{stage[:-1]}.{rest}"] = value
    assert "blocks.15.conv2.bn._mean" in named and "stem.0.conv.weight" in named
    assert_same(convert.to_canonical(named, "resnet50", shapes_of(model)), weights)


def test_torchvisions_layout_and_back():
    model = build("resnet18", 10)
    theirs = torchvision_weights(model) | {"bn1.num_batches_tracked": np.array(3)}
    ours = convert.to_canonical(theirs, "resnet18", shapes_of(model))
    assert ours["fc.weight"].shape == (512, 10)
    back = convert.to_torchvision(ours)
    del theirs["bn1.num_batches_tracked"]
    assert_same(back, theirs)


def test_damaged_and_foreign_weights_are_named(tmp_path):
    weights = convert.arrays_of(build("resnet8_small", 10))
    whole = {"safetensors": tmp_path / "whole.safetensors", "npz": tmp_path / "whole.npz"}
    save_file(weights, whole["safetensors"])
    np.savez(whole["npz"], **weights)
    for kind, path in whole.items():
        assert_same(pretrained.read_weights(path), weights)
        for number, content in enumerate((path.read_bytes()[:5000], b"hello", b"")):
            damaged = tmp_path / f"damaged{number}.{kind}"
            damaged.write_bytes(content)
            with pytest.raises(ValueError, match=rf"damaged{number}.{kind}: damaged, or not a .{kind} file"):
                pretrained.load(damaged, "resnet8_small")
    save_file(
        {key: value for key, value in weights.items() if not key.startswith("fc.")}, tmp_path / "body.safetensors"
    )
    with pytest.raises(ValueError, match="not the weights of a whole resnet8_small: missing fc.weight, fc.bias"):
        pretrained.load(tmp_path / "body.safetensors", "resnet8_small")
    with pytest.raises(ValueError, match="nowhere: no such run"):
        pretrained.load(tmp_path / "nowhere")


def test_a_head_for_other_classes_is_left_fresh_and_said(tmp_path, capsys):
    weights = convert.arrays_of(build("resnet8_small", 10))
    save_file(weights, tmp_path / "ten.safetensors")
    model = build("resnet8_small", 3)
    head = model.fc.weight.numpy()
    pretrained.start_from(model, "resnet8_small", str(tmp_path / "ten.safetensors"))
    np.testing.assert_array_equal(model.fc.weight.numpy(), head)
    np.testing.assert_array_equal(model.conv1.weight.numpy(), weights["conv1.weight"])
    assert "another number of classes" in capsys.readouterr().out


def test_pdparams_are_read_without_running_them(tmp_path):
    model = build("resnet8_small", 10)
    path = tmp_path / "model.pdparams"
    paddle.save(model.state_dict(), str(path))
    assert_same(convert.read_pdparams(path), convert.arrays_of(model))
    other = build("resnet8_small", 10)
    pretrained.start_from(other, "resnet8_small", str(path))
    assert_same(convert.arrays_of(other), convert.arrays_of(model))

    class Bomb:
        def __reduce__(self):
            return Path.touch, (tmp_path / "ran",)

    path.write_bytes(pickle.dumps({"conv1.weight": Bomb()}))
    with pytest.raises(ValueError, match="no need of"):
        convert.read_pdparams(path)
    assert not (tmp_path / "ran").exists()
    path.write_bytes(pickle.dumps({"conv1.weight": 3}))
    with pytest.raises(ValueError, match="is a int, not an array"):
        convert.read_pdparams(path)
