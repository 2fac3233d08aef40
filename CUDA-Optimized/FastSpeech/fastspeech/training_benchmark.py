"""Training steps on one made-up batch, for `benchmark`: ours, and the same model trained plainly."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch

from dlx import optim
from dlx.precision import LossScaler

from . import registry
from .step import TrainState, capture, train_step

if TYPE_CHECKING:
    from .benchmark import BenchmarkConfig
