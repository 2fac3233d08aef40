"""Rotations, translations, reflections, permutations, batches, gradients, degenerate geometry, per layer and whole.

The real Wigner matrices that features turn with come from spherical harmonics alone (test_basis.py checks those).
A reflection is a rotation times the inversion x -> -x. A kernel of path J has parity (-1)^J against the (-1)^(in + out)
of natural features, so a model with all paths is not equivariant under it; what must hold exactly: inverting the
positions is the same as flipping the sign of the weights of paths with odd J.
"""

from __future__ import annotations

import copy
import itertools

import pytest
import torch

from dlx.precision import autocast
from se3_transformer.graph import Graph
from se3_transformer.model import Fiber, SE3Transformer, SE3TransformerPooled, set_kernels
from se3_transformer.model.attention import AttentionBlockSE3
from se3_transformer.model.basis import spherical_harmonics
from se3_transformer.model.convolution import ConvSE3
from se3_transformer.model.linear import LinearSE3
from se3_transformer.model.norm import NormSE3
from se3_transformer.model.pooling import GPooling

TOLERANCE = {torch.float64: 1e-9, torch.float32: 1e-4}
MIXED = Fiber({0: 8, 1: 4, 2: 6, 3: 2})
DTYPES = [torch.float64, torch.float32]


def random_rotation(seed: int = 0) -> torch.Tensor:
    q, _ = torch.linalg.qr(torch.randn(3, 3, dtype=torch.float64, generator=torch.Generator().manual_seed(seed)))
    return q * torch.linalg.det(q)


def turn(features: dict[str, torch.Tensor], rotation: torch.Tensor) -> dict[str, torch.Tensor]:
    """Every degree's components by the matrix solved from harmonics of turned directions."""
    vectors = torch.randn(100, 3, dtype=torch.float64, generator=torch.Generator().manual_seed(7))
    turned = {}
    for degree, value in features.items():
        plain = spherical_harmonics(int(degree), vectors)[int(degree)]
        other = spherical_harmonics(int(degree), vectors @ rotation.T)[int(degree)]
        matrix = torch.linalg.lstsq(plain, other).solution.T
        turned[degree] = value @ matrix.T.to(value.dtype)
    return turned


def assert_close(found: dict, expected: dict, tolerance: float) -> None:
    """The largest difference relative to the largest value of each degree."""
    assert found.keys() == expected.keys()
    for degree, value in expected.items():
        scale = max(1.0, value.abs().max().item()) if value.numel() else 1.0
        difference = (found[degree] - value).abs().max().item() if value.numel() else 0.0
        assert difference <= tolerance * scale, (degree, difference, scale)


class Case:
    """A random graph with features of a fiber on nodes and edges."""

    def __init__(self, fiber: Fiber, edge: Fiber, dtype: torch.dtype, seed: int = 0, count: int = 7, edges: int = 25):
        generator = torch.Generator().manual_seed(seed)
        self.fiber, self.edge, self.count, self.dtype = fiber, edge, count, dtype
        self.src = torch.randint(count, (edges,), generator=generator)
        self.dst = (self.src + 1 + torch.randint(count - 1, (edges,), generator=generator)) % count

        def features(of: Fiber, rows: int) -> dict[str, torch.Tensor]:
            return {
                str(d): torch.randn(rows, c, 2 * d + 1, generator=generator, dtype=torch.float64).to(dtype)
                for d, c in of
            }

        self.nodes, self.edges = features(fiber, count), features(edge, edges)
        self.positions = torch.randn(count, 3, generator=generator, dtype=torch.float64)

    def graph(self, positions: torch.Tensor | None = None, **options) -> Graph:
        positions = (self.positions if positions is None else positions).to(self.dtype)
        relative = positions[self.dst] - positions[self.src]
        return Graph.build(self.src, self.dst, self.count, relative_pos=relative, **options)

    def layer(self, layer, rotation=None, shift=0.0):
        """The layer's output with everything turned by ``rotation``."""
        rotation = torch.eye(3, dtype=torch.float64) if rotation is None else rotation
        graph = self.graph(self.positions @ rotation.T + shift)
        nodes, edges = turn(self.nodes, rotation), turn(self.edges, rotation)
        edges = {d: graph.edge_values(value) for d, value in edges.items()}
        distance = graph.relative_pos.norm(dim=1)[:, None, None]
        edges["0"] = torch.cat([edges["0"], distance], 1) if "0" in edges else distance
        return layer(nodes, edges, graph)


