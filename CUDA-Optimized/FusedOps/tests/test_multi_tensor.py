"""Operations on lists of tensors against float64 arithmetic on each tensor."""

from __future__ import annotations

import itertools
import math

import numpy as np
import pytest
import torch

import fusedops
from fusedops.ops import multi_tensor
from fusedops.ops.multi_tensor import (
    clip_grad_norm_,
    multi_tensor_axpby,
    multi_tensor_l2norm,
    multi_tensor_scale,
    multi_tensor_unscale_,
)
from fusedops.ops.multi_tensor_table import TensorTable, head_elements, is_dense, work_items

SIZES = [0, 1, 15, 16, 17, 31, 2048, 2049, 33_333]
DTYPES = [torch.float32, torch.float16, torch.bfloat16]
EPSILON = {torch.float32: 2.0**-23, torch.float16: 2.0**-10, torch.bfloat16: 2.0**-7}


def tensors(sizes, dtype, device, misaligned=0):
    made = [torch.randn(size + misaligned, device=device).to(dtype)[misaligned:] for size in sizes]
    return made


@pytest.mark.parametrize("x_type, y_type", list(itertools.product(DTYPES, DTYPES)))
@pytest.mark.parametrize("misaligned", [(0, 0), (1, 1), (3, 5)])
def test_scale(backend, device, x_type, y_type, misaligned):
    x = tensors(SIZES, x_type, device, misaligned[0])
    y = tensors(SIZES, y_type, device, misaligned[1])
    found = multi_tensor_scale(x, y, 0.37)
    assert found.item() == 0
    for x_i, y_i in zip(x, y, strict=True):
        expected = x_i.double() * 0.37
        assert torch.all((y_i.double() - expected).abs() <= expected.abs() * EPSILON[y_type] + 1e-7)


def test_memory_around_the_tensors_is_not_written(triton_backend, device):
    for size, offset in itertools.product([1, 17, 100, 2049], [0, 1, 2, 7]):
        whole = torch.ones(size + 40, dtype=torch.bfloat16, device=device)
        multi_tensor_unscale_([whole[offset : offset + size]], 2.0)
        assert whole[offset : offset + size].eq(2).all() and whole.eq(2).sum() == size
        assert whole.eq(1).sum() == 40


@pytest.mark.parametrize("place", [(0, 0), (0, -1), (-1, 0), (-1, -1), (2, 1000)])
@pytest.mark.parametrize("value", [float("inf"), -float("inf"), float("nan")])
def test_unscale_finds_what_is_not_finite(backend, device, place, value):
    gradients = tensors([5, 4097, 2000, 17], torch.float16, device)
    before = [gradient.clone() for gradient in gradients]
    scale = torch.full((1,), 0.25, device=device)
    assert multi_tensor_unscale_(gradients, scale).item() == 0
    assert all(torch.equal(g, b * 0.25) for g, b in zip(gradients, before, strict=True))
    gradients[place[0]][place[1]] = value
    found = torch.zeros(1, device=device)
    assert multi_tensor_unscale_(gradients, scale, found) is found
    assert found.item() == 1
    assert multi_tensor_unscale_(gradients[:1], scale, found).item() == 1, "a flag that is set stays set"


@pytest.mark.parametrize("types", [(torch.float32,) * 3, (torch.float16, torch.float32, torch.bfloat16)])
def test_axpby(backend, device, types):
    x, y, out = (tensors(SIZES, dtype, device) for dtype in types)
    assert multi_tensor_axpby(x, y, out, 2.0, -0.5).item() == 0
    for x_i, y_i, out_i in zip(x, y, out, strict=True):
        expected = 2.0 * x_i.double() - 0.5 * y_i.double()
        assert torch.all((out_i.double() - expected).abs() <= expected.abs() * EPSILON[types[2]] + 1e-6)
    x[3][2] = float("nan")
    assert [multi_tensor_axpby(x, y, out, 1.0, 1.0, check).item() for check in (-1, 0, 1)] == [1, 1, 0]
    with pytest.raises(ValueError, match="check is -1, 0 or 1, not 2"):
        multi_tensor_axpby(x, y, out, 1.0, 1.0, 2)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("misaligned", [0, 1])
