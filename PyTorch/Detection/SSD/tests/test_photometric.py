"""Colour changes: against a per-pixel oracle, their limits, their distribution."""

from __future__ import annotations

import math

import numpy as np
import pytest

from dlx.draws import draws
from ssd import photometric


def oracle(pixel, brightness, contrast, saturation, hue) -> list[float]:
    """One pixel in plain Python: to YIQ, chroma scaled and turned, back (by Cramer's rule), contrast, brightness."""
    rows = [[0.299, 0.587, 0.114], [0.596, -0.274, -0.321], [0.211, -0.523, 0.311]]
    y, i, q = (sum(a * b for a, b in zip(row, pixel, strict=True)) for row in rows)
    angle = math.radians(hue)
    turned = [
        y,
        saturation * (i * math.cos(angle) + q * math.sin(angle)),
        saturation * (q * math.cos(angle) - i * math.sin(angle)),
    ]

    def determinant(m):
        (a, b, c), (d, e, f), (g, h, k) = m
        return a * (e * k - f * h) - b * (d * k - f * g) + c * (d * h - e * g)

    colour = []
    for column in range(3):
        replaced = [row[:column] + [value] + row[column + 1 :] for row, value in zip(rows, turned, strict=True)]
        colour.append(determinant(replaced) / determinant(rows))
    return [brightness * (128 + contrast * (value - 128)) for value in colour]


def test_agrees_with_a_pixel_by_pixel_oracle():
    generator = np.random.default_rng(0)
    pixels = generator.integers(0, 256, (1, 40, 3), dtype=np.uint8)
    for change in photometric.factors(draws(0, 0, np.arange(12), photometric.DRAWS)):
        expected = [oracle(pixel.tolist(), *change.tolist()) for pixel in pixels[0]]
        made = photometric.distort(pixels, change)[0]
        assert np.abs(made - np.clip(expected, 0, 255)).max() <= 0.502  # rounding only
        assert made.dtype == np.uint8


def test_limits():
    pixels = np.random.default_rng(1).integers(0, 256, (30, 20, 3), dtype=np.uint8)
    np.testing.assert_array_equal(photometric.distort(pixels, photometric.unchanged(1)[0]), pixels)
    full_turn = np.array([1, 1, 1, 360], np.float32)
    np.testing.assert_array_equal(photometric.distort(pixels, full_turn), pixels)
    grey = photometric.distort(pixels, np.array([1, 1, 0, 0], np.float32)).astype(int)
    assert np.ptp(grey, axis=-1).max() <= 1
    luma = pixels @ np.array([0.299, 0.587, 0.114])
    assert np.abs(grey[..., 0] - luma).max() <= 1
    assert (photometric.distort(pixels, np.array([1, 0, 1, 0], np.float32)) == 128).all()
    assert (photometric.distort(pixels, np.array([0, 1, 1, 0], np.float32)) == 0).all()
    greys = np.repeat(np.arange(256, dtype=np.uint8)[None, :, None], 3, 2)
    hue = photometric.distort(greys, np.array([1, 1, 1.5, 18], np.float32)).astype(int)
    assert np.abs(hue - greys).max() <= 1  # grey has no hue; the matrix of YIQ is rounded to three digits


def test_distribution():
    count = 20000
    made = photometric.factors(draws(2, 0, np.arange(count), photometric.DRAWS)).astype(np.float64)
    ranges = (photometric.BRIGHTNESS, photometric.CONTRAST, photometric.SATURATION, photometric.HUE)
    assert ranges == ((0.875, 1.125), (0.5, 1.5), (0.5, 1.5), (-18, 18))
    for column, (low, high) in enumerate(ranges):
        shares = np.sort((made[:, column] - low) / (high - low))
        assert shares[0] >= -1e-6 and shares[-1] <= 1 + 1e-6
        assert np.abs(shares - np.arange(count) / count).max() < 2.3 / count**0.5
    off_diagonal = np.corrcoef(made.T)[np.triu_indices(4, 1)]
    assert np.abs(off_diagonal).max() < 0.03


def test_draws_differ_between_epochs_and_samples():
    first, again, later = (draws(3, epoch, np.arange(8), photometric.DRAWS) for epoch in (0, 0, 1))
    assert (first == again).all() and not (first == later).any() and len(np.unique(first)) == first.size


@pytest.mark.parametrize("shape", [(1, 1, 3), (300, 300, 3)])
def test_shapes(shape):
    assert photometric.distort(np.zeros(shape, np.uint8), photometric.unchanged(1)[0]).shape == shape
