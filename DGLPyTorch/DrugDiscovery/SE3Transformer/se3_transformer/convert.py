"""From NVIDIA's state-dict layouts to this package's, whatever fuse level wrote them.

The reference package gives a convolution one radial profile for all pairs of degrees (``conv``), one per output degree
(``conv_out.{o}``), one per input degree (``conv_in.{i}``) or one per pair (``conv.{i},{o}``), by flags and fibers. Each
is a choice of which pairs share a trunk (``RadialProfile.sharing``) with the rows of the last layer in another order.
Loading such a state dict with ``load_state_dict`` converts it, and gives each layer the sharing that it has there.
"""

from __future__ import annotations

import re
import warnings
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from dlx.weights import strip_prefixes

if TYPE_CHECKING:
    from .model.radial import Pair, RadialProfile

SHARING = ("all", "output", "input", "pair")  # of which pairs of degrees have one trunk; the order is that of the codes
_PROFILE = re.compile(
    r"(conv|conv_out\.(?P<out>\d+)|conv_in\.(?P<in>\d+)|conv\.(?P<pair>\d+,\d+))"
    r"\.radial_func\.net\.(?P<layer>\d)\.(?P<leaf>weight|bias)$"
)


def read_checkpoint(content: Mapping[str, Any]) -> dict[str, Tensor]:
    """The model's state dict from a checkpoint of the reference package: {'state_dict': ...} or the dict itself."""
    state_dict = content["state_dict"] if "state_dict" in content else content
    wrong = next((key for key, value in state_dict.items() if not isinstance(value, Tensor)), None)
    if wrong is not None:
        raise ValueError(f"{wrong!r} is a {type(state_dict[wrong]).__name__}; a state dict holds tensors only")
    return strip_prefixes(state_dict)


def convert_convolution(radial: RadialProfile, state_dict: dict[str, Tensor], prefix: str) -> None:
    """Replace, in place, the entries of one convolution that are in a reference layout; others are left alone.

    ``radial`` takes over the sharing found. ValueError when profiles are missing or their last layers do not fit.
    """
    last = radial.names["last"]
    profiles: dict[str, dict[str, Tensor]] = {}
    for key in [key for key in state_dict if key.startswith(prefix)]:
        match = _PROFILE.match(key[len(prefix) :])
        if match is None:
            continue
        kind = "output" if match["out"] else "input" if match["in"] else "pair" if match["pair"] else "all"
        place = match["out"] or match["in"] or match["pair"] or ""
        profiles.setdefault(f"{kind}:{place}", {})[f"{match['layer']}.{match['leaf']}"] = state_dict[key]
    if f"{last}.weight" not in next(iter(profiles.values()), {}):
        _adopt_sharing(radial, state_dict, prefix)
        return
    sharing = next(iter(profiles)).split(":")[0]
    for key in [key for key in state_dict if key.startswith(prefix) and _PROFILE.match(key[len(prefix) :])]:
        del state_dict[key]
    _share(radial, sharing)
    names: dict[int, str] = {}
    for pair in radial.pairs:
        place = {"all": "", "output": pair.degree_out, "input": pair.degree_in}.get(
            sharing, f"{pair.degree_in},{pair.degree_out}"
        )
        names[pair.trunk] = f"{sharing}:{place}"
    missing = set(names.values()) - profiles.keys()
    if missing:
        raise ValueError(f"{prefix}: the state dict lacks the radial profiles {', '.join(sorted(missing))}")
    state_dict[f"{prefix}conv.radial_func.sharing_code"] = torch.tensor(SHARING.index(sharing))
    target = f"{prefix}conv.radial_func.net."
    in_order = [profiles[names[trunk]] for trunk in range(radial.trunks)]
    for leaf in in_order[0]:
        if leaf != f"{last}.weight":
            state_dict[target + leaf] = torch.cat([profile[leaf] for profile in in_order])
    state_dict[f"{target}{last}.pairs"] = _canonical_rows(
        radial.pairs, [profile[f"{last}.weight"] for profile in in_order], prefix
    )


def _share(radial: RadialProfile, sharing: str) -> None:
    if sharing != radial.sharing:
        radial.set_sharing(sharing)
        warnings.warn(
            f"these weights share radial profiles by {sharing}: the model has new parameters for them, so make "
            "optimisers and DistributedDataParallel after loading",
            stacklevel=2,
        )


def _adopt_sharing(radial: RadialProfile, state_dict: Mapping[str, Tensor], prefix: str) -> None:
    """Take the sharing that a state dict of our own layout names."""
    code = state_dict.get(f"{prefix}conv.radial_func.sharing_code")
    if code is not None and 0 <= int(code) < len(SHARING):
        _share(radial, SHARING[int(code)])


def _canonical_rows(pairs: list[Pair], matrices: list[Tensor], prefix: str) -> Tensor:
    """Each reference matrix has rows (channel out, channel in, paths of its pairs in turn); ours has one pair's rows
    after the other's."""
    width = matrices[0].shape[1]
    rows: list[Tensor] = []
    views: list[Tensor] = []
    for trunk, matrix in enumerate(matrices):
        mine = [pair for pair in pairs if pair.trunk == trunk]
        shapes = {(pair.channels_out, pair.channels_in) for pair in mine}
        total = sum(pair.paths for pair in mine)
        if len(shapes) != 1 or len(matrix) != total * mine[0].channels_out * mine[0].channels_in:
            raise ValueError(f"{prefix}: a radial profile with {len(matrix)} outputs does not fit pairs {mine}")
        views.append(matrix.view(*shapes.pop(), total, width))
    used = [0] * len(matrices)
    for pair in pairs:  # output degrees outermost, as in the reference's fused bases
        first = used[pair.trunk]
        used[pair.trunk] += pair.paths
        rows.append(views[pair.trunk][:, :, first : first + pair.paths].reshape(-1, width))
    return torch.cat(rows)


def convert_norm(fiber_degrees: list[int], state_dict: dict[str, Tensor], prefix: str) -> None:
    """``layer_norms.{d}``, which the reference has for mixed channel counts, become one ``group_norm``, in place."""
    for leaf in ("weight", "bias"):
        keys = [f"{prefix}layer_norms.{degree}.{leaf}" for degree in fiber_degrees]
        if all(key in state_dict for key in keys):
            state_dict[f"{prefix}group_norm.{leaf}"] = torch.cat([state_dict.pop(key) for key in keys])


def to_canonical(model: nn.Module, state_dict: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """A state dict of any layout in this package's, for this model, whose layers take over the sharing found."""
    converted = strip_prefixes(state_dict)
    for name, module in model.named_modules():
        if hasattr(module, "convert_state_dict"):
            module.convert_state_dict(converted, f"{name}." if name else "")
    return converted