LAYERS = {
    "convolution": lambda: ConvSE3(MIXED, Fiber({0: 3, 1: 5, 4: 2}), Fiber({0: 2, 1: 3}), self_interaction=True),
    "edge convolution": lambda: ConvSE3(
        MIXED, Fiber.create(4, 4), Fiber({0: 2, 1: 3}), pool=False, use_layer_norm=True
    ),
    "attention": lambda: AttentionBlockSE3(MIXED, Fiber({0: 8, 1: 4, 2: 8}), Fiber({0: 2, 1: 3}), num_heads=2),
    "linear": lambda: LinearSE3(MIXED, Fiber({0: 3, 2: 5, 3: 1})),
    "norm": lambda: NormSE3(MIXED),
    "uniform norm": lambda: NormSE3(Fiber.create(4, 8)),
}


def randomised(layer: torch.nn.Module, seed: int = 0) -> torch.nn.Module:
    """Gains and offsets away from 1 and 0, so that a wrong one shows."""
    generator = torch.Generator().manual_seed(seed)
    for parameter in layer.parameters():
        if parameter.dim() == 1:
            parameter.data += 0.3 * torch.randn(parameter.shape, generator=generator, dtype=parameter.dtype)
    return layer


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("name", LAYERS)
def test_every_layer_turns_and_does_not_see_translations(name, dtype):
    torch.manual_seed(0)
    layer = randomised(LAYERS[name]()).to(dtype)
    case = Case(layer.fiber if "norm" in name else MIXED, Fiber({0: 2, 1: 3}), dtype)
    rotation = random_rotation(1)
    expected = turn(case.layer(layer), rotation)
    assert_close(case.layer(layer, rotation, shift=3.0), expected, TOLERANCE[dtype])
    assert max(value.abs().max().item() for value in expected.values()) > 0.1


def model(degrees: int = 4, low_memory: bool = False, **options) -> SE3Transformer:
    out = Fiber({0: 5, 1: 2}) if degrees > 1 else Fiber({0: 5})
    options = {"num_heads": 2, "channels_div": 2} | options
    return randomised(
        SE3Transformer(
            2, Fiber({0: 6}), Fiber.create(degrees, 8), out, fiber_edge=Fiber({0: 4}), low_memory=low_memory, **options
        )
    )


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("degrees,low_memory", list(itertools.product((1, 2, 3, 4), (False, True))))
def test_whole_model(degrees, low_memory, dtype):
    """Rotation and translation; gradients finite; low-memory mode is the same function with the same gradients."""
    torch.manual_seed(0)
    net = model(degrees, low_memory).to(dtype)
    case = Case(Fiber({0: 6}), Fiber({0: 4}), dtype)
    rotation = random_rotation(2)
    plain = net(case.graph(), case.nodes, case.edges)
    turned = net(case.graph(case.positions @ rotation.T - 2.0), case.nodes, case.edges)
    assert_close(turned, turn(plain, rotation), TOLERANCE[dtype])
    sum(value.square().sum() for value in plain.values()).backward()
    gradients = {name: parameter.grad for name, parameter in net.named_parameters()}
    assert all(gradient is not None and torch.isfinite(gradient).all() for gradient in gradients.values())
    twin = model(degrees, not low_memory).to(dtype)
    twin.load_state_dict(net.state_dict())
    other = twin(case.graph(), case.nodes, case.edges)
    assert_close(other, plain, TOLERANCE[dtype] / 10)
    sum(value.square().sum() for value in other.values()).backward()
    assert_close({name: p.grad for name, p in twin.named_parameters()}, gradients, TOLERANCE[dtype])


