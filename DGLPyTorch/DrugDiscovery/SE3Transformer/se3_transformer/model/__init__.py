"""The model, importable as in NVIDIA's package."""

from .fiber import Fiber
from .transformer import SE3Transformer, SE3TransformerPooled, set_kernels

__all__ = ["Fiber", "SE3Transformer", "SE3TransformerPooled", "set_kernels"]
