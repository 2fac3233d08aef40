"""Apex's deeper module paths. Each of its packages consists of modules whose names the package repeats; here the
package is the module, under both names.
"""

from __future__ import annotations

import sys

PATHS = {
    "apex.amp": ("amp", "frontend", "handle"),
    "apex.contrib.clip_grad": ("clip_grad",),
    "apex.contrib.focal_loss": ("focal_loss",),
    "apex.contrib.group_norm": ("group_norm",),
    "apex.contrib.index_mul_2d": ("index_mul_2d",),
    "apex.contrib.layer_norm": ("layer_norm",),
    "apex.contrib.sparsity": ("asp", "sparse_masklib", "permutation_lib"),
    "apex.contrib.transducer": ("transducer",),
    "apex.contrib.xentropy": ("softmax_xentropy",),
    "apex.fused_dense": ("fused_dense",),
    "apex.mlp": ("mlp",),
    "apex.multi_tensor_apply": ("multi_tensor_apply",),
    "apex.optimizers": (
        "fused_adagrad", "fused_adam", "fused_lamb", "fused_mixed_precision_lamb", "fused_novograd", "fused_sgd",
    ),
    "apex.parallel": ("LARC", "distributed", "optimized_sync_batchnorm", "sync_batchnorm"),
}  # fmt: skip


def give_submodules(package: str) -> None:
    """Make a package importable under the paths of its modules in Apex, too. Where a module has the name of what is in
    it (``apex.parallel.LARC``), the package's attribute stays that, as in Apex.
    """
    module = sys.modules[package]
    for name in PATHS[package]:
        sys.modules[f"{package}.{name}"] = module
        if not hasattr(module, name):
            setattr(module, name, module)