@pytest.mark.parametrize("populate_edge", ["arcsin", "zero"])
def test_variants_of_protein_design_codes(populate_edge):
    """Other lengths of edges, and a linear last layer: equivariant, too; "zero" does not see how long edges are."""
    net = model(2, populate_edge=populate_edge, final_layer="lin").double()
    case = Case(Fiber({0: 6}), Fiber({0: 4}), torch.float64)
    rotation = random_rotation(2)
    plain = net(case.graph(), case.nodes, case.edges)
    assert_close(net(case.graph(case.positions @ rotation.T), case.nodes, case.edges), turn(plain, rotation), 1e-9)
    longer = net(case.graph(3 * case.positions), case.nodes, case.edges)
    assert torch.allclose(longer["0"], plain["0"]) == (populate_edge == "zero")
    assert set(net.graph_modules[-1].weights) == {"0", "1"}


@pytest.mark.parametrize("name", ["bf16", "tf32"])
def test_rounding_turns_as_it_does_in_plain_pytorch(name):
    """With few digits a turned molecule gives a turned answer up to rounding: kernels at most twice as far as plain."""
    if name == "tf32" and not torch.cuda.is_available():
        pytest.skip("tf32 needs a CUDA device")
    device = "cuda" if torch.cuda.is_available() else "cpu"
    net = model(3).float().to(device)
    case = Case(Fiber({0: 6}), Fiber({0: 4}), torch.float32)
    rotation = random_rotation(2)

    def error(fused: bool | None) -> float:
        set_kernels(net, fused)
        found = []
        for positions in (case.positions, case.positions @ rotation.T):
            nodes, edges = ({d: v.to(device) for d, v in values.items()} for values in (case.nodes, case.edges))
            with autocast(name, device), torch.no_grad():
                found.append(net(case.graph(positions).to(device), nodes, edges))
        expected = turn({d: v.double().cpu() for d, v in found[0].items()}, rotation.double())
        gaps = [(found[1][d].double().cpu() - v).norm() / v.norm() for d, v in expected.items()]
        return float(max(gaps))

    plain = error(False)
    assert 0 < plain < 0.05
    assert error(None) <= 2 * plain
    autocast("fp32", device)


def test_low_memory_mode_really_works_in_parts(monkeypatch):
    torch.manual_seed(0)
    from se3_transformer.model import convolution

    net, case, sizes = model(3, True).double(), Case(Fiber({0: 6}), Fiber({0: 4}), torch.float64), []
    whole = net(case.graph(), case.nodes, case.edges)
    monkeypatch.setattr(convolution, "LOW_MEMORY_NUMBERS", 8000)
    original = ConvSE3._part
    monkeypatch.setattr(
        ConvSE3, "_part", lambda self, n, e, src, g: sizes.append(len(src)) or original(self, n, e, src, g)
    )
    assert_close(net(case.graph(), case.nodes, case.edges), whole, 1e-12)
    assert len(sizes) > 6 and max(sizes[1:-1]) <= 6 and sum(sizes) == 3 * 25


def test_forces_in_low_memory_mode(monkeypatch):
    """Gradients of positions where the messages are computed in several parts, twice."""
    from se3_transformer.model import convolution

    forces = []
    for low_memory in (False, True):
        torch.manual_seed(0)
        net, case = model(3, low_memory).double(), Case(Fiber({0: 6}), Fiber({0: 4}), torch.float64)
        if low_memory:
            monkeypatch.setattr(convolution, "LOW_MEMORY_NUMBERS", 8000)
        graph = case.graph()
        graph.relative_pos = graph.relative_pos.clone().requires_grad_()
        sum(value.square().sum() for value in net(graph, case.nodes, case.edges).values()).backward()
        forces.append(graph.relative_pos.grad)
    assert forces[0].abs().max() > 0
    torch.testing.assert_close(forces[1], forces[0], rtol=1e-9, atol=1e-10)


def invert_odd_paths(net: torch.nn.Module) -> torch.nn.Module:
    """A copy in which the weights of paths with odd J have the other sign."""
    other = copy.deepcopy(net)
    for module in other.modules():
        if isinstance(module, ConvSE3):
            weights = module.conv.radial_func.weights.data
            for pair in module.conv.radial_func.pairs:
                first = abs(pair.degree_in - pair.degree_out)
                view = weights[pair.rows].view(pair.channels_out, pair.channels_in, pair.paths, -1)
                for path in range(pair.paths):
                    view[:, :, path] *= (-1) ** (first + path)
    return other


