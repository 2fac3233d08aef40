"""Harmonics, coefficients, bases and edge frames against formulas of other origin, in float64."""

from __future__ import annotations

import importlib.util
import itertools
import json
import math
from pathlib import Path

import pytest
import sympy
import torch
from sympy.physics.quantum.spin import Rotation
from sympy.physics.wigner import clebsch_gordan

from se3_transformer.model import basis, frames

DEGREES = range(7)
GOLDEN = Path(__file__).parent / "golden" / "e3nn.json"  # by make_e3nn.py


def random_rotation(seed: int) -> torch.Tensor:
    """(3, 3) float64, determinant 1."""
    q, _ = torch.linalg.qr(torch.randn(3, 3, dtype=torch.float64, generator=torch.Generator().manual_seed(seed)))
    return q * torch.linalg.det(q)


def points(count: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(count, 3, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))


def matrix_from_harmonics(rotation: torch.Tensor, degree: int) -> torch.Tensor:
    """D with Y(R v) = D Y(v), solved from many directions: knows nothing of Clebsch-Gordan coefficients."""
    vectors = points(200, 5)
    plain = basis.spherical_harmonics(degree, vectors)[degree]
    turned = basis.spherical_harmonics(degree, vectors @ rotation.T)[degree]
    return torch.linalg.lstsq(plain, turned).solution.T


@pytest.mark.parametrize("degree", range(5))
def test_harmonics_are_sympys(degree):
    """Real combinations of sympy's complex Y_lm about the polar axis y, where its Condon-Shortley phase is removed."""
    vectors = points(4, 1)
    found = basis.spherical_harmonics(degree, vectors)[degree]
    for (x, y, z), row in zip(vectors.tolist(), found, strict=True):
        length = math.sqrt(x * x + y * y + z * z)
        theta, phi = math.acos(y / length), math.atan2(x, z)
        for m in range(-degree, degree + 1):
            value = complex(sympy.Ynm(degree, abs(m), theta, phi).expand(func=True).evalf())
            sign = (-1) ** abs(m) * math.sqrt(2)
            expected = value.real if m == 0 else sign * (value.real if m > 0 else value.imag)
            assert row[degree + m].item() == pytest.approx(expected, abs=1e-12)


def test_degree_one_is_the_vector_itself():
    vectors = points(5)
    expected = math.sqrt(3 / (4 * math.pi)) * vectors / vectors.norm(dim=1, keepdim=True)
    assert torch.allclose(basis.spherical_harmonics(1, vectors)[1], expected, atol=1e-15)


def test_harmonics_are_orthonormal_on_the_sphere():
    """Gauss-Legendre in the cosine, equal steps in the angle: exact for these polynomials."""
    count = 16
    nodes, _ = torch.linalg.eigh(
        torch.diag(torch.tensor([k / math.sqrt(4 * k * k - 1) for k in range(1, count)], dtype=torch.float64), 1)
        + torch.diag(torch.tensor([k / math.sqrt(4 * k * k - 1) for k in range(1, count)], dtype=torch.float64), -1)
    )
    legendre = torch.zeros(count + 1, count, dtype=torch.float64)
    legendre[0], legendre[1] = 1, nodes
    for n in range(1, count):
        legendre[n + 1] = ((2 * n + 1) * nodes * legendre[n] - n * legendre[n - 1]) / (n + 1)
    slope = count * legendre[count - 1] / (1 - nodes**2)
    weights = 2 / ((1 - nodes**2) * slope**2)
    angles = torch.arange(32, dtype=torch.float64) * (2 * math.pi / 32)
    radius = (1 - nodes**2).sqrt()
    vectors = torch.stack(
        [radius[:, None] * angles.cos(), nodes[:, None].expand(-1, 32), radius[:, None] * angles.sin()], -1
    )
    everything = torch.cat(basis.spherical_harmonics(6, vectors.reshape(-1, 3)), -1)
    area = (weights[:, None] * (2 * math.pi / 32)).expand(-1, 32).reshape(-1, 1)
    gram = everything.T @ (area * everything)
    assert torch.allclose(gram, torch.eye(49, dtype=torch.float64), atol=1e-11)


def test_wigner_matrices_against_harmonics_and_sympy():
    rotation = random_rotation(3)
    matrices = frames.wigner_matrices(rotation[None], 6)
    for degree in DEGREES:
        assert torch.allclose(matrices[degree][0], matrix_from_harmonics(rotation, degree), atol=1e-11)
    # The character is the trace: sin((2 l + 1) a / 2) / sin(a / 2); sympy's complex matrices have the same one.
    angle = math.acos((torch.trace(rotation).item() - 1) / 2)
    for degree in (1, 2, 3):
        trace = sum(complex(Rotation.d(degree, m, m, angle).doit().evalf()).real for m in range(-degree, degree + 1))
        about_one_axis = sum(math.cos(m * angle) for m in range(-degree, degree + 1))
        assert matrices[degree][0].trace().item() == pytest.approx(about_one_axis, abs=1e-12)
        assert trace == pytest.approx(about_one_axis, abs=1e-9)


