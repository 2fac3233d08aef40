"""2:4 masks against brute force, permutations that change nothing but the order, training under masks."""

from __future__ import annotations

import copy
import io
import itertools

import pytest
import torch
from torch import nn

from fusedops import amp
from fusedops.amp.setup import State
from fusedops.optim import SGD, AdamW
from fusedops.sparsity import (
    ASP,
    create_mask,
    is_2to4,
    kept_magnitude,
    permute_model,
    search_for_good_permutation,
    to_sparse_semi_structured,
)


@pytest.fixture(autouse=True)
def no_model():
    ASP.reset()
    yield
    ASP.reset()
    State.properties, State.enabled, State.loss_scalers = None, False, []


def brute_force_1d(row):
    best = max(itertools.combinations(range(4), 2), key=lambda pair: sum(abs(row[i]) for i in pair))
    return [float(i in best) for i in range(4)]


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
def test_1d_masks_are_the_best_of_six(device, dtype):
    x = torch.randn(13, 24).to(device, dtype)
    mask = create_mask(x)
    assert mask.dtype == dtype and mask.shape == x.shape
    expected = [[v for g in range(6) for v in brute_force_1d(row[4 * g : 4 * g + 4])] for row in x.double().tolist()]
    kept = (x.double().abs() * mask).sum()
    assert kept.item() == pytest.approx((x.double().abs().cpu() * torch.tensor(expected)).sum().item(), rel=1e-12)
    assert mask.reshape(13, 6, 4).sum(-1).eq(2).all()
    assert is_2to4(x * mask) and not is_2to4(x) and not is_2to4(x[:, :6])


@pytest.mark.parametrize("shape", [(32,), (8, 16), (8, 16, 3), (8, 16, 3, 5)])
def test_masks_run_along_the_inputs(device, shape):
    mask = create_mask(torch.randn(shape, device=device))
    rows = mask.movedim(1, -1).reshape(-1, 16) if len(shape) > 1 else mask[None]
    assert rows.reshape(len(rows), -1, 4).sum(-1).eq(2).all()


def test_widths_that_are_no_multiple_of_four(device):
    x = torch.tensor([[1.0, 2.0, 3.0, 4.0, 5.0, 6.0, 7.0]], device=device)
    assert create_mask(x).tolist() == [[0, 0, 1, 1, 0, 1, 1]]
    assert create_mask(torch.zeros(1, 4)).tolist() == [[1, 1, 0, 0]], "of equals the first"


def test_2d_masks(device):
    x = torch.randn(8, 12, device=device)
    best, greedy = create_mask(x, "m4n2_2d_best"), create_mask(x, "m4n2_2d_greedy")
    blocks = best.reshape(2, 4, 3, 4).transpose(1, 2)
    assert blocks.sum(-1).eq(2).all() and blocks.sum(-2).eq(2).all()
    greedy_blocks = greedy.reshape(2, 4, 3, 4).transpose(1, 2)
    assert greedy_blocks.sum(-1).le(2).all() and greedy_blocks.sum(-2).le(2).all()
    pairs = [[float(i in p) for i in range(4)] for p in itertools.combinations(range(4), 2)]
    patterns = [torch.tensor(p) for p in itertools.product(pairs, repeat=4)]
    patterns = [p for p in patterns if p.sum(0).eq(2).all()]
    assert len(patterns) == 90
    magnitudes = x.abs().cpu().reshape(2, 4, 3, 4).transpose(1, 2).reshape(-1, 4, 4)
    expected = sum(max((block * p).sum().item() for p in patterns) for block in magnitudes)
    assert (x.abs() * best).sum().item() == pytest.approx(expected, rel=1e-5)
    assert expected * 0.9 < (x.abs() * greedy).sum().item() <= expected * 1.00001
    order = sorted(
        ((abs(v), i, j) for i, row in enumerate(x[:4, :4].tolist()) for j, v in enumerate(row)), reverse=True
    )
    taken = []
    for _, i, j in order:
        if sum(a == i for a, _ in taken) < 2 and sum(b == j for _, b in taken) < 2:
            taken.append((i, j))
    assert sorted(taken) == [tuple(place) for place in greedy[:4, :4].nonzero().tolist()]