@pytest.mark.parametrize("dtype", DTYPES)
def test_reflections(dtype):
    torch.manual_seed(0)
    net = model().to(dtype)
    case = Case(Fiber({0: 6}), Fiber({0: 4}), dtype)
    rotation = random_rotation(3)
    reflection = -rotation  # determinant -1
    plain = net(case.graph(), case.nodes, case.edges)
    mirrored = invert_odd_paths(net)(case.graph(case.positions @ reflection.T), case.nodes, case.edges)
    assert_close(mirrored, turn(plain, rotation), TOLERANCE[dtype])
    # Scalars into scalars only know distances, so such a model sees no difference between mirror images.
    scalars = model(1).to(dtype)
    found = scalars(case.graph(case.positions @ reflection.T), case.nodes, case.edges)
    assert_close(found, scalars(case.graph(), case.nodes, case.edges), TOLERANCE[dtype])


def test_a_model_with_all_paths_can_tell_mirror_images_apart():
    torch.manual_seed(0)
    net, case = model().double(), Case(Fiber({0: 6}), Fiber({0: 4}), torch.float64)
    plain, mirrored = (net(case.graph(sign * case.positions), case.nodes, case.edges)["0"] for sign in (1, -1))
    assert (plain - mirrored).abs().max() > 1e-3


@pytest.mark.parametrize("dtype", DTYPES)
def test_order_of_edges_and_names_of_nodes(dtype):
    torch.manual_seed(0)
    net, case = model().to(dtype), Case(Fiber({0: 6}), Fiber({0: 4}), dtype)
    plain = net(case.graph(), case.nodes, case.edges)
    edges = torch.randperm(len(case.src))
    shuffled = copy.copy(case)
    shuffled.src, shuffled.dst = case.src[edges], case.dst[edges]
    found = net(shuffled.graph(), case.nodes, {d: value[edges] for d, value in case.edges.items()})
    assert_close(found, plain, TOLERANCE[dtype])
    names = torch.randperm(case.count)  # node n is called names[n]
    renamed = copy.copy(case)
    renamed.src, renamed.dst = names[case.src], names[case.dst]
    place = names.argsort()
    renamed.positions = case.positions[place]
    found = net(renamed.graph(), {d: value[place] for d, value in case.nodes.items()}, case.edges)
    assert_close({d: value[names] for d, value in found.items()}, plain, TOLERANCE[dtype])


@pytest.mark.parametrize("pooling", ["max", "avg", "sum"])
def test_composition_of_batches(pooling):
    """A graph's prediction does not depend on what else is in the batch; a batch of N is N batches of one."""
    torch.manual_seed(0)
    net = SE3TransformerPooled(Fiber({0: 6}), Fiber({0: 8}), Fiber({0: 4}), num_degrees=3, num_channels=8, output_dim=2,
                               num_layers=2, num_heads=2, channels_div=2, pooling=pooling).double()  # fmt: skip
    cases = [
        Case(Fiber({0: 6}), Fiber({0: 4}), torch.float64, seed, count, 3 * count)
        for seed, count in enumerate((3, 8, 5))
    ]
    alone = [net(case.graph(), case.nodes, case.edges) for case in cases]
    for chosen in ([0, 1, 2], [2, 0], [1, 1, 2, 0]):
        some = [cases[index] for index in chosen]
        first = [sum(case.count for case in some[:k]) for k in range(len(some))]
        src = torch.cat([case.src + start for case, start in zip(some, first, strict=True)])
        dst = torch.cat([case.dst + start for case, start in zip(some, first, strict=True)])
        positions = torch.cat([case.positions for case in some])
        batch = torch.cat([torch.full((case.count,), k) for k, case in enumerate(some)])
        graph = Graph.build(src, dst, len(positions), relative_pos=positions[dst] - positions[src], batch=batch)
        nodes = {"0": torch.cat([case.nodes["0"] for case in some])}
        edges = {"0": torch.cat([case.edges["0"] for case in some])}
        found = net(graph, nodes, edges)
        expected = torch.cat([alone[index] for index in chosen])
        assert (found - expected).abs().max() < 1e-9


