"""Augmentation on whole batches does what Pillow does picture by picture."""

import numpy as np
import pytest
import torch
from PIL import Image

from convnets import augment, device_augment
from dlx.draws import draws


def pictures(height=40, width=56):
    """Noise, a gradient, flat, two-valued, low contrast, and a soft picture."""
    rng = np.random.default_rng(0)
    ramp = np.broadcast_to(np.linspace(0, 255, width)[None, :, None], (height, width, 3))
    soft = Image.fromarray(rng.integers(0, 256, (5, 7, 3), np.uint8)).resize((width, height), Image.Resampling.BICUBIC)
    shape = (height, width, 3)
    noise, dull = rng.integers(0, 256, shape), rng.integers(90, 140, shape)
    kinds = [noise, ramp, np.full(shape, 77), np.where(rng.random(shape) < 0.1, 3, 200), dull, np.asarray(soft)]
    return [Image.fromarray(np.ascontiguousarray(kind).astype(np.uint8)) for kind in kinds]


def batch_of(images):
    return torch.from_numpy(np.stack([np.asarray(image) for image in images])).permute(0, 3, 1, 2)


# These sample between pixels, in another precision.
BETWEEN = {"rotate", "shear_x"}


@pytest.mark.parametrize("name", sorted(augment.OPERATIONS))
@pytest.mark.parametrize("level", [0, 3, 5, 8, 9])
@pytest.mark.parametrize("sign", [1, -1])
def test_operations_equal_pillows(name, level, sign):
    images = pictures()
    expected = batch_of([augment.OPERATIONS[name](image, level / 9, sign) for image in images])
    shape = (len(images), 1, 1, 1)
    found = device_augment.OPERATIONS[name](
        batch_of(images), torch.full(shape, level / 9), torch.full(shape, float(sign))
    )
    assert found.dtype == torch.uint8 and found.shape == expected.shape
    difference = (found.int() - expected.int()).abs()
    if name in BETWEEN:
        # A pixel at the very rim may count as inside for one and outside for the other.
        assert (difference > 1).float().mean() < 0.005
    else:
        assert difference.max() <= 1 and (difference > 0).float().mean() < 0.01


def test_same_policies_as_one_by_one():
    images = [pictures()[index % 6] for index in range(200)]
    values = draws(3, 0, np.arange(200), augment.POLICY_DRAWS, augment.POLICY)
    batch = batch_of(images).contiguous(memory_format=torch.channels_last)
    before = batch.clone()
    found = device_augment.auto_augment(batch, values)
    assert torch.equal(batch, before) and found.is_contiguous(memory_format=torch.channels_last)
    expected = batch_of([augment.auto_augment(image, row) for image, row in zip(images, values, strict=True)])
    close = ((found.int() - expected.int()).abs() <= 2).float().mean((1, 2, 3))
    # After a first operation that differs by one level, a threshold of the second may turn it into a large difference.
    assert (close > 0.98).float().mean() > 0.9 and close.mean() > 0.97
    assert (found != batch).flatten(1).any(1).float().mean() > 0.5


def test_batch_of_n_equals_batches_of_one():
    values = draws(4, 0, np.arange(6), augment.POLICY_DRAWS, augment.POLICY)
    batch = batch_of(pictures())
    together = device_augment.auto_augment(batch, values)
    alone = [device_augment.auto_augment(batch[row : row + 1], values[row : row + 1]) for row in range(6)]
    assert torch.equal(together, torch.cat(alone))


def test_erase():
    values = draws(0, 0, np.arange(6), augment.ERASE_DRAWS, augment.ERASE)
    values[:3, 0] = 0
    batch = batch_of(pictures()).clamp(min=1)
    found = device_augment.erase(batch.clone(), values)
    for row, (left, top, width, height) in enumerate(augment.erase_boxes(56, 40, values)):
        expected = batch[row].clone()
        expected[:, top : top + height, left : left + width] = 0
        assert torch.equal(found[row], expected) and (width > 0 or row >= 3)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_gpu_equals_cpu():
    values = draws(3, 0, np.arange(120), augment.POLICY_DRAWS, augment.POLICY)
    batch = batch_of([pictures()[index % 6] for index in range(120)])
    ours, theirs = device_augment.auto_augment(batch, values), device_augment.auto_augment(batch.cuda(), values).cpu()
    assert ((ours.int() - theirs.int()).abs() <= 1).float().mean() > 0.99
