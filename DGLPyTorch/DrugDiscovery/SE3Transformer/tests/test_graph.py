"""Graphs of other libraries, the call pattern of protein-design codes, padding, and edge frames without kernels."""

from __future__ import annotations

import importlib.util
import itertools
from types import SimpleNamespace

import pytest
import torch
from torch import nn

from se3_transformer import buckets, dgl_setup
from se3_transformer.graph import Graph, as_graph
from se3_transformer.model import Fiber, SE3Transformer, SE3TransformerPooled, set_kernels
from se3_transformer.model.basis import get_basis
from se3_transformer.model.geometry import Geometry
from se3_transformer.molecules import Batch

needs_dgl = pytest.mark.skipif(importlib.util.find_spec("dgl") is None, reason="needs the package dgl")


def rand(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(*shape, dtype=torch.float64, generator=torch.Generator().manual_seed(seed + len(shape)))


def pooled_model(**options) -> SE3TransformerPooled:
    torch.manual_seed(0)
    options = {"num_layers": 2, "num_heads": 2, "channels_div": 2, "pooling": "avg"} | options
    fibers = Fiber({0: 6}), Fiber({0: 8}), Fiber({0: 4})
    return SE3TransformerPooled(*fibers, num_degrees=3, num_channels=8, output_dim=1, **options).double()


def pieces() -> list[tuple[torch.Tensor, torch.Tensor, torch.Tensor]]:
    """(src, dst, positions) of three graphs with unsorted edges, one without edges."""
    generator = torch.Generator().manual_seed(1)
    found = []
    for count, edges in ((5, 12), (3, 0), (7, 20)):
        src = torch.randint(count, (edges,), generator=generator)
        dst = (src + 1 + torch.randint(count - 1, (edges,), generator=generator)) % count
        found.append((src, dst, torch.randn(count, 3, generator=generator, dtype=torch.float64)))
    return found


def joined() -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    start, src, dst, positions, batch = 0, [], [], [], []
    for number, (s, d, p) in enumerate(pieces()):
        src.append(s + start)
        dst.append(d + start)
        positions.append(p)
        batch.append(torch.full((len(p),), number))
        start += len(p)
    return torch.cat(src), torch.cat(dst), torch.cat(positions), torch.cat(batch)


def expected_output(model, nodes, edges) -> torch.Tensor:
    src, dst, positions, batch = joined()
    graph = Graph.build(
        src, dst, len(positions), relative_pos=positions[dst] - positions[src], batch=batch, num_graphs=3
    )
    return model(graph, nodes, edges)


def features() -> tuple[dict[str, torch.Tensor], dict[str, torch.Tensor]]:
    return {"0": rand(15, 6, 1)}, {"0": rand(32, 4, 1, seed=1)}


@needs_dgl
def test_batched_dgl_graphs():
    dgl_setup.prepare()
    import dgl

    graphs = []
    for src, dst, positions in pieces():
        graph = dgl.graph((src, dst), num_nodes=len(positions))
        graph.ndata["pos"] = positions
        graph.edata["rel_pos"] = positions[dst] - positions[src]
        graphs.append(graph)
    batched = dgl.batch(graphs)
    model, (nodes, edges) = pooled_model(), features()
    found = model(batched, nodes, edges)
    assert torch.equal(found, expected_output(model, nodes, edges))
    one = model(graphs[0], {"0": nodes["0"][:5]}, {"0": edges["0"][:12]})
    assert torch.allclose(one, found[:1], atol=1e-12)
    basis = get_basis(batched.edata["rel_pos"], 2)
    assert torch.allclose(model(batched, nodes, edges, basis), found, atol=1e-12)


@needs_dgl
def test_sums_are_those_of_dgl():
    dgl_setup.prepare()
    import dgl

    src, dst, positions, _ = joined()
    theirs = dgl.graph((src, dst), num_nodes=len(positions))
    ours = as_graph(theirs, positions[dst] - positions[src])
    values = rand(len(src), 3)
    summed = ours.edge_values(values).new_zeros(15, 3).index_add(0, ours.dst, ours.edge_values(values))
    assert torch.allclose(summed, dgl.ops.copy_e_sum(theirs, values))
    assert torch.equal(ours.in_degrees.long(), theirs.in_degrees())
    assert ours.num_graphs == 1


def test_pyg_like_objects():
    src, dst, positions, batch = joined()
    model, (nodes, edges) = pooled_model(), features()
    expected = expected_output(model, nodes, edges)
    data = SimpleNamespace(edge_index=torch.stack([src, dst]), pos=positions, num_nodes=15, batch=batch, num_graphs=3)
    assert torch.equal(model(data, nodes, edges), expected)
    data.pos, data.rel_pos = None, positions[dst] - positions[src]
    assert torch.equal(model(data, nodes, edges), expected)


@pytest.mark.skipif(importlib.util.find_spec("torch_geometric") is None, reason="needs the package torch_geometric")
def test_pyg_batches():
    from torch_geometric.data import Batch as PygBatch
    from torch_geometric.data import Data

    model, (nodes, edges) = pooled_model(), features()
    data = [Data(edge_index=torch.stack([s, d]), pos=p, num_nodes=len(p)) for s, d, p in pieces()]
    assert torch.equal(model(PygBatch.from_data_list(data), nodes, edges), expected_output(model, nodes, edges))


class PlainGraph:
    """The few methods of a DGLGraph that protein-design codes rely on."""

    def __init__(self, src: torch.Tensor, dst: torch.Tensor, count: int):
        self._edges, self._count, self.edata, self.ndata = (src, dst), count, {}, {}

    def edges(self) -> tuple[torch.Tensor, torch.Tensor]:
        return self._edges

    def num_nodes(self) -> int:
        return self._count


class ProteinTrack(nn.Module):
    """How RFdiffusion and, with ``variant``, RoseTTAFold2 build, initialise and call the package."""

    def __init__(
        self, l0_in: int = 8, l1_in: int = 3, l0_out: int = 8, l1_out: int = 2, num_edge_features: int = 6, **variant
    ):
        super().__init__()
        self.se3 = SE3Transformer(
            num_layers=2, fiber_in=Fiber({0: l0_in, 1: l1_in}), fiber_hidden=Fiber.create(2, 8),
            fiber_out=Fiber({0: l0_out, 1: l1_out}), num_heads=2, channels_div=2,
            fiber_edge=Fiber({0: num_edge_features}), use_layer_norm=True, **variant,
        )  # fmt: skip
        for name, parameter in self.se3.named_parameters():
            if "bias" in name:
                nn.init.zeros_(parameter)
            elif parameter.dim() == 1:
                continue
            elif "radial_func" not in name:
                nn.init.normal_(parameter, std=parameter.shape[-1] ** -0.5)
            elif "net.6" in name:
                nn.init.zeros_(parameter)
            else:
                nn.init.kaiming_normal_(parameter, nonlinearity="relu")
        last = self.se3.graph_modules[-1]
        for degree in ("0", "1"):
            nn.init.zeros_(last.weights[degree] if variant else last.to_kernel_self[degree])

    def forward(self, graph, type_0, type_1, edges):
        return self.se3(graph, {"0": type_0, "1": type_1}, {"0": edges})


@pytest.mark.parametrize("variant", [{}, {"populate_edge": "arcsin", "final_layer": "lin"}], ids=["RFdiffusion", "RF2"])
def test_call_pattern_of_protein_design_codes(variant):
    torch.manual_seed(0)
    track = ProteinTrack(**variant)
    count = 10
    src, dst = torch.where(~torch.eye(count, dtype=torch.bool))
    positions = torch.randn(count, 3)
    graph = PlainGraph(src, dst, count)
    graph.edata["rel_pos"] = (positions[dst] - positions[src]).detach()
    state = torch.randn(count, 8, 1), torch.randn(count, 3, 3), torch.randn(len(src), 6, 1)
    out = track(graph, *state)
    assert out["0"].shape == (count, 8, 1) and out["1"].shape == (count, 2, 3)
    assert not out["0"].any() and not out["1"].any()  # zero last layers: the block begins as the identity
    sum(value.sum() for value in out.values()).backward()
    last = track.se3.graph_modules[-1]
    if variant:
        assert last.weights["1"].grad.abs().max() > 0
    else:
        assert last.conv.radial_func.weights.grad.abs().max() > 0 and last.to_kernel_self["1"].grad.abs().max() > 0


def test_options_of_a_command_line_pass_and_those_of_other_models_do_not():
    fiber = Fiber({0: 8})
    SE3Transformer(1, fiber, fiber, fiber, 2, 2, batch_size=240, populate_edge="lin", final_layer="conv")
    with pytest.raises(ValueError, match="final_layer 'att' is not supported, only conv, lin"):
        SE3Transformer(1, fiber, fiber, fiber, 2, 2, final_layer="att")
    with pytest.raises(ValueError, match="a linear final layer cannot make degree 1"):
        SE3Transformer(1, fiber, fiber, Fiber({1: 2}), 2, 2, final_layer="lin")


@pytest.mark.slow
def test_the_model_compiles_as_one_graph():
    src, dst, positions, batch = joined()
    model, (nodes, edges) = pooled_model(), features()
    order = dst.argsort(stable=True)
    src, dst, edges = src[order], dst[order], {"0": edges["0"][order]}
    relative = positions[dst] - positions[src]

    def graph() -> Graph:
        return Graph(torch.stack([src, dst]), 15, batch, 3, relative, degenerate=None)

    graphs = []

    def count(module, inputs):
        graphs.append(module)
        return module.forward

    compiled = torch.compile(model, backend=count)
    assert torch.allclose(compiled(graph(), nodes, edges), model(graph(), nodes, edges), atol=1e-12)
    assert len(graphs) <= 3  # layers, and the head


def test_graphs_without_positions_and_foreign_objects_are_refused():
    graph = PlainGraph(torch.tensor([0]), torch.tensor([1]), 2)
    with pytest.raises(ValueError, match="no relative positions"):
        as_graph(graph)
    with pytest.raises(ValueError, match="a dict is neither"):
        as_graph({"edges": 1})
    with pytest.raises(ValueError, match="shape"):
        Geometry(torch.zeros(3, 2), 1)
    with pytest.raises(ValueError, match="the given basis lacks '1,0'"):
        Geometry(torch.zeros(3, 3), 1, {"0,0": torch.zeros(3, 1, 1, 1)}).pair(1, 0)


def test_tables_of_a_graph():
    src, dst = torch.tensor([2, 0, 1, 2, 2]), torch.tensor([1, 1, 0, 3, 1])
    graph = Graph.build(src, dst, 5)
    assert graph.dst.tolist() == [0, 1, 1, 1, 3] and graph.src.tolist() == [1, 2, 0, 2, 2]
    assert graph.row_start.tolist() == [0, 1, 4, 4, 5, 5] and graph.in_degrees.tolist() == [1, 3, 0, 1, 0]
    order, start = graph.by_source
    assert order.tolist() == [2, 0, 1, 3, 4] and start.tolist() == [0, 1, 2, 5, 5, 5]
    assert graph.edge_values(torch.arange(5)).tolist() == [2, 0, 1, 4, 3]
    moved = graph.to("cpu")
    assert moved.by_source[0].tolist() == order.tolist() and moved.num_nodes == 5
    with pytest.raises(ValueError, match="3 rows, the graph has 5 edges"):
        graph.edge_values(torch.arange(3))


def test_a_given_basis_is_used_in_the_callers_order_of_edges():
    src, dst, positions, batch = joined()
    model, (nodes, edges) = pooled_model(), features()
    graph = Graph.build(src, dst, 15, relative_pos=positions[dst] - positions[src], batch=batch)
    basis = get_basis(positions[dst] - positions[src], 2)
    assert torch.allclose(model(graph, nodes, edges, basis), model(graph, nodes, edges), atol=1e-12)
    halved = {key: value / 2 for key, value in basis.items()}
    assert not torch.allclose(model(graph, nodes, edges, halved), model(graph, nodes, edges), atol=1e-3)
    geometry = Geometry(graph.relative_pos, 2)
    assert torch.equal(model(graph, nodes, edges, geometry), model(graph, nodes, edges))


def test_padding_changes_no_output():
    src, dst, positions, batch = joined()
    model, (nodes, edges) = pooled_model(), features()
    order = dst.argsort(stable=True)
    src, dst, edges = src[order], dst[order], {"0": edges["0"][order]}
    graph = Graph(torch.stack([src, dst]), 15, batch, 3, positions[dst] - positions[src], degenerate=None)
    plain = Batch(graph, nodes, edges, torch.arange(3.0)[:, None])
    for padded in (buckets.pad(plain, 20, 50), buckets.pad(plain, 16, 32, num_graphs=5), buckets.pad_to_bucket(plain)):
        found = model(padded.graph, padded.node_feats, padded.edge_feats)
        assert torch.allclose(found[:3], model(graph, nodes, edges), atol=1e-12)
        assert len(found) == len(padded.targets) and torch.isfinite(found).all()
        assert padded.targets[:3].equal(plain.targets) and padded.targets[3:].isnan().all()
        assert (padded.graph.dst.diff() >= 0).all() and (padded.graph.relative_pos.norm(dim=1) > 0).all()
        again = buckets.from_tensors(buckets.to_tensors(padded), padded.graph.num_graphs)
        assert torch.equal(model(again.graph, again.node_feats, again.edge_feats), found)
    with pytest.raises(ValueError, match="do not fit into 15"):
        buckets.pad(plain, 15, 50)
    graph.degenerate = True
    with pytest.raises(ValueError, match="must promise"):
        buckets.to_tensors(plain)


def test_buckets_are_few_and_near():
    sizes = [buckets.bucket(count) for count in range(1, 20000)]
    assert all(size >= count for count, size in enumerate(sizes, 1)) and sizes == sorted(sizes)
    assert all(size <= max(1.125 * count + 1, count + 15) for count, size in enumerate(sizes, 1) if count > 64)
    assert all(size % 16 == 0 for size in sizes)
    assert len(set(sizes)) < 80


FIBERS = [
    ({0: 6}, Fiber.create(4, 8), {0: 5}, {0: 4}),
    ({0: 6, 1: 3}, Fiber({0: 8, 1: 4, 3: 4}), {0: 5, 1: 2}, {0: 4, 1: 3}),
    ({1: 4}, Fiber({1: 4, 2: 8}), {2: 3}, {}),
]


@pytest.mark.parametrize("case,sharing", list(itertools.product(range(3), ["all", "output", "input", "pair"])))
def test_edge_frames_are_the_basis_of_paths(case, sharing):
    """Outputs and all gradients, with self edges and coincident atoms among the edges."""
    torch.manual_seed(0)
    fiber_in, hidden, out, edge = FIBERS[case]
    model = SE3Transformer(2, Fiber(fiber_in), hidden, Fiber(out), 2, 2, Fiber(edge), radial_sharing=sharing).double()
    src, dst, positions, _ = joined()
    positions[1] = positions[0]
    src[0], dst[0], src[1], dst[1] = 2, 2, 0, 1
    graph = Graph.build(src, dst, 15, relative_pos=positions[dst] - positions[src])
    edges = {str(d): rand(32, c, 2 * d + 1) for d, c in edge.items()}
    results = []
    for fused in (False, True):
        set_kernels(model, fused).zero_grad()
        nodes = {str(d): rand(15, c, 2 * d + 1).requires_grad_() for d, c in fiber_in.items()}
        outputs = model(graph, nodes, edges)
        sum(value.sin().sum() for value in outputs.values()).backward()
        found = outputs | {f"node {d}": v.grad for d, v in nodes.items()}
        results.append(found | {name: p.grad for name, p in model.named_parameters() if p.grad is not None})
    assert results[0].keys() == results[1].keys()
    for name, value in results[0].items():
        assert (results[1][name] - value).abs().max() <= 1e-10 * max(1.0, value.abs().max().item()), name


def test_what_cannot_be_right_is_refused():
    edges = torch.tensor([[0, 1, 2], [1, 2, 0]])
    with pytest.raises(ValueError, match="dst must be in ascending order"):
        Graph(edges, 3)
    with pytest.raises(ValueError, match="batch must be in ascending order"):
        Graph.build(*edges, 3, batch=torch.tensor([0, 1, 0]))
    with pytest.raises(ValueError, match="relative_pos has 4 rows, the graph has 3 edges"):
        Graph.build(*edges, 3, relative_pos=torch.zeros(4, 3))
    with pytest.raises(ValueError, match="relative_pos has 4 rows, the graph has 3 edges"):
        Graph.build(*edges, 3, relative_pos=torch.zeros(4, 3), is_sorted=True)
    fibers = (Fiber({0: 2}), Fiber.create(2, 4), Fiber({0: 4}))
    with pytest.raises(TypeError, match="unknown option 'low_memroy'; did you mean 'low_memory'"):
        SE3Transformer(1, *fibers, 2, 2, low_memroy=True)
    SE3Transformer(1, *fibers, 2, 2, data_dir="of the reference's command line")
    with pytest.raises(ValueError, match="edge features of degree 3 would go unread"):
        SE3Transformer(1, *fibers, 2, 2, fiber_edge=Fiber({0: 4, 3: 3}))
    with pytest.raises(ValueError, match="return_type 1 is none of the output's degrees"):
        SE3Transformer(1, *fibers, 2, 2, return_type=1)
    with pytest.raises(ValueError, match="num_heads and channels_div must be at least 1, got 0"):
        SE3Transformer(1, *fibers, 0, 2)


def test_low_memory_in_frames_has_the_same_gradients():
    src, dst, positions, batch = joined()
    graph = Graph.build(src, dst, 15, relative_pos=positions[dst] - positions[src], batch=batch, num_graphs=3)
    gradients, saved = [], []
    for low_memory in (False, True):
        model = set_kernels(pooled_model(low_memory=low_memory), True)
        sizes: list[int] = []
        with torch.autograd.graph.saved_tensors_hooks(lambda t, kept=sizes: kept.append(t.numel()) or t, lambda t: t):
            loss = model(graph, *features()).sum()
        loss.backward()
        gradients.append([parameter.grad for parameter in model.parameters()])
        saved.append(sum(sizes))
    assert all(torch.allclose(one, two, atol=1e-12) for one, two in zip(*gradients, strict=True))
    assert saved[1] < saved[0] / 3


def test_forces_use_the_basis_whatever_is_selected():
    model = set_kernels(pooled_model(), True)
    src, dst, positions, batch = joined()
    positions.requires_grad_()
    graph = Graph.build(src, dst, 15, relative_pos=positions[dst] - positions[src], batch=batch)
    nodes, edges = features()
    model(graph, nodes, edges).sum().backward()
    assert positions.grad.abs().max() > 1e-6
