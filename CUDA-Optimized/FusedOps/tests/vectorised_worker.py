"""Compile kernels for a GPU that need not be there, and print the widths of their accesses (see test_vectorised.py)."""

from __future__ import annotations

import json
import re
from typing import Any

import triton
import triton.language as tl
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from fusedops.ops import multi_tensor_kernels as lists
from fusedops.optim import kernels, layerwise_kernels

POINTERS = {
    "addresses": "*i64", "items": "*i64", "first_item": "*i32", "ticket": "*i32", "schedule": "*i32",
    "counters": "*i32",
}  # fmt: skip
INTEGERS = ("num_items", "num_tensors", "num_entries", "count", "seed")
FLOATS = (
    "a", "b", "factor", "max_norm", "clip_epsilon", "sign", "lr", "weight_decay", "beta1", "rest1", "log_beta1",
    "beta2", "rest2", "log_beta2", "epsilon", "momentum", "dampening", "lr_decay", "trust",
)  # fmt: skip
SWITCHES = (
    "SCALED", "FOUND", "NORMED", "CHECKED", "CLIPPED", "LR_LOADED", "FACTOR_LOADED", "DECOUPLED", "CORRECTED",
    "MOMENTUM", "ADAPTED", "PER_ITEM", "CLIP",
)  # fmt: skip
SIZES = {"SIZE": 1024, "TENSORS": 1024, "PARTIALS": 256, "LIST": 0}
FLOAT32, BFLOAT16, INT16 = tl.float32, tl.bfloat16, tl.int16


def accesses(kernel: Any, **constants: Any) -> dict[str, int]:
    """Loads and stores of a kernel by kind and width, compiled for compute capability 9.0 with every switch on."""
    names = kernel.arg_names
    switches = {name: name in SWITCHES for name in names if name.isupper() and name not in SIZES}
    constants = {name: SIZES[name] for name in names if name in SIZES} | switches | constants
    signature = {}
    for name in names:
        kinds = ("constexpr", name in constants), ("i32", name in INTEGERS), ("fp32", name in FLOATS)
        signature[name] = next((kind for kind, true in kinds if true), POINTERS.get(name, "*fp32"))
    if constants.get("LR_LOADED"):
        signature["lr"] = "*fp32"
    if constants.get("FACTOR_LOADED"):
        signature["factor"] = "*fp32"
    positions = {(names.index(name),): value for name, value in constants.items()}
    source = ASTSource(fn=kernel, signature=signature, constexprs=positions)
    code = triton.compile(source, target=GPUTarget("cuda", 90, 32), options={"num_warps": 4}).asm["ptx"]
    found: dict[str, int] = {}
    for access in re.findall(r"(?:ld|st)\.global[.\w:]*", code):
        found[access] = found.get(access, 0) + 1
    return found


def main() -> None:
    f, b, i = FLOAT32, BFLOAT16, INT16
    print(json.dumps({
        "scale": accesses(lists.scale_kernel, X=b, Y=f),
        "axpby": accesses(lists.axpby_kernel, X=f, Y=f, OUT=f, CHECK=-1),
        "squares": accesses(lists.squares_kernel, X=b),
        "clip": accesses(lists.clip_kernel, X=b),
        "adam": accesses(kernels.adam_kernel, G=f, P=f, M=f, V=f, W=f, MASTER=0),
        "adam remainder": accesses(kernels.adam_kernel, G=b, P=i, M=f, V=f, W=i, MASTER=2),
        "sgd": accesses(kernels.sgd_kernel, G=f, P=f, M=f, W=f, MASTER=0),
        "adagrad": accesses(kernels.adagrad_kernel, G=f, P=f, M=f, W=f, MASTER=0),
        "lamb": accesses(layerwise_kernels.lamb_kernel, G=f, P=f, M=f, V=f, W=f, MASTER=0),
        "novograd": accesses(layerwise_kernels.novograd_kernel, G=f, P=f, M=f, W=f, MASTER=0),
        "larc": accesses(layerwise_kernels.larc_kernel, G=f, P=f),
    }))  # fmt: skip


if __name__ == "__main__":
    main()