@pytest.mark.parametrize("dtype", DTYPES)
def test_forces_turn_with_the_molecule(dtype):
    """The gradient of an invariant output with respect to positions is a vector field; it sums to zero."""
    torch.manual_seed(0)
    net, case = model(return_type=0, pooling="sum").to(dtype), Case(Fiber({0: 6}), Fiber({0: 4}), dtype)

    def forces(positions: torch.Tensor) -> torch.Tensor:
        positions = positions.to(dtype).requires_grad_()
        graph = Graph.build(case.src, case.dst, case.count, relative_pos=positions[case.dst] - positions[case.src])
        return -torch.autograd.grad(net(graph, case.nodes, case.edges).sum(), positions)[0]

    rotation = random_rotation(4)
    plain, turned = forces(case.positions), forces(case.positions @ rotation.T + 1.0)
    assert_close({"1": turned}, {"1": plain @ rotation.T.to(dtype)}, TOLERANCE[dtype])
    assert plain.abs().max() > 1e-3
    assert plain.sum(0).abs().max() <= TOLERANCE[dtype] * max(1.0, plain.abs().max().item())
    if dtype == torch.float64:  # and it is the gradient: against a difference quotient
        step = torch.zeros_like(case.positions)
        step[2, 1] = 1e-5
        energy = [net(case.graph(case.positions + sign * step), case.nodes, case.edges).sum() for sign in (1, -1)]
        assert -(energy[0] - energy[1]).item() / 2e-5 == pytest.approx(plain[2, 1].item(), rel=1e-6, abs=1e-8)


def degenerate_cases() -> dict:
    scattered = torch.randn(5, 3, generator=torch.Generator().manual_seed(3), dtype=torch.float64)
    coincident = scattered.clone()
    coincident[1] = coincident[0]
    ring = (torch.tensor([0, 1, 2, 3, 4, 1]), torch.tensor([1, 2, 3, 4, 0, 0]))
    nothing = torch.zeros(0, dtype=torch.long)
    return {
        "coincident atoms": (coincident, *ring),
        "all atoms in one place": (torch.zeros_like(scattered), *ring),
        "no edges": (scattered, nothing, nothing),
        "one atom": (scattered[:1], nothing, nothing),
        "one atom with a self edge": (scattered[:1], torch.tensor([0]), torch.tensor([0])),
        "self edges": (scattered, torch.tensor([0, 1, 2, 3]), torch.tensor([0, 1, 3, 2])),
        "an atom without neighbours": (scattered, torch.tensor([0, 1]), torch.tensor([1, 0])),
        "far from the origin": (scattered + 1e4, *ring),
        "along the polar axis": (torch.tensor([[0, k * (-1.0) ** k, 0] for k in range(5)], dtype=torch.float64), *ring),
        "tiny distances": (scattered * 1e-20, *ring),
        "large distances": (scattered * 1e6, *ring),
    }


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("name", degenerate_cases())
def test_degenerate_geometry(name, dtype):
    """Values and gradients of weights, features and positions are finite; the model still turns with the molecule."""
    torch.manual_seed(0)
    positions, src, dst = degenerate_cases()[name]
    net = model().to(dtype)
    nodes = {"0": torch.randn(len(positions), 6, 1, dtype=dtype, requires_grad=True)}
    edges = {"0": torch.randn(len(src), 4, 1, dtype=dtype)}

    def run(positions: torch.Tensor):
        graph = Graph.build(src, dst, len(positions), relative_pos=positions[dst] - positions[src])
        return net(graph, nodes, edges)

    moving = positions.to(dtype).requires_grad_()
    plain = run(moving)
    sum(value.square().sum() for value in plain.values()).backward()
    leaves = [*net.parameters(), nodes["0"]] + ([moving] if len(src) else [])
    assert all(torch.isfinite(value).all() for value in plain.values())
    assert all(leaf.grad is None or torch.isfinite(leaf.grad).all() for leaf in leaves)
    if dtype == torch.float64:
        rotation = random_rotation(5)
        turned = run(positions @ rotation.T)
        # Near 1e4 and 1e6 the positions themselves are rounded to 1e-12 and 1e-10.
        assert_close(turned, turn(plain, rotation), 1e-6 if "far" in name or "large" in name else 1e-9)


