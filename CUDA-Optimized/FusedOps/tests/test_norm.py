"""Layer norm and RMS norm: against float64, in every mode, type and awkward shape."""

from __future__ import annotations

import itertools

import pytest
import torch
import torch.nn.functional as F

import fusedops
from fusedops import nn
from fusedops.ops import add_layer_norm, add_rms_norm, layer_norm, norm, rms_norm

F32, F16, B16 = torch.float32, torch.float16, torch.bfloat16
TYPES = [(F32, F32), (F16, F16), (B16, B16), (B16, F32), (F16, F32), (F32, B16)]
SHAPES = [(1, 1), (3, 7), (9, 257), (2, 1000), (33, 16)]


def exact_norm(x, residual, weight, bias, eps, rms, zero_centred):
    """Float64 from the definition; the sum is rounded to its type, as the operator defines it."""
    x = x if residual is None else (x + residual)
    centred = x if rms else x - x.mean(-1, keepdim=True)
    y = centred / (centred.pow(2).mean(-1, keepdim=True) + eps).sqrt()
    y = y if weight is None else y * (weight + 1 if zero_centred else weight)
    return (y if bias is None else y + bias), x


def leaves(device, shape, types, rms, affine=True):
    x_type, weight_type = types
    # On a coarse grid, so that sums of two are exact in every type.
    x = (torch.randint(-64, 65, shape) / 32 + 0.5).to(x_type)
    residual = (torch.randint(-64, 65, shape) / 32).to(x_type)
    weight = (torch.rand(shape[-1]) + 0.5).to(weight_type) if affine else None
    bias = torch.randn(shape[-1]).to(weight_type) if affine and not rms else None
    return [None if t is None else t.to(device).requires_grad_() for t in (x, residual, weight, bias)]


def run(rms, inputs, shape, dy, dsum, with_residual, eps=1e-5, **options):
    """Outputs and gradients of the operator in the asked-for backend."""
    x, residual, weight, bias = inputs
    if with_residual:
        function = add_rms_norm if rms else add_layer_norm
        rest = (weight, eps) if rms else (weight, bias, eps)
        y, total = function(x, residual, shape, *rest, **options)
        loss = (y * dy).sum() + (total * dsum).sum()
    else:
        function = rms_norm if rms else layer_norm
        rest = (weight, eps) if rms else (weight, bias, eps)
        y, total = function(x, shape, *rest, **options), None
        loss = (y * dy).sum()
    wanted = [t for t in (x, residual if with_residual else None, weight, bias) if t is not None]
    return [y, *([total] if with_residual else [])], torch.autograd.grad(loss, wanted)


def compare(device, no_worse, shape, types, rms, with_residual, **options):
    zero_centred = options.get("zero_centred", False)
    inputs = leaves(device, shape, types, rms)
    dy = torch.randn(shape, device=device).to(types[0])
    dsum = torch.randn(shape, device=device).to(types[0])
    wide = [None if t is None else t.detach().double().requires_grad_() for t in inputs]
    y, total = exact_norm(wide[0], wide[1] if with_residual else None, *wide[2:], 1e-5, rms, zero_centred)
    loss = (y * dy.double()).sum() + ((total * dsum.double()).sum() if with_residual else 0)
    wanted = [t for t in (wide[0], wide[1] if with_residual else None, *wide[2:]) if t is not None]
    expected = [y, *([total] if with_residual else []), *torch.autograd.grad(loss, wanted)]
    results = {}
    for backend in ("plain", "triton"):
        with fusedops.use(backend):
            outputs, gradients = run(rms, inputs, shape[-1], dy, dsum, with_residual, **options)
            results[backend] = [*outputs, *gradients]
    for ours, plain, exact in zip(results["triton"], results["plain"], expected, strict=True):
        # The output holds what it was made from as exactly as its own type does, and no better.
        floor = max(torch.finfo(ours.dtype).eps, 1e-6)
        if options.get("memory_efficient"):
            floor = 8 * torch.finfo(types[0]).eps
        no_worse(ours, plain, exact, floor, scale=1)


@pytest.mark.parametrize("rms", [False, True], ids=["layer", "rms"])
@pytest.mark.parametrize("with_residual", [False, True], ids=["alone", "residual"])
@pytest.mark.parametrize("types", TYPES, ids=lambda pair: "-".join(str(t)[6:] for t in pair))
def test_against_float64(device, triton_backend, no_worse, types, with_residual, rms):
    for shape in SHAPES:
        compare(device, no_worse, shape, types, rms, with_residual)


