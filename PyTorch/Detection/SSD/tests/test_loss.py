"""Matching and loss against brute force in double precision, and the batches that training meets (case O10)."""

from __future__ import annotations

import math

import pytest
import torch

from dlx.boxes import to_corners
from ssd.anchors import default_boxes
from ssd.loss import MultiboxLoss, multibox_loss
from ssd.matching import Targets, assign, match

ANCHORS = default_boxes(300)


def small_anchors(seed: int = 0, count: int = 60) -> torch.Tensor:
    """Centres of ``count`` boxes on a grid of 1/32, where overlaps are exact and ties are common."""
    generator = torch.Generator().manual_seed(seed)
    corner = torch.randint(0, 20, (count, 2), generator=generator)
    size = torch.randint(2, 12, (count, 2), generator=generator) * 2
    return torch.cat([corner + size / 2, size], 1).float() / 64


def objects(n: int, m: int, seed: int = 0, grid: int = 64) -> tuple[torch.Tensor, torch.Tensor]:
    """n images with 0 to m objects, padded as a loader does."""
    generator = torch.Generator().manual_seed(seed)
    corner = torch.randint(0, grid // 2, (n, m, 2), generator=generator)
    size = torch.randint(3, grid // 2, (n, m, 2), generator=generator)
    labels = torch.randint(1, 5, (n, m), generator=generator)
    for index in range(n):
        labels[index, torch.randint(0, m + 1, (1,), generator=generator) :] = 0
    boxes = torch.cat([corner, corner + size], 2).float() / grid
    return boxes * (labels > 0)[:, :, None], labels


def plain_overlap(a, b) -> float:
    width, height = min(a[2], b[2]) - max(a[0], b[0]), min(a[3], b[3]) - max(a[1], b[1])
    both = max(width, 0.0) * max(height, 0.0)
    return both / ((a[2] - a[0]) * (a[3] - a[1]) + (b[2] - b[0]) * (b[3] - b[1]) - both)


def plain_assign(boxes, labels, anchors, threshold: float = 0.5) -> list[int]:
    """One image, in float64: the definition with loops."""
    boxes, anchors = boxes.double().tolist(), anchors.double().tolist()
    rows = [row for row in range(len(boxes)) if labels[row] > 0]
    table = {row: [plain_overlap(boxes[row], anchor) for anchor in anchors] for row in rows}
    result = []
    for index in range(len(anchors)):
        best = max(rows, key=lambda row: (table[row][index], -row), default=None)
        result.append(best if best is not None and table[best][index] > threshold else -1)
    claims: dict[int, list[int]] = {}
    for row in rows:
        claims.setdefault(table[row].index(max(table[row])), []).append(row)
    for index, wanting in claims.items():
        result[index] = max(wanting, key=lambda row: (table[row][index], -row))
    return result


def plain_loss(offsets, logits, boxes, labels, anchors) -> tuple[float, float]:
    """Box and category loss of a batch in float64 with loops; ``anchors`` are centres."""
    totals = [0.0, 0.0]
    for n in range(len(boxes)):
        rows = plain_assign(boxes[n], labels[n].tolist(), to_corners(anchors))
        positive = [index for index, row in enumerate(rows) if row >= 0]
        if not positive:
            continue
        box = category = 0.0
        negatives = []
        for index, row in enumerate(rows):
            scores = logits[n, index].double()
            target = int(labels[n, row]) if row >= 0 else 0
            entropy = float(torch.logsumexp(scores, 0) - scores[target])
            if row < 0:
                negatives.append(entropy)
                continue
            category += entropy
            left, top, right, bottom = boxes[n, row].double().tolist()
            cx, cy, w, h = anchors[index].double().tolist()
            wanted = [((left + right) / 2 - cx) / w / 0.1, ((top + bottom) / 2 - cy) / h / 0.1]
            wanted += [math.log((right - left) / w) / 0.2, math.log((bottom - top) / h) / 0.2]
            for ours, theirs in zip(offsets[n, index].double().tolist(), wanted, strict=True):
                distance = abs(ours - theirs)
                box += 0.5 * distance**2 if distance < 1 else distance - 0.5
        category += sum(sorted(negatives, reverse=True)[: 3 * len(positive)])
        totals[0] += box / len(positive) / len(boxes)
        totals[1] += category / len(positive) / len(boxes)
    return totals[0], totals[1]


@pytest.mark.parametrize("seed", range(8))
def test_assignment_is_that_of_brute_force(seed):
    anchors = small_anchors(seed)
    boxes, labels = objects(6, 5, seed)
    found = assign(boxes, labels, to_corners(anchors))
    for n in range(6):
        assert found[n].tolist() == plain_assign(boxes[n], labels[n].tolist(), to_corners(anchors))
    assert (found >= 0).any()


def test_an_overlap_of_half_is_not_enough():
    """One default box is the object, two more overlap it by exactly a half and by a little more."""
    anchors = torch.tensor([[0.0, 0.0, 0.5, 1.0], [0.0, 0.0, 0.5, 0.5], [0.0, 0.0, 0.5, 0.53125]])
    assert assign(anchors[:1][None], torch.tensor([[1]]), anchors).tolist() == [[0, -1, 0]]


def test_every_object_has_a_default_box_of_its_own():
    """Also the smallest: no default box overlaps it by half."""
    boxes = torch.tensor([[[0.500, 0.500, 0.503, 0.504], [0.1, 0.1, 0.9, 0.9], [0.2, 0.7, 0.23, 0.78]]])
    rows = assign(boxes, torch.tensor([[3, 1, 2]]), to_corners(ANCHORS))
    assert set(rows.unique().tolist()) == {-1, 0, 1, 2}
    assert (rows == 0).sum() == 1


def test_equal_objects_share_nothing_by_chance():
    """Two equal boxes want the same default boxes: the first gets them."""
    boxes = torch.tensor([[[0.2, 0.2, 0.6, 0.6]] * 2])
    rows = assign(boxes, torch.tensor([[2, 1]]), to_corners(ANCHORS))
    assert set(rows.unique().tolist()) == {-1, 0}


def test_targets_decode_to_the_objects():
    boxes, labels = objects(3, 4, seed=2)
    targets = match(boxes, labels, ANCHORS)
    rows = assign(boxes, labels, to_corners(ANCHORS))
    assert torch.isfinite(targets.offsets).all()
    for n in range(3):
        taken = rows[n] >= 0
        assert torch.equal(targets.labels[n] > 0, taken)
        assert torch.equal(targets.labels[n][taken], labels[n][rows[n][taken]])
        centre, size = ANCHORS[taken, :2], ANCHORS[taken, 2:]
        offsets = targets.offsets[n][taken]
        found_centre = centre + offsets[:, :2] * 0.1 * size
        found_size = size * (offsets[:, 2:] * 0.2).exp()
        wanted = boxes[n][rows[n][taken]]
        torch.testing.assert_close(found_centre - found_size / 2, wanted[:, :2], atol=1e-5, rtol=0)
        torch.testing.assert_close(found_centre + found_size / 2, wanted[:, 2:], atol=1e-5, rtol=0)


@pytest.mark.parametrize("seed", range(4))
def test_loss_is_that_of_brute_force(seed):
    anchors = small_anchors(seed)
    boxes, labels = objects(5, 4, seed)
    generator = torch.Generator().manual_seed(seed)
    offsets = torch.randn(5, 60, 4, generator=generator) * 2
    logits = torch.randn(5, 60, 5, generator=generator) * 3
    found = MultiboxLoss(anchors)((offsets, logits), boxes, labels)
    box, category = plain_loss(offsets, logits, boxes, labels, anchors)
    assert found.box.item() == pytest.approx(box, rel=1e-5)
    assert found.category.item() == pytest.approx(category, rel=1e-5)
    assert found.total.item() == pytest.approx(box + category, rel=1e-5)
    assert box > 0 and category > 0


def test_loss_on_the_real_default_boxes():
    boxes, labels = objects(2, 3, seed=5)
    labels[0, 0], boxes[0, 0] = 2, torch.tensor([0.1, 0.2, 0.4, 0.9])
    generator = torch.Generator().manual_seed(0)
    offsets, logits = torch.randn(2, 8732, 4, generator=generator), torch.randn(2, 8732, 5, generator=generator)
    found = MultiboxLoss(ANCHORS)((offsets, logits), boxes, labels)
    box, category = plain_loss(offsets, logits, boxes, labels, ANCHORS)
    assert found.box.item() == pytest.approx(box, rel=1e-4)
    assert found.category.item() == pytest.approx(category, rel=1e-4)


def test_one_three_and_no_objects():
    """User case O10."""
    boxes = torch.zeros(3, 3, 4)
    boxes[0, 0] = boxes[1, 0] = torch.tensor([0.1, 0.1, 0.4, 0.5])
    boxes[1, 1], boxes[1, 2] = torch.tensor([0.5, 0.5, 0.9, 0.8]), torch.tensor([0.0, 0.6, 0.3, 1.0])
    labels = torch.tensor([[1, 0, 0], [2, 1, 4], [0, 0, 0]])
    offsets = torch.randn(3, 8732, 4, requires_grad=True)
    logits = torch.randn(3, 8732, 5, requires_grad=True)
    loss_of = MultiboxLoss(ANCHORS)
    loss = loss_of((offsets, logits), boxes, labels)
    loss.total.backward()
    assert torch.isfinite(loss.total) and torch.isfinite(offsets.grad).all() and torch.isfinite(logits.grad).all()
    assert offsets.grad[0].any() and offsets.grad[1].any()
    assert not offsets.grad[2].any() and not logits.grad[2].any()
    two = loss_of((offsets[:2], logits[:2]), boxes[:2], labels[:2])
    assert loss.total.item() == pytest.approx(two.total.item() * 2 / 3, rel=1e-5)  # the empty image counts as 0


def test_a_batch_without_objects():
    offsets, logits = torch.randn(2, 8732, 4, requires_grad=True), torch.randn(2, 8732, 3, requires_grad=True)
    loss = MultiboxLoss(ANCHORS)((offsets, logits), torch.zeros(2, 1, 4), torch.zeros(2, 1, dtype=torch.int64))
    loss.total.backward()
    assert loss.total.item() == 0.0
    assert torch.equal(offsets.grad, torch.zeros_like(offsets)) and torch.equal(logits.grad, torch.zeros_like(logits))


def test_gradient_reaches_matched_boxes_and_hard_negatives_only():
    labels = torch.zeros(1, 50, dtype=torch.int64)
    labels[0, :4] = torch.tensor([1, 2, 1, 2])
    logits = torch.zeros(1, 50, 3)
    logits[0, 4:, 1] = torch.arange(46) / 10  # ever more convinced of an object that is not there
    logits.requires_grad_()
    offsets = torch.ones(1, 50, 4, requires_grad=True)
    multibox_loss(offsets, logits, Targets(torch.zeros(1, 50, 4), labels)).total.backward()
    touched = logits.grad[0].abs().sum(1) > 0
    assert touched.nonzero().flatten().tolist() == [0, 1, 2, 3, *range(38, 50)]
    assert (offsets.grad[0].abs().sum(1) > 0).nonzero().flatten().tolist() == [0, 1, 2, 3]


def test_equal_scores_do_not_add_negatives():
    """A fresh model gives all boxes the same scores: still only three negatives count for each match."""
    labels = torch.zeros(1, 100, dtype=torch.int64)
    labels[0, 7] = 1
    zeros = torch.zeros(1, 100, 4)
    loss = multibox_loss(zeros, torch.zeros(1, 100, 3), Targets(zeros, labels))
    assert loss.category.item() == pytest.approx(4 * math.log(3), rel=1e-6)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_low_precision_outputs_are_compared_in_float32(dtype):
    boxes, labels = objects(2, 3, seed=1)
    offsets, logits = torch.randn(2, 8732, 4).to(dtype), (20 * torch.randn(2, 8732, 5)).to(dtype)
    loss_of = MultiboxLoss(ANCHORS)
    expected = loss_of((offsets.float(), logits.float()), boxes, labels).total
    with torch.autocast("cpu", dtype=dtype):
        found = loss_of((offsets, logits), boxes, labels).total
    assert found.dtype == torch.float32 and torch.equal(found, expected)


def test_it_compiles_without_a_break():
    boxes, labels = objects(2, 3, seed=1)
    outputs = torch.randn(2, 60, 4), torch.randn(2, 60, 5)
    loss_of = MultiboxLoss(small_anchors())
    compiled = torch.compile(loss_of, backend="eager", fullgraph=True)
    assert torch.equal(compiled(outputs, boxes, labels).total, loss_of(outputs, boxes, labels).total)


@pytest.mark.gpu
def test_on_a_gpu_and_in_a_cuda_graph():
    if not torch.cuda.is_available():
        pytest.skip("needs a CUDA device")
    batches = [objects(4, 6, seed) for seed in range(2)]
    offsets, logits = torch.randn(4, 8732, 4), torch.randn(4, 8732, 5)
    expected = [MultiboxLoss(ANCHORS)((offsets, logits), *batch).total.item() for batch in batches]
    loss_of = MultiboxLoss(ANCHORS).cuda()
    outputs = offsets.cuda(), logits.cuda()
    static = [tensor.cuda() for tensor in batches[0]]
    loss_of(outputs, *static)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        found = loss_of(outputs, *static).total
    for batch, value in zip(batches, expected, strict=True):
        for own, new in zip(static, batch, strict=True):
            own.copy_(new)
        graph.replay()
        assert found.item() == pytest.approx(value, rel=1e-4)