@pytest.mark.parametrize("degrees", [1, 2, 3])
def test_all_pairs_of_flags(degrees):
    """Every two flags together: finite outputs and gradients, invariant under rotation."""
    torch.manual_seed(0)
    case, rotation = Case(Fiber({0: 6}), Fiber({0: 4}), torch.float64), random_rotation(6)
    choices = {
        "norm": (True, False), "use_layer_norm": (True, False), "low_memory": (True, False),
        "tensor_cores": (True, False), "pooling": (None, "max", "avg", "sum"), "return_type": (None, 0),
        "channels_div": (1, 2), "num_heads": (1, 4), "radial_sharing": ("all", "output", "input", "pair"),
    }  # fmt: skip
    met = set()
    for one, two in itertools.combinations(choices, 2):
        for first, second in itertools.product(choices[one], choices[two]):
            options = {"return_type": 0} | {one: first, two: second}
            net = SE3Transformer(1, Fiber({0: 6}), Fiber.create(degrees, 8), Fiber({0: 3}), fiber_edge=Fiber({0: 4}),
                                 **({"num_heads": 2, "channels_div": 2} | options)).double()  # fmt: skip
            outputs = [net(case.graph(positions), case.nodes, case.edges)
                       for positions in (case.positions, case.positions @ rotation.T)]  # fmt: skip
            plain, turned = (value["0"] if isinstance(value, dict) else value for value in outputs)
            assert (plain - turned).abs().max() < 1e-9, options
            plain.sum().backward()
            assert all(p.grad is None or torch.isfinite(p.grad).all() for p in net.parameters()), options
            met.add((one, two))
    assert len(met) == 36


def test_pooling_of_vectors_and_empty_graphs():
    features = {"1": torch.arange(12.0).view(2, 2, 3), "0": torch.tensor([[-1.0], [-3.0]])[..., None]}
    nothing = torch.zeros(0, dtype=torch.long)
    graph = Graph.build(nothing, nothing, 2, batch=torch.tensor([0, 0]), num_graphs=2)
    assert torch.equal(GPooling(1, "sum")(features, graph), torch.stack([features["1"].sum(0), torch.zeros(2, 3)]))
    assert GPooling(0, "avg")(features, graph).tolist() == [[-2.0], [0.0]]
    assert GPooling(0, "max")(features, graph).tolist() == [[-1.0], [0.0]]
    with pytest.raises(ValueError, match="not be equivariant"):
        GPooling(1, "max")
    with pytest.raises(ValueError, match="'median'"):
        GPooling(0, "median")


def test_wrong_features_are_named():
    net, case = model(), Case(Fiber({0: 6}), Fiber({0: 4}), torch.float32)
    with pytest.raises(ValueError, match=r"node features of degree 0 must have shape \(7, 6, 1\), got shape \(7, 6\)"):
        net(case.graph(), {"0": case.nodes["0"][..., 0]}, case.edges)
    with pytest.raises(ValueError, match="edge features of degree 0 .* got none"):
        net(case.graph(), case.nodes)
    with pytest.raises(ValueError, match=r"node features of degree 2 are not of the model's fiber \(its degrees: 0\)"):
        net(case.graph(), case.nodes | {"2": torch.zeros(7, 1, 5)}, case.edges)
    with pytest.raises(ValueError, match="batch names graph -1"):
        Graph.build(torch.tensor([0]), torch.tensor([1]), 3, batch=torch.tensor([-1, 0, 0]))
    with pytest.raises(ValueError, match="edges name nodes 0 to 9"):
        Graph.build(torch.tensor([0]), torch.tensor([9]), 7)
    with pytest.raises(ValueError, match="cannot be split into 3 heads"):
        model(num_heads=3)


def test_one_training_step_lowers_the_loss():
    torch.manual_seed(0)
    net, case = model(return_type=0, pooling="avg"), Case(Fiber({0: 6}), Fiber({0: 4}), torch.float32)
    optimizer = torch.optim.Adam(net.parameters(), lr=3e-3)
    losses = []
    for _ in range(6):
        loss = (net(case.graph(), case.nodes, case.edges) - 1).square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    assert losses[-1] < 0.5 * losses[0]
