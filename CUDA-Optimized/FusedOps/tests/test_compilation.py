"""Every kernel compiles for a GPU of compute capability 9.0, which needs triton and its ptxas, but no GPU.

The interpreter runs kernels as Python and knows nothing of their types; the compiler does. Launches are replaced by
compilations, in a process of their own, since the interpreter is chosen when triton is imported.
"""

from __future__ import annotations

import importlib.util
import os
import subprocess
import sys

import pytest
import torch

TARGET = 90
B16 = torch.bfloat16


def leaf(*shape: int, dtype: torch.dtype = B16) -> torch.Tensor:
    return torch.randn(shape).to(dtype).requires_grad_()


def differentiate(outputs, inputs) -> None:
    outputs = [y for y in (outputs if isinstance(outputs, (tuple, list)) else [outputs]) if y is not None]
    torch.autograd.grad(outputs, inputs, [torch.ones_like(y) for y in outputs])


def norms() -> None:
    from fusedops.ops import add_rms_norm, layer_norm

    for width in (1, 1000, 4096, 16384, 65536):
        x, weight, bias = leaf(4, width), leaf(width, dtype=torch.float32), leaf(width)
        differentiate(layer_norm(x, width, weight, bias), (x, weight, bias))
    x, stream, weight = leaf(4, 4096), leaf(4, 4096, dtype=torch.float32), leaf(4096)
    differentiate(add_rms_norm(x, stream, 4096, weight, memory_efficient=True), (x, stream, weight))


def losses() -> None:
    from fusedops.ops import cross_entropy, focal_loss, linear_cross_entropy

    target = torch.zeros(4, dtype=torch.long)
    for classes in (1000, 131072):
        for inplace in (False, True):
            x = leaf(4, classes)
            loss = cross_entropy(x.view_as(x), target, label_smoothing=0.1, z_loss=1e-4, softcap=30.0, inplace=inplace)
            differentiate(loss, (x,))
    x, weight = leaf(4, 64), leaf(100, 64)
    differentiate(linear_cross_entropy(x, weight, target), (x, weight))
    x = leaf(4, 91)
    differentiate(focal_loss(x, target, torch.ones(1)), (x,))


def attention() -> None:
    from fusedops.ops import rope, rope_2d, rotary_table, scaled_softmax

    for keys in (100, 4096, 65536):
        x = leaf(1, 2, 4, keys)
        differentiate(scaled_softmax(x, 0.5, mask=torch.zeros(1, 1, 4, keys, dtype=torch.bool), causal=True), (x,))
    q, k = leaf(1, 16, 8, 80), leaf(1, 16, 2, 80)
    differentiate(rope(q, k, *rotary_table(16, 64)), (q, k))
    rope(q[0], k[0], *rotary_table(16, 80), layout="thd", cu_seqlens=torch.tensor([0, 5, 16]))
    rope(q, None, *rotary_table(16, 80), positions=torch.arange(16))
    tables = rotary_table(4, 40)
    differentiate(rope_2d(q, k, *tables, *tables, 4), (q, k))


def layers() -> None:
    from fusedops.ops import bias_activation, gated, group_norm, index_mul_2d
    from fusedops.ops.activations import KINDS

    for activation in KINDS:
        x, y, bias = leaf(4, 300), leaf(4, 300), leaf(300)
        differentiate(gated(x, y, activation), (x, y))
        differentiate(bias_activation(x, bias, activation), (x, bias))
    for shape in ((2, 64, 8, 8), (2, 96, 64, 64)):
        x = leaf(*shape).detach().contiguous(memory_format=torch.channels_last).requires_grad_()
        weight = leaf(shape[1], dtype=torch.float32)
        differentiate(group_norm(x, 32, weight, weight, activation="silu"), (x, weight))
    a, b = leaf(10, 64), leaf(20, 64)
    differentiate(index_mul_2d(a, b, torch.zeros(20, dtype=torch.long)), (a, b))