@pytest.mark.parametrize("l1,l2", list(itertools.product(range(7), range(7))))
def test_coefficients_solve_the_intertwiner_equation(l1, l2):
    rotation = random_rotation(l1 * 7 + l2)
    for l3 in range(abs(l1 - l2), min(l1 + l2, 6) + 1):
        tensor = basis.wigner_3j(l1, l2, l3)
        d1, d2, d3 = (matrix_from_harmonics(rotation, degree) for degree in (l1, l2, l3))
        turned = torch.einsum("abc,ai,bj,ck->ijk", tensor, d1, d2, d3)
        assert (turned - tensor).abs().max() < 1e-10
        assert tensor.norm().item() == pytest.approx(1, abs=1e-13)


def test_coefficients_have_the_symmetry_of_3j_symbols():
    for l1, l2, l3 in itertools.product(range(5), repeat=3):
        if abs(l1 - l2) <= l3 <= l1 + l2:
            sign = (-1) ** (l1 + l2 + l3)
            assert torch.allclose(basis.wigner_3j(l2, l1, l3), sign * basis.wigner_3j(l1, l2, l3).permute(1, 0, 2))
            assert torch.allclose(basis.wigner_3j(l1, l3, l2), sign * basis.wigner_3j(l1, l2, l3).permute(0, 2, 1))


def test_sign_of_the_cross_product():
    """e3nn's documentation prints wigner_3j(1, 1, 1) with +0.408 at [0, 1, 2]."""
    assert basis.wigner_3j(1, 1, 1)[0, 1, 2].item() == pytest.approx(1 / math.sqrt(6))
    a, b = points(2)
    product = torch.einsum("ijk,i,j->k", basis.wigner_3j(1, 1, 1), a, b)
    assert torch.allclose(product, torch.linalg.cross(a, b) / math.sqrt(6))


def test_racah_formula_against_sympy():
    for j1, m1, j2, m2, j3 in [
        (1, 0, 1, 0, 2),
        (2, -1, 3, 2, 4),
        (3, 3, 2, -2, 1),
        (6, -4, 6, 1, 12),
        (4, 2, 5, -3, 3),
    ]:
        expected = float(clebsch_gordan(j1, j2, j3, m1, m2, m1 + m2))
        assert basis._complex_coefficient(j1, m1, j2, m2, j3) == pytest.approx(expected, abs=1e-14)


def test_degrees_that_do_not_couple_are_refused():
    with pytest.raises(ValueError, match="do not couple"):
        basis.wigner_3j(1, 1, 3)


def test_pair_bases_are_equivariant_and_independent():
    rotation, vectors = random_rotation(9), points(6)
    for degree_in, degree_out in itertools.product(range(4), range(4)):
        key = f"{degree_in},{degree_out}"
        plain = basis.get_basis(vectors, 3)[key]
        turned = basis.get_basis(vectors @ rotation.T, 3)[key]
        d_in, d_out = matrix_from_harmonics(rotation, degree_in), matrix_from_harmonics(rotation, degree_out)
        assert torch.allclose(torch.einsum("al,elfk,bk->eafb", d_in, plain, d_out), turned, atol=1e-12)
        paths = 2 * min(degree_in, degree_out) + 1
        assert plain.shape == (6, 2 * degree_in + 1, paths, 2 * degree_out + 1)
        flat = plain[0].permute(1, 0, 2).flatten(1)
        assert torch.linalg.matrix_rank(flat) == paths


def test_basis_options():
    vectors = points(3).float().requires_grad_()
    assert not basis.get_basis(vectors, 1)["1,1"].requires_grad
    assert basis.get_basis(vectors, 1, compute_gradients=True)["1,1"].requires_grad
    assert basis.get_basis(vectors, 1, amp=True)["1,1"].dtype == torch.half


