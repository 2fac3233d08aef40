"""Box arithmetic against double precision, and suppression of duplicates against the plain quadratic visit in order."""

from __future__ import annotations

import time

import numpy as np
import onnxruntime
import pytest
import torch

from dlx import boxes as B
from dlx.export import to_onnx


def random_corners(*shape: int, seed: int = 0, grid: int | None = None) -> torch.Tensor:
    """Corners in 0..1; with ``grid`` on multiples of 1/grid, so that products are exact in float32."""
    generator = torch.Generator().manual_seed(seed)
    points = torch.rand(*shape, 2, 2, generator=generator).sort(-2).values
    if grid:
        points = (points * grid).round() / grid
    return points.flatten(-2)


def plain_iou(a: np.ndarray, b: np.ndarray) -> float:
    """float64, one pair."""
    a, b = a.astype(np.float64), b.astype(np.float64)
    width = min(a[2], b[2]) - max(a[0], b[0])
    height = min(a[3], b[3]) - max(a[1], b[1])
    both = max(width, 0.0) * max(height, 0.0)
    union = (a[2] - a[0]) * (a[3] - a[1]) + (b[2] - b[0]) * (b[3] - b[1]) - both
    return both / union if union > 0 else 0.0


def plain_nms(boxes, scores, labels, threshold: float, limit: int) -> list[int]:
    """Indices of the survivors of one image, in order: the definition, in float64."""
    order = sorted((i for i in range(len(scores)) if scores[i] > 0), key=lambda i: -scores[i])
    kept: list[int] = []
    for i in order:
        if all(labels[i] != labels[j] or plain_iou(boxes[j], boxes[i]) <= threshold for j in kept):
            kept.append(i)
    return kept[:limit]


# ---------------------------------------------------------------------------------------------- formats


@pytest.mark.parametrize("source", B.FORMATS)
@pytest.mark.parametrize("target", B.FORMATS)
def test_every_format_and_back(source, target):
    boxes = B.convert(random_corners(50).double(), "corners", source)
    there = B.convert(boxes, source, target)
    torch.testing.assert_close(B.convert(there, target, source), boxes, atol=1e-12, rtol=0)
    direct = B.convert(B.convert(boxes, source, "corners"), "corners", target)
    torch.testing.assert_close(there, direct, atol=1e-12, rtol=0)


def test_formats_mean_what_they_say():
    corners = torch.tensor([0.1, 0.2, 0.4, 0.9])
    torch.testing.assert_close(B.to_centres(corners), torch.tensor([0.25, 0.55, 0.3, 0.7]))
    torch.testing.assert_close(B.convert(corners, "corners", "sized"), torch.tensor([0.1, 0.2, 0.3, 0.7]))
    with pytest.raises(ValueError, match="'yolo' is none of corners"):
        B.convert(corners, "yolo", "corners")


def test_flip_and_clip():
    """User case O11."""
    box = torch.tensor([0.1, 0.2, 0.4, 0.9])
    expected = torch.tensor([0.6, 0.2, 0.9, 0.9])
    torch.testing.assert_close(B.flip(box), expected)
    for form in B.FORMATS:
        flipped = B.flip(B.convert(box, "corners", form), form=form)
        torch.testing.assert_close(B.convert(flipped, form, "corners"), expected)
    many = random_corners(100)
    torch.testing.assert_close(B.flip(B.flip(many)), many, atol=1e-7, rtol=0)
    assert B.clip(torch.tensor([0.92, 0.38, 1.0016, 0.58]))[2] == 1.0
    assert B.clip(torch.tensor([-5.0, -1.0, 700.0, 500.0]), 640, 480).tolist() == [0, 0, 640, 480]


def test_iou_is_that_of_double_precision():
    first, second = random_corners(2, 7), random_corners(2, 9, seed=1)
    found = B.iou(first, second)
    assert found.shape == (2, 7, 9)
    for n, i, j in np.ndindex(2, 7, 9):
        assert found[n, i, j].item() == pytest.approx(plain_iou(first[n, i].numpy(), second[n, j].numpy()), abs=2e-6)
    empty = torch.tensor([[0.5, 0.5, 0.5, 0.5], [0.9, 0.9, 0.1, 0.1]])
    assert torch.equal(B.iou(empty, empty), torch.zeros(2, 2))