@pytest.mark.parametrize(
    "call, message",
    [
        (lambda: create_mask(torch.ones(2, 4), "m8n4_1d"), "pattern is one of m4n2_1d.* not 'm8n4_1d'"),
        (lambda: create_mask(torch.ones(2, 4), density=0.25), "density 0.5, not 0.25"),
        (lambda: create_mask(torch.ones(())), "1 to 4 dimensions, not 0"),
        (lambda: search_for_good_permutation(torch.ones(2, 6)), r"4 n columns is wanted, not \(2, 6\)"),
        (lambda: search_for_good_permutation(torch.ones(2, 8), "magic"), "not 'magic'"),
        (lambda: search_for_good_permutation(torch.ones(2, 8), window=16), "8 or 12 columns, not 16"),
    ],
)
def test_wrong_arguments(call, message):
    with pytest.raises(ValueError, match=message):
        call()


def test_exhaustive_search_of_two_stripes_is_optimal(device):
    x = torch.randn(20, 8, device=device)
    order = search_for_good_permutation(x)
    assert sorted(order.tolist()) == list(range(8))
    best = max(
        kept_magnitude(x, torch.tensor(p)) for p in itertools.permutations(range(8)) if p[0] == 0 and p[1] < p[2] < p[3]
    )
    assert kept_magnitude(x, order) == pytest.approx(best, rel=1e-6)


@pytest.mark.parametrize("options", [{}, {"window": 12}, {"strategy": "channel_swap"}, {"escapes": 5}])
def test_search_finds_planted_order(device, options):
    """Half of the columns are large; an order in which no four has more than two of them loses nothing."""
    large = torch.rand(16, 12, device=device) + 5
    x = torch.cat([large, torch.rand(16, 12, device=device) * 0.01], 1)  # the first three stripes are all large
    order = search_for_good_permutation(x, **options)
    assert kept_magnitude(x) < 0.6 * kept_magnitude(x, order)
    assert kept_magnitude(x, order) >= 0.999 * large.double().sum().item()
    assert torch.equal(order, search_for_good_permutation(x, **options)), "the same in each run"


class Residual(nn.Module):
    def __init__(self):
        super().__init__()
        self.stem = nn.Conv2d(3, 16, 3, padding=1)
        self.bn = nn.BatchNorm2d(16)
        self.a = nn.Conv2d(16, 32, 3, padding=1)
        self.bn_a = nn.BatchNorm2d(32)
        self.b = nn.Conv2d(32, 16, 1)
        self.head = nn.Conv2d(16, 5, 1)
        self.frozen = nn.Conv2d(16, 16, 1)
        self.tail = nn.Linear(16, 16)

    def forward(self, x):
        x = torch.relu(self.bn(self.stem(x)))
        y = self.b(nn.functional.relu(self.bn_a(self.a(x)))) + x
        z = self.frozen(y).flatten(2).transpose(1, 2)
        return self.head(y).mean((2, 3)), self.tail(z)


def test_permuting_a_network_changes_nothing_that_it_computes(device):
    model = Residual().to(device).double().eval()
    for norm in (model.bn, model.bn_a):
        norm.running_mean.normal_()
        norm.running_var.uniform_(0.5, 2)
        norm.weight.data.normal_()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    x = torch.randn(2, 3, 5, 5, dtype=torch.float64, device=device)
    sum(out.sum() for out in model(x)).backward()
    optimizer.step()
    before = [out.detach() for out in model(x)]
    frozen = model.frozen.weight.detach().clone()
    weight = model.a.weight.detach().clone()
    twin_model, twin = copy.deepcopy((model, optimizer))
    gain = permute_model(model, optimizer=optimizer)
    assert gain > 0.005 and not torch.equal(weight, model.a.weight)
    assert not torch.equal(frozen, model.frozen.weight), "its inputs are permuted"
    for out, expected in zip(model(x), before, strict=True):
        torch.testing.assert_close(out, expected, rtol=1e-10, atol=1e-10)
    for m, o in ((model, optimizer), (twin_model, twin)):  # and the momentum went along
        o.zero_grad()
        sum(out.square().sum() for out in m(x)).backward()
        o.step()
    for out, expected in zip(model(x), twin_model(x), strict=True):
        torch.testing.assert_close(out, expected, rtol=1e-9, atol=1e-9)


