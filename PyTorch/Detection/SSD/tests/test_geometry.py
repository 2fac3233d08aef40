"""Zoom out, crop and flip: boxes stay on their objects, draws are distributed as asked, a slow oracle agrees."""

from __future__ import annotations

import numpy as np
import pytest
from PIL import Image

from dlx.draws import draws
from ssd import geometry, pictures

SIZE = 300
GREEN, PINK = (20, 160, 40), (250, 30, 220)


def one_box(count: int, seed: int = 0) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Sizes, boxes and presence of pictures with one object each."""
    generator = np.random.default_rng(seed)
    sizes = generator.integers(120, 700, (count, 2))
    sides = generator.uniform(0.2, 0.6, (count, 2)) * sizes
    corners = generator.uniform(0, 1, (count, 2)) * (sizes - sides)
    boxes = np.rint(np.concatenate([corners, corners + sides], 1)).astype(np.float64)
    return sizes, boxes[:, None], np.ones((count, 1), bool)


def several_boxes(count: int, seed: int = 0) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    generator = np.random.default_rng(seed)
    sizes = generator.integers(100, 640, (count, 2))
    present = generator.random((count, 5)) < 0.6
    sides = generator.uniform(0.02, 0.7, (count, 5, 2)) * sizes[:, None]
    corners = generator.uniform(0, 1, (count, 5, 2)) * (sizes[:, None] - sides)
    return sizes, np.concatenate([corners, corners + sides], 2) * present[..., None], present


def found_box(pixels: np.ndarray) -> np.ndarray:
    """left, top, right, bottom of what is more pink than green."""
    distance = [np.abs(pixels.astype(int) - np.array(colour)).sum(-1) for colour in (PINK, GREEN)]
    fill = np.abs(pixels.astype(int) - np.array(pictures.FILL)).sum(-1)
    pink = (distance[0] < distance[1]) & (distance[0] < fill)
    rows, columns = (np.flatnonzero(pink.any(axis)) for axis in (1, 0))
    return np.array([columns[0], rows[0], columns[-1] + 1, rows[-1] + 1])


@pytest.mark.parametrize("augmentation", geometry.AUGMENTATIONS)
def test_a_box_stays_on_its_object(augmentation):
    """Draw a rectangle, cut, find it again: within a pixel and a half of the box that was moved."""
    sizes, boxes, present = one_box(60)
    values = draws(5, 0, np.arange(60), geometry.DRAWS)
    cut = geometry.cuts(sizes, boxes, present, values, SIZE, augmentation)
    moved, kept = geometry.move_boxes(boxes, present, cut)
    assert kept.all()  # a crop keeps the centre of some object, and here each has one
    assert cut.flips.any() == (augmentation != "none")
    for row in range(60):
        image = Image.new("RGB", tuple(sizes[row].tolist()), GREEN)
        left, top, right, bottom = boxes[row, 0].astype(int).tolist()
        image.paste(PINK, (left, top, right, bottom))
        pixels = pictures.render(image, cut, row)
        assert pixels.shape == (SIZE, SIZE, 3)
        np.testing.assert_allclose(found_box(pixels), moved[row, 0] * SIZE, atol=1.5)


def test_what_lies_outside_the_picture_is_the_mean_colour():
    sizes, boxes, present = one_box(40)
    cut = geometry.cuts(sizes, boxes, present, draws(1, 0, np.arange(40), geometry.DRAWS), SIZE)
    zoomed = np.flatnonzero((cut.targets[:, 2:] < SIZE).all(1))
    assert len(zoomed) > 5
    for row in zoomed:
        pixels = pictures.render(Image.new("RGB", tuple(sizes[row].tolist()), GREEN), cut, row)
        left, top, width, height = cut.targets[row]
        left = SIZE - left - width if cut.flips[row] else left
        inside = np.zeros((SIZE, SIZE), bool)
        inside[top : top + height, left : left + width] = True
        assert (pixels[~inside] == pictures.FILL).all() and (pixels[inside] == GREEN).all()


def test_the_cut_is_the_window():
    """Where the part of a picture is placed, against the window's own scale: half a pixel at most."""
    sizes, boxes, present = several_boxes(400)
    cut = geometry.cuts(sizes, boxes, present, draws(2, 0, np.arange(400), geometry.DRAWS), SIZE)
    source, target, window = cut.sources, cut.targets, cut.windows
    scale = SIZE / window[:, 2:]
    assert np.abs((source[:, :2] - window[:, :2]) * scale - target[:, :2]).max() <= 0.5
    ends = (source[:, :2] + source[:, 2:] - window[:, :2]) * scale
    assert np.abs(ends - target[:, :2] - target[:, 2:]).max() <= 0.5
    assert (source[:, :2] >= 0).all() and (source[:, :2] + source[:, 2:] <= sizes).all()
    assert (target[:, :2] >= 0).all() and (target[:, :2] + target[:, 2:] <= SIZE).all()
    assert (source[:, 2:] > 0).all() and (target[:, 2:] > 0).all()


