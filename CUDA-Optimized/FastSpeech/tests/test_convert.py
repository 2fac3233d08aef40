"""NVIDIA's key layout: the names written out by hand, both ways, strict."""

import pytest
import torch

from dlx import weights
from fastspeech import registry
from fastspeech.convert import is_nvidia, to_canonical, to_nvidia

BLOCK = """slf_attn.linear.weight 384,384 slf_attn.linear.bias 384 slf_attn.fc.weight 384,128 slf_attn.fc.bias 384
slf_attn.layer_norm.weight 384 slf_attn.layer_norm.bias 384 pos_ffn.w_1.weight 1536,384,3 pos_ffn.w_1.bias 1536
pos_ffn.w_2.weight 384,1536,3 pos_ffn.w_2.bias 384 pos_ffn.layer_norm.weight 384 pos_ffn.layer_norm.bias 384""".split()
PREDICTOR = """conv1d_1.weight 256,384,3 conv1d_1.bias 256 layer_norm_1.weight 256 layer_norm_1.bias 256
conv1d_2.weight 256,256,3 conv1d_2.bias 256 layer_norm_2.weight 256 layer_norm_2.bias 256
linear_layer.weight 1,256 linear_layer.bias 1""".split()


def published() -> dict[str, tuple[int, ...]]:
    """Names and shapes of NVIDIA's checkpoint."""
    shapes = {"word_emb.weight": (149, 384), "mel_linear.weight": (80, 384), "mel_linear.bias": (80,)}
    for side in ("phoneme_side", "mel_side"):
        shapes[f"{side}.position.weight"] = (2049, 384)
        for layer in range(6):
            for name, shape in zip(BLOCK[::2], BLOCK[1::2], strict=True):
                shapes[f"{side}.layer_stack.{layer}.{name}"] = tuple(map(int, shape.split(",")))
    for name, shape in zip(PREDICTOR[::2], PREDICTOR[1::2], strict=True):
        shapes[f"length_regulator.duration_predictor.{name}"] = tuple(map(int, shape.split(",")))
    return shapes


@pytest.fixture(scope="module")
def model():
    torch.manual_seed(0)
    return registry.build("fastspeech").eval()


def test_the_published_layout_comes_and_goes(model):
    theirs = to_nvidia(model.state_dict())
    assert {name: tuple(value.shape) for name, value in theirs.items()} == published()
    assert is_nvidia({f"module.{name}": value for name, value in theirs.items()})
    ours = to_canonical({f"module.{name}": value for name, value in theirs.items()})
    again = registry.build("fastspeech").eval()
    weights.load_into(again, ours)
    assert ours.keys() == model.state_dict().keys()
    assert all(torch.equal(ours[name], value) for name, value in model.state_dict().items())
    assert to_canonical(ours).keys() == ours.keys() and not is_nvidia(ours)


def test_each_tensor_goes_where_it_does_the_same(model):
    """Both sides' first blocks differ, and so do the two convolutions: by value, not by shape."""
    marked = {name: torch.full(shape, float(number)) for number, (name, shape) in enumerate(published().items())}
    table = to_nvidia(model.state_dict())["mel_side.position.weight"]
    marked |= {name: table for name in marked if "position" in name}
    ours = to_canonical(marked)
    for mine, name in {
        "encoder.blocks.3.attention.qkv.weight": "phoneme_side.layer_stack.3.slf_attn.linear.weight",
        "encoder.blocks.0.attention.output.bias": "phoneme_side.layer_stack.0.slf_attn.fc.bias",
        "decoder.blocks.5.attention.norm.bias": "mel_side.layer_stack.5.slf_attn.layer_norm.bias",
        "decoder.blocks.1.feed_forward.first.weight": "mel_side.layer_stack.1.pos_ffn.w_1.weight",
        "decoder.blocks.1.feed_forward.second.weight": "mel_side.layer_stack.1.pos_ffn.w_2.weight",
        "durations.second_norm.weight": "length_regulator.duration_predictor.layer_norm_2.weight",
        "mel.bias": "mel_linear.bias",
    }.items():
        assert torch.equal(ours[mine], marked[name]), mine


def test_what_does_not_belong_is_named(model):
    theirs = to_nvidia(model.state_dict(), positions=10)
    with pytest.raises(ValueError, match=r"no tensors mel_side\.layer_stack\.0\.slf_attn\.extra\.weight"):
        to_canonical({**theirs, "mel_side.layer_stack.0.slf_attn.extra.weight": torch.zeros(1)})
    with pytest.raises(ValueError, match=r"mel_side\.position\.weight: not the table"):
        to_canonical({**theirs, "mel_side.position.weight": torch.ones(11, 384)})
    with pytest.raises(ValueError, match="not the tensors of a FastSpeech: other"):
        to_nvidia({"other.weight": torch.zeros(1), **model.state_dict()})
    lacking = {name: value for name, value in theirs.items() if name != "mel_linear.bias"}
    with pytest.raises(ValueError, match=r"mel\.bias"):
        weights.load_into(registry.build("fastspeech"), to_canonical(lacking))
