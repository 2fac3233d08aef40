"""The names of NVIDIA Apex on `fusedops`, with Apex's signatures, for code that imports ``apex``.

This is not Apex: see docs/apex.md for what is mapped, what is left out, and where behaviour differs on purpose.
"""

from . import normalization, optimizers

__version__ = "0.1+fusedops"
__all__ = ["normalization", "optimizers"]