def test_encoding_by_hand_and_back():
    anchor = torch.tensor([0.5, 0.5, 0.2, 0.4])
    box = torch.tensor([0.5, 0.3, 0.7, 0.7])  # centre (0.6, 0.5), size (0.2, 0.4)
    torch.testing.assert_close(B.encode(box, anchor), torch.tensor([5.0, 0.0, 0.0, 0.0]), atol=1e-5, rtol=0)
    wider = torch.tensor([0.5 - 0.1 * np.e, 0.3, 0.5 + 0.1 * np.e, 0.7], dtype=torch.float32)
    torch.testing.assert_close(B.encode(wider, anchor), torch.tensor([0.0, 0.0, 5.0, 0.0]), atol=1e-5, rtol=0)
    boxes, anchors = random_corners(200), B.to_centres(random_corners(200, seed=1)).clamp(min=0.01)
    torch.testing.assert_close(B.decode(B.encode(boxes, anchors), anchors), boxes, atol=1e-5, rtol=0)


# ---------------------------------------------------------------------------------------------- suppression


def plain_keep(suppresses: torch.Tensor, valid: torch.Tensor) -> torch.Tensor:
    keep = valid.clone()
    for n in range(keep.shape[0]):
        for i in range(keep.shape[1]):
            if keep[n, i]:
                for j in range(i + 1, keep.shape[1]):
                    if suppresses[n, i, j]:
                        keep[n, j] = False
    return keep


@pytest.mark.parametrize("density", [0.0, 0.02, 0.1, 0.5, 1.0])
@pytest.mark.parametrize("count", [1, 2, 31, 32, 33, 90])
def test_greedy_keep_is_the_visit_in_order(density, count):
    generator = torch.Generator().manual_seed(count)
    suppresses = torch.rand(3, count, count, generator=generator) < density
    valid = torch.rand(3, count, generator=generator) < 0.9
    expected = plain_keep(suppresses, valid)
    assert torch.equal(B.greedy_keep(suppresses, valid), expected)
    index = torch.arange(count)
    assert torch.equal(B._keep_unrolled(suppresses & (index[:, None] < index), valid), expected)


def test_the_longest_chain():
    """Each box removes only its successor: every second one stays, and the last depends on the first."""
    chain = torch.diag(torch.ones(99, dtype=torch.bool), 1)[None]
    valid = torch.ones(1, 100, dtype=torch.bool)
    expected = torch.arange(100)[None] % 2 == 0
    assert torch.equal(B.greedy_keep(chain, valid), expected)
    assert torch.equal(B._keep_unrolled(chain, valid), expected)
    valid[0, 0] = False
    assert torch.equal(B.greedy_keep(chain, valid)[0, 1:], ~expected[0, 1:])


def candidates(n: int, k: int, classes: int = 3, seed: int = 0) -> tuple[torch.Tensor, ...]:
    """Overlapping boxes on a grid of 1/64, where float32 is exact; with equal scores and zeros among them."""
    generator = torch.Generator().manual_seed(seed)
    centre = torch.randint(0, 64, (n, k, 2), generator=generator)
    size = torch.randint(4, 24, (n, k, 2), generator=generator)
    boxes = torch.cat([centre, centre + size], 2).float() / 64
    scores = torch.randint(0, 40, (n, k), generator=generator).float() / 40
    return boxes, scores, torch.randint(1, classes + 1, (n, k), generator=generator)


def check(found: B.Kept, boxes, scores, labels, threshold: float, limit: int) -> int:
    total = 0
    for n in range(len(boxes)):
        kept = plain_nms(boxes[n].numpy(), scores[n].tolist(), labels[n].tolist(), threshold, limit)
        count = int(found.count[n])
        assert count == len(kept)
        assert torch.equal(found.boxes[n, :count], boxes[n, kept])
        assert torch.equal(found.scores[n, :count], scores[n, kept])
        assert torch.equal(found.labels[n, :count], labels[n, kept])
        assert not found.boxes[n, count:].any() and not found.scores[n, count:].any()
        assert not found.labels[n, count:].any()
        total += count
    return total


