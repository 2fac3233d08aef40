"""Lets DGL 1.1.3 be imported beside a current setuptools, which no longer has the module that DGL looks into.

The model needs none of this: it takes a DGLGraph by its methods and never imports DGL. PyPI's DGL works on the CPU.
"""

from __future__ import annotations

import importlib
import os
import sys
import types


def prepare() -> None:
    """Call before the first ``import dgl``."""
    import packaging.version

    os.environ.setdefault("DGLBACKEND", "pytorch")
    try:
        importlib.import_module("setuptools.extern.packaging")
        return
    except ImportError:
        pass
    extern = types.ModuleType("setuptools.extern")
    extern.__path__ = []
    extern.packaging = packaging
    sys.modules.setdefault("setuptools.extern", extern)
    sys.modules.setdefault("setuptools.extern.packaging", packaging)
    sys.modules.setdefault("setuptools.extern.packaging.version", packaging.version)