def test_frames_turn_edges_onto_the_axis_everywhere():
    special = torch.tensor(
        [[0, 2.0, 0], [0, -3.0, 0], [1e-9, -1, 0], [1e-9, 1, 1e-9], [1, 0, 0], [0, 0, -1], [1, -1e-12, 0]]
    )
    vectors = torch.cat([points(50), special.double()])
    rotation = frames.rotation_to_axis(vectors)
    aligned = (rotation @ vectors[..., None]).squeeze(-1)
    expected = torch.zeros_like(aligned)
    expected[:, 1] = vectors.norm(dim=1)
    assert torch.allclose(aligned, expected, atol=1e-14)
    assert torch.allclose(rotation @ rotation.mT, torch.eye(3, dtype=torch.float64), atol=1e-14)
    assert torch.allclose(torch.linalg.det(rotation), torch.ones(len(vectors), dtype=torch.float64))
    assert torch.equal(frames.rotation_to_axis(torch.zeros(1, 3)), torch.eye(3)[None])


@pytest.mark.parametrize("degree_in,degree_out", list(itertools.product(range(7), range(7))))
def test_kernels_in_edge_frames_are_those_in_the_basis(degree_in, degree_out):
    vectors = points(5, 2)
    paths = torch.randn(2 * min(degree_in, degree_out) + 1, dtype=torch.float64)
    expected = torch.einsum(
        "elfk,f->elk", basis.pair_basis(degree_in, degree_out, basis.spherical_harmonics(12, vectors)), paths
    )
    numbers = frames.path_to_frame(degree_in, degree_out) @ paths
    kernel = torch.zeros(2 * degree_in + 1, 2 * degree_out + 1, dtype=torch.float64)
    kernel[degree_in, degree_out] = numbers[0]
    for m in range(1, min(degree_in, degree_out) + 1):
        a, b = numbers[2 * m - 1], numbers[2 * m]
        kernel[degree_in + m, degree_out + m] = kernel[degree_in - m, degree_out - m] = a
        kernel[degree_in + m, degree_out - m], kernel[degree_in - m, degree_out + m] = b, -b
    d = frames.wigner_matrices(frames.rotation_to_axis(vectors), 6)
    assert torch.allclose(d[degree_in].mT @ kernel @ d[degree_out], expected, atol=1e-12)


def test_the_zero_vector_has_only_the_scalar_and_finite_gradients():
    vectors = torch.zeros(2, 3, dtype=torch.float64, requires_grad=True)
    harmonics = basis.spherical_harmonics(6, vectors)
    assert harmonics[0][0].item() == pytest.approx(math.sqrt(1 / (4 * math.pi)))
    assert all(not value.any() for value in harmonics[1:])
    (sum(value.sum() for value in harmonics) + basis.lengths(vectors).sum()).backward()
    assert torch.isfinite(vectors.grad).all()


def test_float32_error_is_that_of_rounding():
    vectors = points(100)
    for exact, rough in zip(
        basis.spherical_harmonics(12, vectors), basis.spherical_harmonics(12, vectors.float()), strict=True
    ):
        assert (exact - rough).abs().max() < 2e-5
    rotation = frames.rotation_to_axis(vectors)
    for exact, rough in zip(
        frames.wigner_matrices(rotation, 6), frames.wigner_matrices(rotation.float(), 6), strict=True
    ):
        assert (exact - rough).abs().max() < 1e-5


@pytest.mark.gpu
@pytest.mark.skipif(importlib.util.find_spec("e3nn") is None, reason="needs the package e3nn")
def test_conventions_are_e3nns():
    from e3nn import o3

    vectors = points(20)
    for degree in DEGREES:
        expected = o3.spherical_harmonics(degree, vectors, normalize=True, normalization="integral")
        assert torch.allclose(basis.spherical_harmonics(degree, vectors)[degree], expected, atol=1e-12)
    for degree_in, degree_out in itertools.product(DEGREES, DEGREES):
        for j in range(abs(degree_in - degree_out), degree_in + degree_out + 1):
            if j <= 11:
                expected = o3.wigner_3j(j, degree_in, degree_out, dtype=torch.float64)
                assert torch.allclose(basis.wigner_3j(j, degree_in, degree_out), expected, atol=1e-10), (j, degree_in)


@pytest.mark.skipif(not GOLDEN.is_file(), reason="tests/golden/e3nn.json is made where e3nn is installed")
def test_conventions_are_those_that_e3nn_wrote_down():
    golden = json.loads(GOLDEN.read_text())
    for key, value in golden["wigner_3j"].items():
        expected = torch.tensor(value, dtype=torch.float64)
        assert torch.allclose(basis.wigner_3j(*map(int, key.split(","))), expected, atol=1e-10), key
    harmonics = basis.spherical_harmonics(6, torch.tensor(golden["vectors"], dtype=torch.float64))
    for degree, value in golden["harmonics"].items():
        assert torch.allclose(harmonics[int(degree)], torch.tensor(value, dtype=torch.float64), atol=1e-12), degree