def test_channels_in_different_places_keep_their_order(device):
    """A Linear layer along the width of pictures, and pooling along the outputs of a Linear layer."""
    model = nn.Sequential(nn.Conv2d(3, 8, 1), nn.ReLU(), nn.Linear(8, 8), nn.MaxPool1d(2), nn.Linear(4, 4)).to(device)
    x = torch.randn(3, 8, 8, device=device)  # one picture whose width is the number of channels
    expected = model(x)
    assert permute_model(model) == 0.0
    assert torch.equal(model(x), expected)


def test_what_fx_cannot_trace_is_left_alone():
    class Branching(nn.Module):
        def __init__(self):
            super().__init__()
            self.a = nn.Linear(16, 16)

        def forward(self, x):
            return self.a(x) if x.sum() > 0 else x

    lines = []
    assert permute_model(Branching(), verbose=lines.append) == 0.0
    assert "torch.fx cannot trace" in lines[0]


def mlp(device, dtype=torch.float32):
    torch.manual_seed(3)
    return nn.Sequential(nn.Linear(16, 32), nn.ReLU(), nn.Linear(32, 16), nn.ReLU(), nn.Linear(16, 3)).to(device, dtype)


def steps(model, optimizer, count=4, seed=0):
    dtype, device = model[0].weight.dtype, model[0].weight.device
    x = torch.randn(32, 16, generator=torch.Generator().manual_seed(seed)).to(device, dtype)
    losses = []
    for _ in range(count):
        optimizer.zero_grad()
        loss = (model(x).float() - x[:, :3].float()).square().mean()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses


@pytest.mark.parametrize(
    "dtype, make",
    [
        (torch.float32, lambda p: torch.optim.SGD(p, lr=0.05, momentum=0.9, weight_decay=0.1)),
        (torch.bfloat16, lambda p: AdamW(p, lr=0.01, master_weights="fp32")),
        (torch.bfloat16, lambda p: AdamW(p, lr=0.01, master_weights="remainder")),
    ],
)
def test_training_under_masks(device, dtype, make, capsys):
    model = mlp(device, dtype)
    optimizer = make(model.parameters())
    steps(model, optimizer, 2)
    assert not ASP.already_init_asp_model()
    ASP.prune_trained_model(model, optimizer)
    assert ASP.already_init_asp_model() and ASP.is_sparsity_enabled()
    assert "enabled 50.00% density for 0.weight (32, 16)" in capsys.readouterr().out
    for layer in (model[0], model[2]):
        assert is_2to4(layer.weight) and layer.weight.ne(0).sum() == layer.weight.numel() // 2
    assert not hasattr(model[4], "__weight_mma_mask"), "3 rows do not fit"
    zeros = [layer.weight == 0 for layer in (model[0], model[2])]
    losses = steps(model, optimizer, 10)
    assert losses[-1] < losses[0]
    for layer, zero in zip((model[0], model[2]), zeros, strict=True):
        assert torch.equal(layer.weight == 0, zero)
        state = optimizer.state[layer.weight]
        assert "master" not in state or state["master"][zero].abs().max() == 0
        assert "remainder" not in state or state["remainder"][zero].abs().max() == 0


def test_masks_travel_in_checkpoints(device):
    model = mlp(device)
    optimizer = SGD(model.parameters(), lr=0.05)
    ASP.init_model_for_pruning(model, verbosity=0)
    assert not ASP.is_sparsity_enabled()
    ASP.init_optimizer_for_pruning(optimizer)
    ASP.compute_sparse_masks()
    steps(model, optimizer, 2)
    buffer = io.BytesIO()
    torch.save(model.state_dict(), buffer)
    assert "0.__weight_mma_mask" in model.state_dict()
    steps(model, optimizer, 2, seed=1)
    ASP.reset()
    resumed = mlp(device)
    second = SGD(resumed.parameters(), lr=0.05)
    ASP.init_model_for_pruning(resumed, verbosity=0)
    ASP.init_optimizer_for_pruning(second)
    buffer.seek(0)
    resumed.load_state_dict(torch.load(buffer, weights_only=True))
    assert ASP.is_sparsity_enabled()
    steps(resumed, second, 2, seed=1)
    for a, b in zip(model.parameters(), resumed.parameters(), strict=True):
        assert torch.equal(a, b)