def test_l2norm(backend, device, dtype, misaligned):
    x = tensors(SIZES, dtype, device, misaligned)
    norm, norms = multi_tensor_l2norm(x, per_tensor=True, factor=torch.tensor([-2.0], device=device))
    expected = [2 * t.double().square().sum().sqrt().item() for t in x]
    np.testing.assert_allclose(norms.tolist(), expected, rtol=5e-6)
    np.testing.assert_allclose(norm.item(), math.sqrt(sum(e * e for e in expected)), rtol=5e-6)
    alone, nothing = multi_tensor_l2norm(x, factor=2.0)
    assert alone.item() == norm.item() and nothing.numel() == 0


def test_l2norm_of_mixed_dtypes_and_strange_layouts(backend, device):
    x = [
        torch.randn(33, 8, device=device).t(),
        torch.randn(20, device=device).bfloat16(),
        torch.randn(20, 20, device=device)[::2, 3:9],
        torch.randn(7, device=device).half(),
        torch.randn(5, device=device).bfloat16(),
    ]
    norm, norms = multi_tensor_l2norm(x, per_tensor=True)
    expected = [t.double().square().sum().sqrt().item() for t in x]
    np.testing.assert_allclose(norms.tolist(), expected, rtol=1e-6)
    np.testing.assert_allclose(norm.item(), math.sqrt(sum(e * e for e in expected)), rtol=1e-6)


def test_float64_takes_the_plain_form(device):
    x = [torch.randn(9, dtype=torch.float64, device=device)]
    norm, _ = multi_tensor_l2norm(x)
    assert norm.dtype == torch.float64
    torch.testing.assert_close(norm[0], x[0].norm(), rtol=1e-15, atol=0)


def test_norms_repeat_bit_for_bit(triton_backend, device):
    x = tensors([50_000, 3, 1000], torch.float32, device)
    results = {
        tuple(multi_tensor_l2norm(x, True)[1].tolist()) + tuple(multi_tensor_l2norm(x)[0].tolist()) for _ in range(3)
    }
    assert len(results) == 1


def with_gradients(sizes, dtype, device, factor):
    parameters = [torch.nn.Parameter(t) for t in tensors(sizes, dtype, device)]
    for parameter in parameters:
        parameter.grad = torch.randn_like(parameter) * factor
    return parameters


@pytest.mark.parametrize("dtype", [*DTYPES, torch.float64])
@pytest.mark.parametrize("factor", [1e-4, 1.0])
def test_clip_as_torch(device, dtype, factor):
    parameters = with_gradients([7, 3000, 1, 17], dtype, device, factor)
    parameters.append(torch.nn.Parameter(torch.zeros(3, device=device)))  # has no gradient
    twins = [torch.nn.Parameter(p.detach().double()) for p in parameters[:-1]]
    for twin, parameter in zip(twins, parameters, strict=False):
        twin.grad = parameter.grad.double().clone()
    before = [parameter.grad.clone() for parameter in parameters[:-1]]
    with fusedops.use("auto" if dtype == torch.float64 else "triton"):
        norm = clip_grad_norm_(parameters, 1.5)
    expected = torch.nn.utils.clip_grad_norm_(twins, 1.5)
    np.testing.assert_allclose(norm.item(), expected.item(), rtol=1e-6)
    for parameter, twin, old in zip(parameters, twins, before, strict=False):
        bound = twin.grad.abs() * EPSILON.get(dtype, 1e-7) + 1e-7
        assert torch.all((parameter.grad.double() - twin.grad).abs() <= bound)
        assert factor == 1.0 or torch.equal(parameter.grad, old), "below the limit nothing is changed"


