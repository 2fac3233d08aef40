"""NVIDIA's names of FastSpeech's tensors and ours, both ways, every tensor accounted for.

NVIDIA keeps {step, model, optim} with a prefix `module.`, a frozen table of positions on both sides, and a row of the
embedding for one symbol more than there are, which no text uses.
"""

from __future__ import annotations

import re
from collections.abc import Mapping

import torch
from torch import Tensor
from torch.nn import functional as F

from dlx import weights

from .model import sinusoids

PREFIXES = ("module.", "model.")
SIDES = {"phoneme_side": "encoder", "mel_side": "decoder"}
PARTS = {
    "slf_attn.linear": "attention.qkv",
    "slf_attn.fc": "attention.output",
    "slf_attn.layer_norm": "attention.norm",
    "pos_ffn.w_1": "feed_forward.first",
    "pos_ffn.w_2": "feed_forward.second",
    "pos_ffn.layer_norm": "feed_forward.norm",
}
SINGLE = {
    "word_emb": "embedding",
    "mel_linear": "mel",
    "length_regulator.duration_predictor.conv1d_1": "durations.first",
    "length_regulator.duration_predictor.layer_norm_1": "durations.first_norm",
    "length_regulator.duration_predictor.conv1d_2": "durations.second",
    "length_regulator.duration_predictor.layer_norm_2": "durations.second_norm",
    "length_regulator.duration_predictor.linear_layer": "durations.output",
}
POSITIONS = 2048  # of the published tables, beside row 0, which is for padding
_BLOCK = re.compile(r"(phoneme_side|mel_side)\.layer_stack\.(\d+)\.(\w+\.\w+)\.(weight|bias)")
_TABLE = re.compile(r"(phoneme_side|mel_side)\.position\.weight")
_OWN = re.compile(r"(encoder|decoder)\.blocks\.(\d+)\.(\w+\.\w+)\.(weight|bias)")


def is_nvidia(state_dict: Mapping[str, Tensor]) -> bool:
    return "word_emb.weight" in weights.strip_prefixes(state_dict, PREFIXES)


def to_canonical(state_dict: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Tensors in our names; those that have them already come back as they are.

    ValueError names tensors that FastSpeech has not, and a table of positions that is not the sinusoids.
    """
    stripped = weights.strip_prefixes(state_dict, PREFIXES)
    if "word_emb.weight" not in stripped:
        return dict(stripped)
    found, unknown = {}, []
    for name, tensor in stripped.items():
        stem, _, kind = name.rpartition(".")
        block = _BLOCK.fullmatch(name)
        if _TABLE.fullmatch(name):
            _check_positions(name, tensor)
        elif block and block[3] in PARTS:
            found[f"{SIDES[block[1]]}.blocks.{block[2]}.{PARTS[block[3]]}.{block[4]}"] = tensor
        elif stem in SINGLE and kind in ("weight", "bias"):
            found[f"{SINGLE[stem]}.{kind}"] = tensor[:-1] if stem == "word_emb" else tensor
        else:
            unknown.append(name)
    if unknown:
        raise ValueError(f"FastSpeech has no tensors {', '.join(unknown)}")
    return found


def _check_positions(name: str, table: Tensor) -> None:
    expected = sinusoids(len(table) - 1, table.shape[1], "cpu", torch.float64)
    if not torch.allclose(table[1:].double().cpu(), expected, atol=2e-3):
        raise ValueError(f"{name}: not the table of sinusoids that the paper has")


def to_nvidia(state_dict: Mapping[str, Tensor], positions: int = POSITIONS) -> dict[str, Tensor]:
    """The other way, with tables of `positions` positions. ValueError names tensors that are none of `FastSpeech`."""
    sides = {ours: theirs for theirs, ours in SIDES.items()}
    parts = {ours: theirs for theirs, ours in PARTS.items()}
    single = {ours: theirs for theirs, ours in SINGLE.items()}
    found, unknown = {}, []
    for name, tensor in state_dict.items():
        stem, _, kind = name.rpartition(".")
        block = _OWN.fullmatch(name)
        if block and block[3] in parts:
            found[f"{sides[block[1]]}.layer_stack.{block[2]}.{parts[block[3]]}.{block[4]}"] = tensor
        elif stem in single:
            found[f"{single[stem]}.{kind}"] = F.pad(tensor, (0, 0, 0, 1)) if stem == "embedding" else tensor
        else:
            unknown.append(name)
    if unknown or "embedding.weight" not in state_dict:
        raise ValueError(f"not the tensors of a FastSpeech: {', '.join(unknown) or 'embedding.weight is missing'}")
    embedding = state_dict["embedding.weight"]
    table = sinusoids(positions, embedding.shape[1], embedding.device, torch.float32).to(embedding.dtype)
    for side in SIDES:
        found[f"{side}.position.weight"] = torch.cat([table.new_zeros(1, table.shape[1]), table])
    return found