def test_restored_weights_and_new_masks(device):
    model = mlp(device)
    before = model[0].weight.detach().clone()
    ASP.init_model_for_pruning(model, verbosity=0, allow_recompute_mask=True, allow_permutation=False)
    ASP.compute_sparse_masks()
    assert is_2to4(model[0].weight)
    mask = model[0].get_buffer("__weight_mma_mask").clone()
    ASP.compute_sparse_masks()
    assert torch.equal(mask, model[0].get_buffer("__weight_mma_mask"))
    ASP.restore_pruned_weights()
    assert torch.equal(model[0].weight, before) and not ASP.is_sparsity_enabled()


def test_choice_of_layers(device):
    class Own(nn.Module):
        def __init__(self):
            super().__init__()
            self.table = nn.Parameter(torch.randn(8, 16))

    model = nn.ModuleDict({"a": nn.Linear(16, 8), "b": nn.Linear(16, 8), "c": Own(), "d": nn.MultiheadAttention(16, 2)})
    ASP.init_model_for_pruning(
        model, mask_calculator=lambda w: create_mask(w, "m4n2_2d_best"), verbosity=0, disallowed_layer_names=["b"],
        custom_layer_dict={Own: ["table"]}, allow_permutation=False,
    )  # fmt: skip
    ASP.compute_sparse_masks()
    names = sorted(name for name, _ in model.named_buffers())
    assert names == [
        "a.__weight_mma_mask", "c.__table_mma_mask", "d.__in_proj_weight_mma_mask", "d.out_proj.__weight_mma_mask",
    ]  # fmt: skip
    assert is_2to4(model["a"].weight) and is_2to4(model["a"].weight.t()) and not is_2to4(model["b"].weight)


def test_with_amp_masters(device):
    model = mlp(device)
    optimizer = SGD(model.parameters(), lr=0.05)
    model, optimizer = amp.initialize(model, optimizer, opt_level="O2", cast_model_type=torch.bfloat16, loss_scale=1.0)
    ASP.prune_trained_model(model, optimizer)
    x = torch.randn(8, 16, device=device)
    for _ in range(3):
        optimizer.zero_grad()
        with amp.scale_loss(model(x).square().mean(), optimizer) as scaled:
            scaled.backward()
        optimizer.step()
    assert is_2to4(model[0].weight) and is_2to4(next(amp.master_params(optimizer)))


def test_order_of_calls():
    model = mlp("cpu")
    with pytest.raises(RuntimeError, match="call ASP.init_model_for_pruning before ASP.init_optimizer"):
        ASP.init_optimizer_for_pruning(SGD(model.parameters()))
    with pytest.raises(RuntimeError, match="call ASP.init_model_for_pruning before ASP.compute"):
        ASP.compute_sparse_masks()
    ASP.init_model_for_pruning(model, verbosity=0)
    with pytest.raises(RuntimeError, match="was called before"):
        ASP.init_model_for_pruning(model)
    with pytest.raises(RuntimeError, match="allow_recompute_mask=True"):
        ASP.restore_pruned_weights()
    model[0].get_buffer("__weight_mma_mask")[0, 0] = 0
    with pytest.raises(RuntimeError, match="masks are inconsistent.*2.weight"):
        ASP.is_sparsity_enabled()


def test_the_bridge_says_what_does_not_fit():
    model = nn.Sequential(nn.Linear(64, 32).half())
    assert to_sparse_semi_structured(model) == []
    with pytest.raises(ValueError, match="layer 0: its weight is not 2:4"):
        to_sparse_semi_structured(model, lambda name, layer: True)
    with pytest.raises(ValueError, match=r"layer 0: its shape \(30, 64\) is no multiple"):
        to_sparse_semi_structured(nn.Sequential(nn.Linear(64, 30).half()), lambda name, layer: True)
    model[0].weight.data.mul_(create_mask(model[0].weight))
    with pytest.raises(ValueError, match="needs a CUDA device"):
        to_sparse_semi_structured(model)


@pytest.mark.gpu
def test_the_bridge_computes_the_same(device):
    model = nn.Sequential(nn.Linear(256, 512), nn.GELU(), nn.Linear(512, 128)).to(device).half()
    for layer in (model[0], model[2]):
        layer.weight.data.mul_(create_mask(layer.weight))
    x = torch.randn(64, 256, device=device).half()
    with torch.no_grad():
        expected = model(x)
        assert to_sparse_semi_structured(model) == ["0", "2"]
        torch.testing.assert_close(model(x), expected, rtol=1e-2, atol=1e-2)