def test_clip_of_other_norms_and_of_what_is_not_finite(backend, device):
    parameters = with_gradients([30, 4], torch.float32, device, 1.0)
    largest = max(p.grad.abs().max().item() for p in parameters)
    assert clip_grad_norm_(parameters, 0.1, math.inf).item() == largest
    parameters[0].grad[3] = float("nan")
    with pytest.raises(RuntimeError, match="non-finite"):
        clip_grad_norm_(parameters, 0.1, error_if_nonfinite=True)
    assert clip_grad_norm_([], 1.0).item() == 0


def test_lists_that_do_not_match(backend, device):
    x = tensors([3, 4], torch.float32, device)
    with pytest.raises(ValueError, match="list 1 has 1 tensors, list 0 has 2"):
        multi_tensor_scale(x, x[:1])
    with pytest.raises(ValueError, match=r"tensor 1 of list 1 is \(3,\), of list 0 \(4,\)"):
        multi_tensor_scale(x, [x[0], x[0]])
    with pytest.raises(ValueError, match="tensor 0 of list 0 is torch.strided, torch.int64"):
        multi_tensor_l2norm([torch.arange(3, device=device)])


def test_an_empty_list(backend):
    assert multi_tensor_scale([], []).item() == 0
    norm, norms = multi_tensor_l2norm([], True)
    assert norm.item() == 0 and norms.numel() == 0


def test_work_items_cover_each_element_once():
    for head, numel in itertools.product([-1, 0, 3], [0, 1, 15, 16, 19, 20, 64, 131, 1000]):
        items, first_item = work_items([numel, 40], np.array([head, 0]), 64)
        assert first_item.tolist()[0] == 0 and first_item[-1] == len(items)
        covered = [e for t, s, n, _ in items.tolist() for e in range(s, s + n) if t == 0]
        assert covered == list(range(numel))
        assert all(n <= 64 and (not v or n % 16 == 0) for _, _, n, v in items.tolist() if head >= 0 or v)


def test_tables_are_not_confused(triton_backend, device):
    """Calls in turns on tensors of equal sizes, of which some are mixed with others or not contiguous."""
    sizes = [40, 24]
    first, second = tensors(sizes, torch.float32, device), tensors(sizes, torch.float32, device)
    mixed = [*second, torch.randn(5, device=device).half()]
    columns = [torch.randn(10, 4, device=device).t(), torch.randn(6, 4, device=device).t()]
    for _ in range(3):
        for chosen in (first, mixed, second, columns, first, mixed):
            expected = math.sqrt(sum(t.double().square().sum().item() for t in chosen))
            np.testing.assert_allclose(multi_tensor_l2norm(chosen)[0].item(), expected, rtol=1e-5)
            np.testing.assert_allclose(multi_tensor.clip_by_norm_(chosen, 1e9).item(), expected, rtol=1e-5)


def test_items_of_tensors_beyond_32_bits():
    numel = 2**31 + 5
    items, _ = work_items([numel], np.array([0]), 2**20)
    assert items[-1].tolist() == [0, 2**31, 5, 0] and items[:, 2].sum() == numel


def test_head_of_lists_misaligned_alike_or_not():
    addresses = np.array([[1024, 1028, 1026], [2048, 2050, 2052]])  # float32 and bfloat16
    assert head_elements(addresses, (4, 2)).tolist() == [0, 7, -1]


def test_table_uploads_only_changed_addresses(device):
    table = TensorTable()
    x = tensors([100, 40], torch.float32, device)
    items = table.bind([x, x]).items
    assert table.bind([x, x]).uploads == 1
    y = tensors([100, 40], torch.float32, device)
    assert table.bind([x, y]).uploads == 2
    assert table.items is items
    assert table.addresses.tolist() == [[t.data_ptr() for t in x], [t.data_ptr() for t in y]]
    with pytest.raises(ValueError, match="list 1 has 1 tensors"):
        table.bind([x, x[:1]])
    with pytest.raises(ValueError, match="chunk must be a positive multiple of 16, not 100"):
        TensorTable(100)