def transducers() -> None:
    from fusedops.ops import transducer_joint, transducer_loss

    f, g, f_len, y_len = leaf(3, 5, 64), leaf(3, 4, 64), torch.tensor([5, 2, 3]), torch.tensor([3, 1, 2])
    ends = torch.cumsum(f_len * (y_len + 1), 0)
    options = {"batch_offset": ends, "packed_batch": 35}
    differentiate(transducer_joint(f, g, f_len, y_len + 1, relu=True, dropout=0.1, **options), (f, g))
    differentiate(transducer_joint(f, g, f_len, y_len + 1), (f, g))
    label = torch.zeros(3, 3, dtype=torch.int32)
    for x, options in ((leaf(3, 5, 4, 40), {}), (leaf(35, 40), {"batch_offset": ends, "max_f_len": 5})):
        differentiate(transducer_loss(x, label, f_len, y_len, 0, **options), (x,))


def optimizers() -> None:
    from fusedops import optim
    from fusedops.ops import multi_tensor

    def parameters(dtype: torch.dtype) -> list[torch.nn.Parameter]:
        made = [torch.nn.Parameter(leaf(size, 8, dtype=dtype).detach()) for size in (3, 40)]
        for parameter in made:
            parameter.grad = torch.ones_like(parameter)
        return made

    for masters in ("none", "fp32", "remainder", "stochastic"):
        optim.AdamW(parameters(B16), master_weights=masters, max_grad_norm=1.0, zero_grads=True).step()
    for name in ("AdamW", "SGD", "LAMB", "NovoGrad", "Adagrad"):
        for dtype in (torch.float32, B16):
            getattr(optim, name)(parameters(dtype), lr=0.1, skip_nonfinite=True).step()
    optim.LAMB(parameters(B16), weight_decay=0.0, master_weights="remainder", zero_grads=True).step()
    gradients = [parameter.grad for parameter in parameters(B16)]
    multi_tensor.clip_grad_norm_(parameters(B16), 1.0)
    multi_tensor.multi_tensor_scale(gradients, parameters(torch.float32), 0.5)
    multi_tensor.multi_tensor_axpby(gradients, gradients, parameters(torch.float32), 0.5, 2.0)


FAMILIES = {function.__name__: function for function in (norms, losses, attention, layers, transducers, optimizers)}


class Target:
    """Stands where triton looks for a GPU's driver."""

    def get_current_target(self):
        from triton.backends.compiler import GPUTarget

        return GPUTarget("cuda", TARGET, 32)

    def get_current_device(self):
        return 0

    def get_current_stream(self, device=None):
        return 0


def compile_launches(name: str) -> None:
    """Run a family's functions with every launch replaced by its compilation; print how many kernels that made."""
    from triton.runtime import driver
    from triton.runtime.jit import JITFunction

    import fusedops
    from fusedops import dispatch

    driver.set_active(Target())
    launch, kernels = JITFunction.run, set()

    def compile_only(self, *arguments, grid, warmup, **options):
        kernels.add(launch(self, *arguments, grid=grid, warmup=True, **options).hash)

    JITFunction.run = compile_only
    dispatch._obstacle = lambda *_: ""
    with fusedops.use("triton"):
        FAMILIES[name]()
    print(len(kernels))


@pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="needs the package triton")
@pytest.mark.parametrize("name", FAMILIES)
def test_kernels_compile(tmp_path, name):
    environment = {key: value for key, value in os.environ.items() if key != "TRITON_INTERPRET"}
    environment |= {"TRITON_CACHE_DIR": str(tmp_path), "CUDA_VISIBLE_DEVICES": ""}
    done = subprocess.run([sys.executable, __file__, name], env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-3000:]
    assert int(done.stdout.split()[-1]) >= 6


if __name__ == "__main__":
    compile_launches(sys.argv[1])
