"""State dicts of NVIDIA's layouts at all fuse levels: an independent model of each level gives the same outputs.

The model here follows the published description step by step with dense, zero-padded fused bases, and shares nothing
with the package but the pair bases.
"""

from __future__ import annotations

import copy
import itertools
import math
import warnings

import pytest
import torch
import torch.nn.functional as F

from se3_transformer import convert
from se3_transformer.graph import Graph
from se3_transformer.model import Fiber, SE3Transformer, SE3TransformerPooled
from se3_transformer.model.basis import get_basis
from se3_transformer.model.convolution import ConvSE3

FULL, PARTIAL, NONE = 2, 1, 0


def dim(degree: int) -> int:
    return 2 * degree + 1


def rand(*shape: int) -> torch.Tensor:
    return torch.randn(*shape, dtype=torch.float64)


class ReferenceConv:
    """A convolution at one fuse level with random weights in NVIDIA's layout."""

    def __init__(self, fiber_in: dict, fiber_out: dict, fiber_edge: dict, max_degree: int, level: int, norm: bool,
                 self_interaction: bool, pool: bool):  # fmt: skip
        self.fiber_in, self.fiber_out, self.fiber_edge, self.max_degree = fiber_in, fiber_out, fiber_edge, max_degree
        self.self_interaction, self.pool, self.norm = self_interaction, pool, norm
        self.state: dict[str, torch.Tensor] = {}
        self.channels = {d: c + (fiber_edge.get(d, 0) if d else 0) for d, c in fiber_in.items()}
        same_in, same_out = len(set(self.channels.values())) == 1, len(set(fiber_out.values())) == 1
        every = list(range(max_degree + 1))
        in_all, out_all = list(fiber_in) == every, list(fiber_out) == every
        if level == FULL and same_in and same_out and in_all and out_all:
            self.kind = "full"
            freq = sum(dim(min(i, o)) for i in fiber_in for o in fiber_out)
            self.profile("conv", next(iter(fiber_out.values())) * next(iter(self.channels.values())) * freq)
        elif level >= PARTIAL and same_in and in_all:
            self.kind = "out"
            for o, channels in fiber_out.items():
                freq = sum(dim(min(i, o)) for i in fiber_in)
                self.profile(f"conv_out.{o}", channels * next(iter(self.channels.values())) * freq)
        elif level >= PARTIAL and same_out and out_all:
            self.kind = "in"
            for i, channels in self.channels.items():
                freq = sum(dim(min(i, o)) for o in fiber_out)
                self.profile(f"conv_in.{i}", channels * next(iter(fiber_out.values())) * freq)
        else:
            self.kind = "none"
            for (i, c_in), (o, c_out) in itertools.product(self.channels.items(), fiber_out.items()):
                self.profile(f"conv.{i},{o}", c_in * c_out * dim(min(i, o)))
        if self_interaction:
            for o, channels in fiber_out.items():
                if o in fiber_in:
                    self.state[f"to_kernel_self.{o}"] = rand(channels, fiber_in[o])

    def profile(self, name: str, outputs: int) -> None:
        edge_dim, hidden = self.fiber_edge.get(0, 0) + 1, 32
        first, second, last = ("0", "3", "6") if self.norm else ("0", "2", "4")
        prefix = f"{name}.radial_func.net."
        self.state |= {
            f"{prefix}{first}.weight": rand(hidden, edge_dim), f"{prefix}{first}.bias": rand(hidden),
            f"{prefix}{second}.weight": rand(hidden, hidden) / 6, f"{prefix}{second}.bias": rand(hidden),
            f"{prefix}{last}.weight": rand(outputs, hidden) / 6,
        }  # fmt: skip
        if self.norm:
            for number in ("1", "4"):
                self.state |= {f"{prefix}{number}.weight": rand(hidden), f"{prefix}{number}.bias": rand(hidden)}

    def radial(self, name: str, invariants: torch.Tensor) -> torch.Tensor:
        get = {key.removeprefix(f"{name}.radial_func.net."): value for key, value in self.state.items()}
        numbers = ("0", "1", "3", "4", "6") if self.norm else ("0", None, "2", None, "4")
        hidden = invariants
        for linear, norm in (numbers[:2], numbers[2:4]):
            hidden = F.linear(hidden, get[f"{linear}.weight"], get[f"{linear}.bias"])
            if norm:
                hidden = F.layer_norm(hidden, (32,), get[f"{norm}.weight"], get[f"{norm}.bias"])
            hidden = hidden.relu()
        return F.linear(hidden, get[f"{numbers[4]}.weight"])

    def dense(self, basis: dict, degrees_in: list, degrees_out: list) -> torch.Tensor:
        """(E, all components in, all paths, all components out), zero where a path does not lead."""
        pairs = [(i, o) for o in degrees_out for i in degrees_in]
        edges = len(basis["0,0"])
        paths = sum(dim(min(pair)) for pair in pairs)
        shape = (edges, sum(map(dim, degrees_in)), paths, sum(map(dim, degrees_out)))
        result = torch.zeros(shape, dtype=torch.float64)
        path = 0
        for i, o in pairs:
            row, column = sum(dim(d) for d in degrees_in if d < i), sum(dim(d) for d in degrees_out if d < o)
            paths = dim(min(i, o))
            result[:, row : row + dim(i), path : path + paths, column : column + dim(o)] = basis[f"{i},{o}"]
            path += paths
        return result

    def apply(self, name: str, features: torch.Tensor, invariants: torch.Tensor, dense: torch.Tensor, channels: int):
        edges, c_in, _ = features.shape
        weights = self.radial(name, invariants).view(edges, channels, c_in * dense.shape[2])
        mapped = (features @ dense.flatten(2)).view(edges, c_in * dense.shape[2], dense.shape[3])
        return weights @ mapped

    def __call__(self, nodes: dict, edges: dict, src: torch.Tensor, dst: torch.Tensor, basis: dict) -> dict:
        inside = {}
        for i in self.fiber_in:
            inside[i] = nodes[i][src]
            if i and i in edges:
                inside[i] = torch.cat([inside[i], edges[i]], 1)
        invariants = edges[0].squeeze(-1)
        degrees_in, degrees_out = list(self.fiber_in), list(self.fiber_out)
        out: dict[int, torch.Tensor] = {}
        if self.kind == "full":
            fused = torch.cat([inside[i] for i in degrees_in], -1)
            channels = next(iter(self.fiber_out.values()))
            result = self.apply("conv", fused, invariants, self.dense(basis, degrees_in, degrees_out), channels)
            out = dict(zip(degrees_out, result.split([dim(o) for o in degrees_out], -1), strict=True))
        elif self.kind == "out":
            fused = torch.cat([inside[i] for i in degrees_in], -1)
            for o, channels in self.fiber_out.items():
                out[o] = self.apply(f"conv_out.{o}", fused, invariants, self.dense(basis, degrees_in, [o]), channels)
        elif self.kind == "in":
            channels = next(iter(self.fiber_out.values()))
            result = sum(
                self.apply(f"conv_in.{i}", inside[i], invariants, self.dense(basis, [i], degrees_out), channels)
                for i in degrees_in
            )
            out = dict(zip(degrees_out, result.split([dim(o) for o in degrees_out], -1), strict=True))
        else:
            for o, channels in self.fiber_out.items():
                out[o] = sum(
                    self.apply(f"conv.{i},{o}", inside[i], invariants, self.dense(basis, [i], [o]), channels)
                    for i in degrees_in
                )
        for o in out:
            if f"to_kernel_self.{o}" in self.state:
                out[o] = out[o] + self.state[f"to_kernel_self.{o}"] @ nodes[o][dst]
            if self.pool:
                out[o] = torch.stack([out[o][dst == n].sum(0) for n in range(len(nodes[min(nodes)]))])
        return out