@pytest.mark.parametrize("rms", [False, True], ids=["layer", "rms"])
@pytest.mark.parametrize("memory_efficient, zero_centred", [(True, False), (False, True), (True, True)])
def test_modes(device, triton_backend, no_worse, memory_efficient, zero_centred, rms):
    for shape, types, with_residual in itertools.product([(5, 33), (4, 128)], TYPES[:1] + TYPES[2:4], [False, True]):
        options = {"memory_efficient": memory_efficient, "zero_centred": zero_centred}
        compare(device, no_worse, shape, types, rms, with_residual, **options)


@pytest.mark.parametrize("rms", [False, True], ids=["layer", "rms"])
@pytest.mark.parametrize("memory_efficient", [False, True])
def test_rows_in_chunks(device, triton_backend, no_worse, monkeypatch, memory_efficient, rms):
    """The form of wide rows, made to take narrow ones."""
    from fusedops.ops import norm_kernels

    monkeypatch.setattr(norm_kernels, "FORWARD", ())
    monkeypatch.setattr(norm_kernels, "BACKWARD", ())
    monkeypatch.setattr(norm_kernels, "APART", ())
    monkeypatch.setattr(norm_kernels, "WIDE_FORWARD", (32, 4))
    monkeypatch.setattr(norm_kernels, "WIDE_BACKWARD", (2, 32, 4, 1))
    for shape, types in itertools.product([(1, 1), (7, 32), (9, 100)], (TYPES[0], TYPES[3])):
        for with_residual in (False, True):
            compare(device, no_worse, shape, types, rms, with_residual, memory_efficient=memory_efficient)


@pytest.mark.parametrize("rms", [False, True], ids=["layer", "rms"])
@pytest.mark.parametrize("memory_efficient", [False, True])
def test_sums_of_columns_apart(device, triton_backend, no_worse, monkeypatch, memory_efficient, rms):
    """The form of rows that fill the registers, made to take narrow ones: fewer and more programs than columns' tiles
    and rows."""
    from fusedops.ops import norm_kernels

    monkeypatch.setattr(norm_kernels, "BACKWARD", ())
    monkeypatch.setattr(norm_kernels, "APART", ((1024, 4, 1, 4, 32),))
    for shape, types in itertools.product([(1, 1), (3, 300), (33, 40)], (TYPES[0], TYPES[3])):
        for with_residual in (False, True):
            compare(device, no_worse, shape, types, rms, with_residual, memory_efficient=memory_efficient)


@pytest.mark.parametrize("width", [16384, 65536])
def test_wide_rows(device, triton_backend, no_worse, width):
    compare(device, no_worse, (3, width), (B16, F32), False, False)
    compare(device, no_worse, (2, width - 1), (F32, F32), True, True)


def test_variance_survives_a_large_mean(device, triton_backend, monkeypatch):
    from fusedops.ops import norm_kernels

    x = torch.randn(4, 1000, device=device) + 1000.0
    exact = F.layer_norm(x.double(), (1000,))
    assert (layer_norm(x, 1000) - exact).abs().max() < 2e-4
    monkeypatch.setattr(norm_kernels, "FORWARD", ())
    monkeypatch.setattr(norm_kernels, "WIDE_FORWARD", (64, 4))
    assert (layer_norm(x, 1000) - exact).abs().max() < 2e-4


def test_types_of_output_and_residual_stream(device, backend):
    x = torch.randn(4, 32, device=device, dtype=B16, requires_grad=True)
    stream = torch.randn(4, 32, device=device, requires_grad=True)
    y, total = add_rms_norm(x, stream, 32, torch.ones(32, device=device), out_dtype=F16)
    assert y.dtype == F16 and total.dtype == F32
    torch.testing.assert_close(total, x.float() + stream, atol=0, rtol=0)
    (y.float().sum() + total.sum()).backward()
    assert x.grad.dtype == B16 and stream.grad.dtype == F32
    torch.testing.assert_close(x.grad.float(), stream.grad, atol=1e-2, rtol=1e-2)
    only = torch.autograd.grad(add_rms_norm(x, stream, 32)[1].sum(), (x, stream))  # the sum alone is used
    assert all((gradient == 1).all() for gradient in only)