def oracle(size, boxes, values) -> list[int]:
    """The window of one sample, one try after another, in plain Python."""
    width, height = size
    left, top, canvas_width, canvas_height = 0, 0, width, height
    if values[0] < 0.5:
        ratio = 1 + 3 * values[1]
        canvas_width, canvas_height = round(width * ratio), round(height * ratio)
        left = -int(values[2] * (canvas_width - width + 1))
        top = -int(values[3] * (canvas_height - height + 1))
    least = [None, 0, 0.1, 0.3, 0.5, 0.7, 0.9][int(values[4] * 7)]
    canvas = [left, top, canvas_width, canvas_height]
    if least is None or not boxes:
        return canvas
    for number in range(50):
        across, down, x, y = values[6 + 4 * number : 10 + 4 * number]
        across, down = 0.3 + 0.7 * across, 0.3 + 0.7 * down
        if not 0.5 <= across / down <= 2:
            continue
        w, h = max(1, round(across * canvas_width)), max(1, round(down * canvas_height))
        x, y = left + int(x * (canvas_width - w + 1)), top + int(y * (canvas_height - h + 1))
        best, inside = 0.0, False
        for a, b, c, d in boxes:
            common = max(0, min(c, x + w) - max(a, x)) * max(0, min(d, y + h) - max(b, y))
            best = max(best, common / ((c - a) * (d - b) + w * h - common))
            inside |= x <= (a + c) / 2 < x + w and y <= (b + d) / 2 < y + h
        if best >= least and inside:
            return [x, y, w, h]
    return canvas


def test_agrees_with_a_slow_oracle():
    sizes, boxes, present = several_boxes(500)
    values = draws(3, 1, np.arange(500), geometry.DRAWS)
    cut = geometry.cuts(sizes, boxes, present, values, SIZE)
    expected = [oracle(s, b[p].tolist(), v) for s, b, p, v in zip(sizes, boxes, present, values, strict=True)]
    np.testing.assert_array_equal(cut.windows, expected)


def test_a_sample_does_not_depend_on_its_batch():
    sizes, boxes, present = several_boxes(64)
    values = draws(4, 2, np.arange(64), geometry.DRAWS)
    together = geometry.cuts(sizes, boxes, present, values, SIZE)
    moved, kept = geometry.move_boxes(boxes, present, together)
    for row in (0, 7, 63):
        one = slice(row, row + 1)
        alone = geometry.cuts(sizes[one], boxes[one], present[one], values[one], SIZE)
        for name in ("sources", "targets", "flips", "windows"):
            np.testing.assert_array_equal(getattr(alone, name)[0], getattr(together, name)[row])
        np.testing.assert_array_equal(geometry.move_boxes(boxes[one], present[one], alone)[0][0], moved[row])


def uniform(values: np.ndarray, low: float, high: float) -> bool:
    """Whether the largest distance of the distribution function is what chance gives (Kolmogorov, 1 in 10,000)."""
    shares = np.sort((values - low) / (high - low))
    steps = np.arange(1, len(shares) + 1) / len(shares)
    return max(np.abs(steps - shares).max(), np.abs(steps - 1 / len(shares) - shares).max()) < 2.23 / len(shares) ** 0.5


def test_distribution_of_zoom_out_and_flip():
    count = 20000
    sizes = np.full((count, 2), 1000)
    values = draws(6, 0, np.arange(count), geometry.DRAWS)
    boxes, present = np.zeros((count, 1, 4)), np.zeros((count, 1), bool)  # no object: no crop
    cut = geometry.cuts(sizes, boxes, present, values, SIZE)
    assert cut.flips.mean() == pytest.approx(0.5, abs=0.015)
    zoomed = cut.windows[:, 2] > 1000
    assert zoomed.mean() == pytest.approx(0.5, abs=0.015)
    window = cut.windows[zoomed]
    ratio = window[:, 2] / 1000
    assert (window[:, 2] == window[:, 3]).all() and uniform(ratio, 1, 4)
    wide = window[window[:, 2] > 1200]  # enough pixels to be called continuous
    place = -wide[:, :2] / (wide[:, 2:] - 1000)
    assert uniform(place[:, 0], 0, 1) and uniform(place[:, 1], 0, 1)
    assert abs(np.corrcoef(place.T)[0, 1]) < 0.05
    assert abs(np.corrcoef(zoomed, cut.flips)[0, 1]) < 0.03