class ReferenceModel:
    """The whole transformer in NVIDIA's layout, with loops over nodes for the attention."""

    def __init__(
        self, layers: int, fiber_in: dict, hidden: dict, fiber_out: dict, heads: int, div: int, edge: dict, level: int
    ):
        self.layers, self.hidden, self.heads, self.edge = layers, hidden, heads, edge
        self.max_degree = max(*fiber_in, *hidden, *fiber_out)
        self.state: dict[str, torch.Tensor] = {}
        self.blocks = []
        for layer in range(layers):
            value = {d: c // div for d, c in hidden.items()}
            key = {d: c for d, c in value.items() if d in fiber_in}
            both = {d: c + key.get(d, 0) for d, c in value.items()}
            conv = ReferenceConv(fiber_in, both, edge, self.max_degree, level, True, False, False)
            query = {d: rand(c, fiber_in[d]) / math.sqrt(fiber_in[d]) for d, c in key.items()}
            joined = {d: value.get(d, 0) + fiber_in.get(d, 0) for d in value}
            project = {d: rand(c, joined[d]) / math.sqrt(joined[d]) for d, c in hidden.items()}
            self.blocks.append((conv, value, key, query, project))
            prefix = f"graph_modules.{2 * layer}."
            self.state |= {f"{prefix}to_key_value.{k}": v for k, v in conv.state.items()}
            self.state |= {f"{prefix}to_query.weights.{d}": v for d, v in query.items()}
            self.state |= {f"{prefix}project.weights.{d}": v for d, v in project.items()}
            norm = f"graph_modules.{2 * layer + 1}."
            if len(set(hidden.values())) == 1:
                self.state |= {f"{norm}group_norm.{leaf}": rand(sum(hidden.values())) for leaf in ("weight", "bias")}
            else:
                self.state |= {
                    f"{norm}layer_norms.{d}.{leaf}": rand(c) for d, c in hidden.items() for leaf in ("weight", "bias")
                }
            fiber_in = hidden
        self.last = ReferenceConv(fiber_in, fiber_out, edge, self.max_degree, level, True, True, True)
        self.state |= {f"graph_modules.{2 * layers}.{k}": v for k, v in self.last.state.items()}

    def norm(self, layer: int, features: dict) -> dict:
        prefix = f"graph_modules.{2 * layer + 1}."
        out, start = {}, 0
        for d, value in features.items():
            stop = start + value.shape[1]
            if f"{prefix}group_norm.weight" in self.state:
                weight, bias = (self.state[f"{prefix}group_norm.{leaf}"][start:stop] for leaf in ("weight", "bias"))
            else:
                weight, bias = (self.state[f"{prefix}layer_norms.{d}.{leaf}"] for leaf in ("weight", "bias"))
            start = stop
            length = value.norm(dim=-1, keepdim=True).clamp(min=2**-24)
            centred = length - length.mean(1, keepdim=True)
            scaled = centred / (centred.square().mean(1, keepdim=True) + 1e-5).sqrt()
            out[d] = value / length * (scaled * weight[:, None] + bias[:, None]).relu()
        return out

    def __call__(self, nodes: dict, edges: dict, src, dst, rel: torch.Tensor) -> dict:
        basis = get_basis(rel, self.max_degree)
        edges = dict(edges)
        edges[0] = torch.cat([edges[0], rel.norm(dim=1)[:, None, None]], 1)
        for layer, (conv, value, key, query, project) in enumerate(self.blocks):
            fused = conv(nodes, edges, src, dst, basis)
            queries = {d: weight @ nodes[d] for d, weight in query.items()}
            count = len(nodes[0])
            attended = {d: torch.zeros(count, c, dim(d), dtype=torch.float64) for d, c in value.items()}
            scale = math.sqrt(sum(c * dim(d) for d, c in key.items()))
            for n, head in itertools.product(range(count), range(self.heads)):
                mine = (dst == n).nonzero().flatten()
                if not len(mine):
                    continue
                score = torch.zeros(len(mine), dtype=torch.float64)
                for d, c in key.items():
                    per = c // self.heads
                    k = fused[d][mine, value[d] + head * per : value[d] + (head + 1) * per]
                    score = score + (k * queries[d][n, head * per : (head + 1) * per]).sum((1, 2))
                attention = (score / scale).softmax(0)
                for d, c in value.items():
                    part = slice(head * (c // self.heads), (head + 1) * (c // self.heads))
                    attended[d][n, part] = (attention[:, None, None] * fused[d][mine][:, part]).sum(0)
            nodes = {
                d: weight @ (torch.cat([attended[d], nodes[d]], 1) if d in nodes else attended[d])
                for d, weight in project.items()
            }
            nodes = self.norm(layer, nodes)
        return self.last(nodes, edges, src, dst, basis)


CASES = {
    "qm9": ({0: 6}, {0: 8, 1: 8, 2: 8}, {0: 5}, {0: 4}),
    "uniform": ({0: 8, 1: 8}, {0: 8, 1: 8}, {0: 8, 1: 8}, {0: 2}),
    "protein": ({0: 8, 1: 3}, {0: 8, 1: 8}, {0: 8, 1: 2}, {0: 3}),
    "mixed": ({0: 4, 1: 2}, {0: 8, 1: 4, 2: 4}, {0: 3, 2: 2}, {0: 2}),
    "vector edges": ({0: 4, 1: 4}, {0: 4, 1: 4}, {0: 4, 1: 4}, {0: 2, 1: 3}),
}


@pytest.mark.parametrize("level", [FULL, PARTIAL, NONE])
@pytest.mark.parametrize("case", CASES)
def test_whole_models_of_every_fuse_level(case, level):
    torch.manual_seed(0)
    fiber_in, hidden, fiber_out, edge = CASES[case]
    reference = ReferenceModel(2, fiber_in, hidden, fiber_out, 2, 2, edge, level)
    model = SE3Transformer(2, Fiber(fiber_in), Fiber(hidden), Fiber(fiber_out), 2, 2, Fiber(edge)).double()
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="these weights share radial profiles")
        model.load_state_dict(reference.state, strict=True)
    count, edges = 6, 17
    src, dst = torch.randint(count, (edges,)), torch.randint(count, (edges,))
    rel = rand(edges, 3)
    nodes, features = (
        {d: rand(count, c, dim(d)) for d, c in fiber_in.items()},
        {d: rand(edges, c, dim(d)) for d, c in edge.items()},
    )
    expected = reference(nodes, features, src, dst, rel)
    graph = Graph.build(src, dst, count, relative_pos=rel)
    found = model(graph, {str(d): v for d, v in nodes.items()}, {str(d): v for d, v in features.items()})
    assert found.keys() == {str(d) for d in expected}
    for d, value in expected.items():
        assert torch.allclose(found[str(d)], value, rtol=1e-9, atol=1e-9 * value.abs().max().item())


def test_all_kinds_of_layers_were_met():
    kinds = set()
    for (fiber_in, hidden, fiber_out, edge), level in itertools.product(CASES.values(), (FULL, PARTIAL, NONE)):
        model = ReferenceModel(2, fiber_in, hidden, fiber_out, 2, 2, edge, level)
        kinds |= {block[0].kind for block in model.blocks} | {model.last.kind}
    assert kinds == {"full", "out", "in", "none"}


@pytest.mark.parametrize("norm", [True, False])
def test_profiles_without_layer_norm(norm):
    torch.manual_seed(1)
    reference = ReferenceConv({0: 4, 1: 4}, {0: 6, 1: 6}, {0: 2}, 1, PARTIAL, norm, True, True)
    conv = ConvSE3(Fiber({0: 4, 1: 4}), Fiber({0: 6, 1: 6}), Fiber({0: 2}), use_layer_norm=norm, self_interaction=True)
    conv.double().load_state_dict(copy.deepcopy(reference.state), strict=True)
    src, dst, rel = torch.randint(4, (9,)), torch.randint(4, (9,)).sort().values, rand(9, 3)
    nodes, edges = {d: rand(4, 4, dim(d)) for d in (0, 1)}, {0: rand(9, 3, 1)}
    expected = reference(nodes, edges, src, dst, get_basis(rel, 1))
    graph = Graph.build(src, dst, 4, relative_pos=rel, is_sorted=True)
    found = conv({str(d): v for d, v in nodes.items()}, {"0": edges[0]}, graph)
    for d, value in expected.items():
        assert torch.allclose(found[str(d)], value, atol=1e-10)


@pytest.mark.parametrize("sharing", ["all", "output", "input", "pair"])
def test_own_state_dicts_carry_their_sharing(sharing):
    fiber = Fiber.create(2, 4)
    model = SE3Transformer(1, fiber, fiber, fiber, 2, 2, radial_sharing=sharing)
    other = SE3Transformer(1, fiber, fiber, fiber, 2, 2)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        other.load_state_dict(model.state_dict(), strict=True)
    told = [str(warning.message) for warning in caught if "make optimisers" in str(warning.message)]
    assert bool(told) == (sharing != "all")  # parameters of another shape replace the model's
    assert other.graph_modules[0].to_key_value.conv.radial_func.sharing == sharing
    for (name, value), (name2, value2) in zip(model.state_dict().items(), other.state_dict().items(), strict=True):
        assert name == name2 and torch.equal(value, value2)


def test_flags_do_not_change_the_layout():
    fiber = Fiber.create(2, 4)
    shapes = [
        {
            k: v.shape
            for k, v in SE3Transformer(2, fiber, fiber, fiber, 2, 2, tensor_cores=t, low_memory=m).state_dict().items()
        }
        for t, m in itertools.product((False, True), repeat=2)
    ]
    assert all(shape == shapes[0] for shape in shapes)


def test_checkpoint_of_the_reference_package():
    reference = ReferenceModel(1, {0: 6}, {0: 8, 1: 8}, {0: 8}, 2, 2, {0: 4}, FULL)
    state = {f"module.transformer.{k}": v for k, v in reference.state.items()}
    state |= {
        "module.mlp.0.weight": rand(8, 8),
        "module.mlp.0.bias": rand(8),
        "module.mlp.2.weight": rand(1, 8),
        "module.mlp.2.bias": rand(1),
    }
    fibers = Fiber({0: 6}), Fiber({0: 8}), Fiber({0: 4})
    options = {"num_layers": 1, "num_heads": 2, "channels_div": 2}
    model = SE3TransformerPooled(*fibers, num_degrees=2, num_channels=8, output_dim=1, **options)
    model.double().load_state_dict(convert.read_checkpoint({"state_dict": state, "epoch": 3}), strict=True)
    assert torch.equal(model.mlp[0].weight, state["module.mlp.0.weight"])
    with pytest.raises(ValueError, match="'epoch' is a int"):
        convert.read_checkpoint({"epoch": 3})


def test_incomplete_state_dicts_are_refused():
    reference = ReferenceConv({0: 4, 1: 4}, {0: 6, 1: 6}, {0: 2}, 1, PARTIAL, True, False, True)
    conv = ConvSE3(Fiber({0: 4, 1: 4}), Fiber({0: 6, 1: 6}), Fiber({0: 2}), use_layer_norm=True)
    missing = {key: value for key, value in reference.state.items() if not key.startswith("conv_out.1")}
    with pytest.raises(ValueError, match="lacks the radial profiles output:1"):
        conv.load_state_dict(missing)
    wrong = {key: value[:-1] if key.endswith("6.weight") else value for key, value in reference.state.items()}
    with pytest.raises(ValueError, match="does not fit"):
        conv.load_state_dict(wrong)
