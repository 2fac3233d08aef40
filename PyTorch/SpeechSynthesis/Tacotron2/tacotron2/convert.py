"""From the published state-dict layouts to this package's: NVIDIA's Tacotron 2 and WaveGlow, torchaudio's Tacotron 2.

NVIDIA's Tacotron 2 wraps every convolution and linear layer in a module of its own; torchaudio's names are the same
without these. Here the two directions of the encoder's LSTM are two modules. A WaveGlow's conditioning convolutions,
one per layer in newer files and one wide one in older ones, are always one here; where weight norms were multiplied out
they are taken apart again.
"""

from __future__ import annotations

import re
from collections.abc import Mapping

import torch
from torch import Tensor

from dlx.weights import strip_prefixes

PREFIXES = ("module.", "1.", "_orig_mod.")  # NVIDIA's files may have "module." or "module.1." in front
_CONV, _LINEAR = r"(?:conv\.)?", r"(?:linear_layer\.)?"
TACOTRON2 = (
    (r"^embedding\.", "encoder.embedding."),
    (rf"^(encoder|postnet)\.convolutions\.(\d+)\.0\.{_CONV}", r"\1.layers.\2.conv."),
    (r"^(encoder|postnet)\.convolutions\.(\d+)\.1\.", r"\1.layers.\2.norm."),
    (r"^encoder\.lstm\.(\w+_l0)_reverse$", r"encoder.backward_lstm.\1"),
    (r"^encoder\.lstm\.(\w+_l0)$", r"encoder.forward_lstm.\1"),
    (rf"^decoder\.prenet\.layers\.(\d+)\.{_LINEAR}", r"decoder.prenet.layers.\1."),
    (rf"^decoder\.attention_layer\.(query|memory)_layer\.{_LINEAR}", r"decoder.attention.\1."),
    (rf"^decoder\.attention_layer\.v\.{_LINEAR}", "decoder.attention.score."),
    (rf"^decoder\.attention_layer\.location_layer\.location_conv\.{_CONV}", "decoder.attention.location_conv."),
    (rf"^decoder\.attention_layer\.location_layer\.location_dense\.{_LINEAR}", "decoder.attention.location_dense."),
    (rf"^decoder\.linear_projection\.{_LINEAR}", "decoder.mel."),
    (rf"^decoder\.gate_layer\.{_LINEAR}", "decoder.gate."),
)
WAVEGLOW = (
    (r"\.parametrizations\.weight\.original0$", ".weight_g"),
    (r"\.parametrizations\.weight\.original1$", ".weight_v"),
    (r"^convinv\.(\d+)\.conv\.weight$", r"flows.\1.mixing.weight"),
    (r"^WN\.(\d+)\.(start|end)\.", r"flows.\1.wn.\2."),
    (r"^WN\.(\d+)\.cond_layer\.", r"flows.\1.wn.condition."),
    (r"^WN\.(\d+)\.in_layers\.", r"flows.\1.wn.filters."),
    (r"^WN\.(\d+)\.res_skip_layers\.", r"flows.\1.wn.outputs."),
)
_SEVERAL = re.compile(r"^WN\.(\d+)\.cond_layers\.(\d+)\.(.+)$")
_NORMED = re.compile(r"^(flows\.\d+\.wn\.(?:start|condition|(?:filters|outputs)\.\d+)|narrow)\.weight$")


def to_canonical(state_dict: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """The same model under this package's names. Unknown keys stay, for the strict load to report."""
    state_dict = strip_prefixes(state_dict, PREFIXES)
    if "upsample.weight" in state_dict:
        return _waveglow(state_dict)
    return {_renamed(name, TACOTRON2): value for name, value in state_dict.items()}


def _renamed(name: str, rules: tuple[tuple[str, str], ...]) -> str:
    for pattern, replacement in rules:
        name = re.sub(pattern, replacement, name)
    return name


def _waveglow(state_dict: Mapping[str, Tensor]) -> dict[str, Tensor]:
    converted: dict[str, Tensor] = {}
    layers: dict[str, dict[int, Tensor]] = {}
    for name, value in state_dict.items():
        name = _renamed(name, WAVEGLOW[:2])
        several = _SEVERAL.match(name)
        if several:
            layers.setdefault(f"flows.{several[1]}.wn.condition.{several[3]}", {})[int(several[2])] = value
            continue
        name = _renamed(name, WAVEGLOW)
        if name.endswith(".mixing.weight") and value.dim() == 3:
            value = value[:, :, 0]
        converted[name] = value
    for name, parts in layers.items():
        converted[name] = torch.cat([parts[number] for number in sorted(parts)])
    for name in [name for name in converted if _NORMED.match(name)]:
        weight = converted.pop(name)
        converted[f"{name[: -len('weight')]}weight_v"] = weight
        converted[f"{name[: -len('weight')]}weight_g"] = weight.flatten(1).norm(dim=1).view(-1, 1, 1)
    return converted