def test_strides_and_misalignment(device, backend):
    storage = torch.randn(6, 100, device=device)
    weight, bias = torch.rand(50, device=device), torch.randn(50, device=device)
    views = [
        storage[:, 1:51],
        storage[::2, 50:],
        storage.view(-1)[3:303].view(6, 50),
        torch.randn(50, 6).to(device).t(),
    ]
    for view in views:
        x = view.detach().requires_grad_()
        copy = view.clone().contiguous().requires_grad_()
        for memory_efficient in (False, True):
            y = layer_norm(x, 50, weight, bias, memory_efficient=memory_efficient)
            torch.testing.assert_close(y, F.layer_norm(copy, (50,), weight, bias), atol=2e-6, rtol=1e-5)
            dy = torch.randn(50, y.shape[0], device=device).t()
            ours = torch.autograd.grad(y, x, dy)[0]
            theirs = torch.autograd.grad(F.layer_norm(copy, (50,), weight, bias), copy, dy)[0]
            torch.testing.assert_close(ours, theirs, atol=2e-4 if memory_efficient else 2e-5, rtol=1e-4)
    x = storage[:, :50].detach().requires_grad_()  # a gradient of stride 0, as that of a sum is
    gradient = torch.autograd.grad(layer_norm(x, 50, weight), x, torch.ones(1, 1, device=device).expand_as(x))[0]
    reference = torch.autograd.grad(F.layer_norm(x, (50,), weight), x, torch.ones_like(x))[0]
    torch.testing.assert_close(gradient, reference, atol=2e-5, rtol=1e-4)


def test_nothing_and_several_dimensions(device, backend):
    empty = torch.zeros(0, 8, device=device, requires_grad=True)
    weight = torch.ones(8, device=device, requires_grad=True)
    layer_norm(empty, 8, weight).sum().backward()
    assert empty.grad.shape == (0, 8) and (weight.grad == 0).all()
    x = torch.randn(2, 3, 4, 5, device=device)
    weight, bias = torch.rand(4, 5, device=device), torch.randn(4, 5, device=device)
    torch.testing.assert_close(layer_norm(x, (4, 5), weight, bias), F.layer_norm(x, (4, 5), weight, bias))
    torch.testing.assert_close(rms_norm(x, [4, 5], weight), F.rms_norm(x, (4, 5), weight))


def test_wrong_shapes_are_refused(device, backend):
    x = torch.zeros(2, 8, device=device)
    for call, message in (
        (lambda: layer_norm(x, 7), r"normalized_shape \(7,\)"),
        (lambda: layer_norm(x, 8, torch.ones(4)), r"weight has shape \(4,\)"),
        (lambda: add_rms_norm(x, x[:1], 8), r"residual has shape \(1, 8\)"),
        (lambda: rms_norm(x.long(), 8, eps=1e-6), "floating-point"),
    ):
        with pytest.raises(ValueError, match=message):
            call()


@pytest.mark.filterwarnings("ignore:invalid value encountered")
def test_a_weight_of_zero_is_an_error_not_a_guess(device, triton_backend):
    module = nn.LayerNorm(8, memory_efficient=True).to(device)
    module.weight.data[3] = 0
    with pytest.raises(ValueError, match="1 of 8 weights"):
        module(torch.randn(2, 8, device=device))
    x = torch.randn(2, 8, device=device, requires_grad=True)
    layer_norm(x, 8, module.weight, module.bias, memory_efficient=True).sum().backward()
    assert x.grad[:, 3].isnan().all()


@pytest.mark.filterwarnings("ignore:invalid value encountered", "ignore:divide by zero")
@pytest.mark.parametrize("rms", [False, True], ids=["layer", "rms"])
@pytest.mark.parametrize("form", ["whole", "apart", "chunks"])
@pytest.mark.parametrize("types", [(F32, F32), (B16, F32)])
def test_a_weight_of_zero_spoils_its_column_alone(device, triton_backend, monkeypatch, rms, form, types):
    """From the output, whose 16-bit form need not be the bias exactly; the others as if the input had been kept."""
    from fusedops.ops import norm_kernels

    if form != "whole":
        monkeypatch.setattr(norm_kernels, "BACKWARD", ())
        monkeypatch.setattr(norm_kernels, "APART", ((1024, 4, 1, 4, 32),) if form == "apart" else ())
        monkeypatch.setattr(norm_kernels, "WIDE_BACKWARD", (2, 16, 4, 1))
    inputs = leaves(device, (3, 33), types, rms)
    with torch.no_grad():
        inputs[2][5] = 0
    dy = torch.randn(3, 33, device=device)
    (y,), expected = run(rms, inputs, 33, dy, None, False)
    (same,), found = run(rms, inputs, 33, dy, None, False, memory_efficient=True)
    assert torch.equal(y, same)
    others = [column for column in range(33) if column != 5]
    tolerance = 1e-5 if types[0] == F32 else 3e-2
    for mine, its, name in zip(found, expected, ("x", "weight", "bias"), strict=False):
        torch.testing.assert_close(mine[..., others], its[..., others], rtol=tolerance, atol=tolerance)
        assert torch.isnan(mine[..., 5]).all() == (name != "bias")