def test_distribution_of_crops():
    """One object that fills the picture: a crop's IoU with it is its own area, so thresholds and sides are seen."""
    count = 14000
    sizes = np.full((count, 2), 1000)
    boxes = np.tile(np.array([[[0.0, 0, 1000, 1000]]]), (count, 1, 1))
    values = draws(7, 0, np.arange(count), geometry.DRAWS)
    cut = geometry.cuts(sizes, boxes, np.ones((count, 1), bool), values, SIZE, "crop")
    sides = cut.windows[:, 2:] / 1000
    area = sides.prod(1)
    assert sides.min() >= 0.3 and (sides[:, 0] / sides[:, 1]).max() <= 2.01
    option = np.floor(values[:, 4] * 7).astype(int)
    np.testing.assert_allclose(np.bincount(option) / count, 1 / 7, atol=0.012)
    assert (area[option == 0] == 1).all()
    cropped = area < 1
    for number, least in enumerate(geometry.MIN_OVERLAPS[1:], 1):
        assert area[cropped & (option == number)].min() >= least - 0.002
        if least >= 0.7:  # sides alone decide then: the share of (0.3 to 1)^2 where their product is at least `least`
            once = (1 - least + least * np.log(least)) / 0.7**2
            assert cropped[option == number].mean() == pytest.approx(1 - (1 - once) ** 50, abs=0.035)
    # With no threshold but "the centre is inside", sides are uniform up to the limits of shape: their mean says so.
    tries, shaped = geometry._tries(np.array([[0, 0, 1000, 1000]]), draws(8, 0, 0, 4 * 20000).reshape(1, 20000, 4))
    free = tries[0, :, 2] / 1000
    assert uniform(free, 0.3, 1) and shaped.mean() == pytest.approx(1 - 2 * (0.4**2 / 2 / 2) / 0.7**2, abs=0.02)
    left = tries[0, :, 0] / np.maximum(1, 1000 - tries[0, :, 2])
    assert uniform(left[tries[0, :, 2] < 800], 0, 1)


def test_flip_and_clip_o11():
    """Corners (0.1, 0.2, 0.4, 0.9) flip to (0.6, 0.2, 0.9, 0.9); 1.0016 becomes 1; flipping twice changes nothing."""
    box = np.array([[[0.1, 0.2, 0.4, 0.9], [0.92, 0.38, 1.0016, 0.58]]]) * 640
    present = np.ones((1, 2), bool)
    whole = geometry.whole(np.array([[640, 640]]), SIZE)
    flipped = geometry.Cuts(SIZE, whole.sources, whole.targets, np.array([True]), whole.windows)
    straight, _ = geometry.move_boxes(box, present, whole)
    assert straight[0, 1, 2] == 1.0
    once, _ = geometry.move_boxes(box, present, flipped)
    np.testing.assert_allclose(once[0, 0], [0.6, 0.2, 0.9, 0.9], atol=1e-7)
    twice, _ = geometry.move_boxes(once.astype(np.float64) * 640, present, flipped)
    np.testing.assert_allclose(twice, straight, atol=1e-7)
    assert once.dtype == np.float32


def test_boxes_are_kept_by_their_centre_and_clipped():
    size = np.array([[100, 100]])
    cut = geometry.Cuts(SIZE, np.array([[20, 20, 50, 50]]), np.array([[0, 0, SIZE, SIZE]]), np.zeros(1, bool), size)
    boxes = np.array([[[0, 0, 30, 30], [0, 0, 50, 50], [60, 60, 100, 100], [30, 30, 30, 40], [55, 20, 80, 90]]], float)
    moved, kept = geometry.move_boxes(boxes, np.ones((1, 5), bool), cut)
    assert kept.tolist() == [[False, True, False, False, True]]  # centres 15, 25, 80; empty; 67.5
    np.testing.assert_allclose(moved[0], [[0] * 4, [0, 0, 0.6, 0.6], [0] * 4, [0] * 4, [0.7, 0, 1, 1]], atol=1e-7)


@pytest.mark.parametrize("size", [(1, 1), (1, 4000), (3000, 2), (20000, 30)])
@pytest.mark.parametrize("augmentation", geometry.AUGMENTATIONS)
def test_extreme_pictures(size, augmentation):
    count = 40
    sizes = np.tile(np.array([size]), (count, 1))
    boxes = np.tile(np.array([[[0, 0, *size]]], np.float64), (count, 1, 1))
    present = np.arange(count)[:, None] % 2 == 0
    values = draws(9, 0, np.arange(count), geometry.DRAWS)
    cut = geometry.cuts(sizes, boxes, present, values, SIZE, augmentation)
    moved, kept = geometry.move_boxes(boxes, present, cut)
    assert np.isfinite(moved).all() and moved.min() >= 0 and moved.max() <= 1
    assert not (kept & ~present).any() and kept.sum() >= 0.9 * present.sum()
    assert pictures.render(Image.new("RGB", size, GREEN), cut, 0).shape == (SIZE, SIZE, 3)


def test_unknown_augmentation():
    with pytest.raises(ValueError, match="augmentation 'mosaic' is none of none, flip, crop, ssd"):
        geometry.cuts(np.ones((1, 2)), np.zeros((1, 1, 4)), np.zeros((1, 1), bool), np.zeros((1, 206)), 300, "mosaic")