@pytest.mark.parametrize("threshold", [0.0, 0.3, 0.5, 0.75])
@pytest.mark.parametrize(("count", "limit"), [(1, 5), (40, 7), (150, 200)])
def test_nms_is_exact(threshold, count, limit):
    given = candidates(4, count)
    found = B.batched_nms(*given, iou_threshold=threshold, max_output=limit)
    assert found.boxes.shape == (4, limit, 4) and found.count.dtype == torch.int64
    assert check(found, *given, threshold, limit) > 0


def test_a_batch_is_its_images_one_by_one():
    given = candidates(5, 60, seed=3)
    together = B.batched_nms(*given, max_output=30)
    for n in range(7):
        alone = B.batched_nms(*(tensor[n : n + 1] for tensor in given), max_output=30)
        for ours, theirs in zip(together, alone, strict=True):
            assert torch.equal(ours[n : n + 1], theirs)


def test_classes_do_not_meet():
    box = torch.tensor([[[0.1, 0.1, 0.5, 0.5]] * 3])
    found = B.batched_nms(box, torch.tensor([[0.5, 0.9, 0.7]]), torch.tensor([[1, 2, 1]]), max_output=3)
    assert found.count.tolist() == [2] and found.labels.tolist() == [[2, 1, 0]]
    torch.testing.assert_close(found.scores, torch.tensor([[0.9, 0.7, 0.0]]))


def test_no_box_and_no_number():
    boxes, scores, labels = candidates(2, 10)
    found = B.batched_nms(boxes, torch.zeros_like(scores), labels, max_output=4)
    assert found.count.tolist() == [0, 0] and not found.boxes.any()
    found = B.batched_nms(boxes, torch.full_like(scores, torch.nan), labels, max_output=4)
    assert found.count.tolist() == [0, 0]
    with pytest.raises(ValueError, match=r"got \[2, 10, 4\], \[2, 9\], \[2, 10\]"):
        B.batched_nms(boxes, scores[:, 1:], labels)


class Suppression(torch.nn.Module):
    def forward(self, boxes, scores, labels):
        return tuple(B.batched_nms(boxes, scores, labels, iou_threshold=0.4, max_output=50))


def test_exported_suppression_is_exact(tmp_path):
    path = to_onnx(
        Suppression(),
        candidates(2, 80),
        tmp_path / "nms.onnx",
        input_names=["b", "s", "l"],
        output_names=["boxes", "scores", "labels", "count"],
    )
    session = onnxruntime.InferenceSession(str(path), providers=["CPUExecutionProvider"])
    for n in (1, 3, 7):
        given = candidates(n, 80, seed=n)
        values = session.run(None, {name: tensor.numpy() for name, tensor in zip("bsl", given, strict=True)})
        assert check(B.Kept(*map(torch.from_numpy, values)), *given, 0.4, 50) > 10 * n


def test_it_compiles_without_a_break():
    given = candidates(2, 40)
    compiled = torch.compile(Suppression(), backend="eager", fullgraph=True)
    assert check(B.Kept(*compiled(*given)), *given, 0.4, 50) > 0


def test_time_grows_linearly_with_images():
    """Four times the images may take at most eight times as long (the square would be sixteen)."""
    few, many = candidates(8, 400, 20), candidates(32, 400, 20)

    def seconds(given) -> float:
        best = float("inf")
        for _ in range(7):
            start = time.perf_counter()
            B.batched_nms(*given)
            best = min(best, time.perf_counter() - start)
        return best

    seconds(few)
    assert seconds(many) <= 8 * seconds(few)


@pytest.mark.gpu
def test_on_a_gpu_and_in_a_cuda_graph():
    if not torch.cuda.is_available():
        pytest.skip("needs a CUDA device")
    given = candidates(8, 300)
    static = [tensor.cuda() for tensor in given]
    assert check(B.Kept(*(t.cpu() for t in B.batched_nms(*static))), *given, 0.5, 200) > 0
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        found = B.batched_nms(*static)
    again = candidates(8, 300, seed=9)
    for own, new in zip(static, again, strict=True):
        own.copy_(new)
    graph.replay()
    torch.cuda.synchronize()
    assert check(B.Kept(*(tensor.cpu() for tensor in found)), *again, 0.5, 200) > 0