@pytest.mark.parametrize("rms", [False, True], ids=["layer", "rms"])
def test_modules_hold_torchs_parameters(device, backend, rms):
    ours, theirs = (nn.RMSNorm, torch.nn.RMSNorm) if rms else (nn.LayerNorm, torch.nn.LayerNorm)
    module, reference = ours(24, eps=1e-4).to(device), theirs(24, eps=1e-4).to(device)
    reference.weight.data.uniform_(0.5, 1.5)
    module.load_state_dict(reference.state_dict())
    reference.load_state_dict(module.state_dict())
    x, residual = torch.randn(2, 5, 24, device=device), torch.randn(2, 5, 24, device=device)
    torch.testing.assert_close(module(x), reference(x))
    y, total = module(x, residual)
    torch.testing.assert_close(y, reference(x + residual))
    assert torch.equal(total, x + residual)
    centred = ours(24, zero_centred=True).to(device)
    assert (centred.weight == 0).all()
    torch.testing.assert_close(centred(x), theirs(24).to(device)(x))
    assert ours(24, elementwise_affine=False)(x).shape == x.shape


def test_weight_gradients_repeat_to_the_bit(device, triton_backend):
    x = torch.randn(100, 48, device=device, dtype=B16, requires_grad=True)
    weight = torch.rand(48, device=device, requires_grad=True)
    bias = torch.rand(48, device=device, requires_grad=True)
    dy = torch.randn(100, 48, device=device, dtype=B16)
    runs = [torch.autograd.grad(layer_norm(x, 48, weight, bias), (x, weight, bias), dy) for _ in range(3)]
    assert all(torch.equal(a, b) for other in runs[1:] for a, b in zip(runs[0], other, strict=True))


@pytest.mark.parametrize("rms", [False, True], ids=["layer", "rms"])
def test_registered_as_an_operator(device, triton_backend, rms):
    x, residual, weight, bias = leaves(device, (6, 40), (B16, F32), rms)
    for extra in (None, residual):
        torch.library.opcheck(norm.norm_forward.operator, (x, extra, weight, bias, 1e-5, rms, False, False, B16))


def test_compiles_into_one_graph(device, backend):
    module = nn.LayerNorm(40).to(device)

    def step(x, residual):
        y, total = module(x * 2, residual)
        return rms_norm(y, 40, module.weight) + total

    x = torch.randn(6, 40, device=device, requires_grad=True)
    residual = torch.randn(6, 40, device=device)
    compiled = torch.compile(step, fullgraph=True, backend="aot_eager")
    expected, found = step(x, residual), compiled(x, residual)
    torch.testing.assert_close(found, expected)
    dy = torch.randn_like(expected)
    wanted = (x, module.weight, module.bias)
    for a, b in zip(torch.autograd.grad(found, wanted, dy), torch.autograd.grad(expected, wanted, dy), strict=True):
        torch.testing.assert_close(a, b)


@pytest.mark.gpu
def test_captured_replayed_and_on_another_stream(device, triton_backend):
    x = torch.randn(64, 512, device=device, dtype=B16, requires_grad=True)
    module = nn.LayerNorm(512).to(device)
    dy = torch.randn_like(x)
    wanted = (x, module.weight, module.bias)
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        torch.autograd.grad(module(x), wanted, dy)
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = torch.autograd.grad(module(x), wanted, dy)
    with torch.no_grad():
        x.copy_(torch.randn_like(x))
    graph.replay()
    for a, b in zip(captured, torch.autograd.grad(module(x), wanted, dy), strict=True):
        assert torch.equal(a, b)


@pytest.mark.gpu
def test_more_than_two_to_the_31_elements(device, triton_backend):
    rows, width = 2**20 + 3, 2048
    if torch.cuda.mem_get_info()[0] < 40 * 2**30:
        pytest.skip("needs 40 GiB of free GPU memory")
    x = torch.randn(rows, width, device=device, dtype=B16, requires_grad=True)
    y = rms_norm(x, width, eps=1e-6)
    dx = torch.autograd.grad(y, x, torch.ones_like(y))[0]
    tail = x.detach()[-5:].clone().requires_grad_()
    expected = rms_norm(tail, width, eps=1e-6)
    assert torch.equal(y[-5:], expected)
    assert torch.equal(dx[-5:], torch.autograd.grad(expected, tail, torch.ones_like(expected))[0])


@pytest.mark.multigpu
def test_on_a_device_that_is_not_the_current_one(triton_backend):
    x = torch.randn(8, 64, device="cuda:1", requires_grad=True)
    assert torch.cuda.current_device() == 0
    y = layer_norm(x, 64)
    torch.testing.assert_close(y, F.layer_norm(x, (64,)))
    y.sum().backward()