def test_dense():
    x = torch.zeros(4, 6, 8)
    assert is_dense(x) and is_dense(x.permute(2, 0, 1)) and is_dense(x[1:2].transpose(1, 2))
    assert not is_dense(x[:, ::2]) and not is_dense(x[:, :1].expand(4, 6, 8))


def test_operators_are_well_formed(triton_backend, device):
    ops = torch.ops.fusedops
    x, y, out = (tensors([5, 40], dtype, device) for dtype in DTYPES)
    factor = torch.tensor([0.5], device=device)
    torch.library.opcheck(ops.multi_tensor_scale.default, (x, out, 2.0, None))
    torch.library.opcheck(ops.multi_tensor_unscale_.default, (x, 1.0, factor))
    torch.library.opcheck(ops.multi_tensor_axpby.default, (x, y, out, 1.0, 2.0, -1))
    torch.library.opcheck(ops.multi_tensor_l2norm.default, (x, True, 2.0, None))
    torch.library.opcheck(ops.multi_tensor_clip_.default, (x, 1.0))


def test_compiled_without_graph_breaks(backend, device):
    def f(x, y, factor):
        found = multi_tensor_scale(x, y, factor)
        found = multi_tensor_unscale_(y, 0.5, found)
        norm, norms = multi_tensor_l2norm(y, True)
        return found, norm, norms, multi_tensor.clip_by_norm_(y, 1.0)

    x, y, z = (tensors([5, 40], torch.float32, device) for _ in range(3))
    factor = torch.tensor([0.5], device=device)
    compiled = torch.compile(f, backend="aot_eager", fullgraph=True)(x, y, factor)
    for a, b in zip(compiled, f(x, z, factor), strict=True):
        assert torch.equal(a, b)
    assert all(torch.equal(a, b) for a, b in zip(y, z, strict=True))


@pytest.mark.gpu
def test_replay_of_a_captured_clip(device):
    parameters = with_gradients([100, 5000], torch.bfloat16, device, 1.0)
    clip_grad_norm_(parameters, 1.0)
    for parameter in parameters:
        parameter.grad = torch.randn_like(parameter)  # other addresses: uploaded by the graph
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        norm = clip_grad_norm_(parameters, 1.0)
    for factor in (3.0, 0.001):
        for parameter in parameters:
            parameter.grad.fill_(factor)
        graph.replay()
        expected = factor * math.sqrt(5100)
        np.testing.assert_allclose(norm.item(), expected, rtol=4e-3)
        after = multi_tensor_l2norm([p.grad for p in parameters])[0].item()
        np.testing.assert_allclose(after, min(1.0, expected), rtol=1e-2)


@pytest.mark.gpu
def test_tensors_beyond_32_bits(device):
    if torch.cuda.mem_get_info()[0] < 12 * 2**30:
        pytest.skip("needs 12 GiB of GPU memory")
    x = torch.ones(2**31 + 17, dtype=torch.bfloat16, device=device)
    x[-1] = 3
    with fusedops.use("triton"):
        multi_tensor_unscale_([x], 2.0)
        assert x[-1].item() == 6 and x[0].item() == 2 and bool((x[:-1] == 2).all())
        norm = multi_tensor_l2norm([x])[0].item()
    np.testing.assert_allclose(norm, math.sqrt(4.0 * (2**31 + 16) + 36), rtol=1e-5)


@pytest.mark.gpu
def test_on_another_stream(device):
    x = tensors([5000, 17], torch.float32, device)
    expected = [t * 0.5 for t in x]
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream), fusedops.use("triton"):
        multi_tensor_unscale_(x, 0.5)
    stream.synchronize()
    assert all(torch.equal(a, b) for a, b in zip(x, expected, strict=True))


@pytest.mark.multigpu
def test_on_a_device_that_is_not_the_current_one():
    x = [torch.ones(5000, device="cuda:1")]
    with torch.cuda.device(0), fusedops.use("triton"):
        multi_tensor_unscale_(x, 0.5)
        assert multi_tensor_l2norm(x)[0].device == torch.device("cuda:1")
    assert bool((x[0] == 0.5).all())
