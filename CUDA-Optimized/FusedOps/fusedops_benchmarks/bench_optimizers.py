"""Steps of the optimizers, on the tensors of BERT-large and on thousands of small ones, against torch's fused and
foreach forms.

torch has no LAMB and no NovoGrad: their peers are written here with its foreach functions. For bfloat16 parameters
with a float32 master the peer is torch's fused AdamW on the masters, with the copies that this takes.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor

from fusedops import optim

from .harness import Case

Programs = dict[str, Callable[[], Any]]

# bytes moved per parameter, at least; gradients are read, state is read and written, parameters are written and,
# without a master, read. LAMB's tensors are gone through twice, for which 12 more are read where the cache does not
# hold them; they are not counted, as they need not be moved.
ADAMW = {
    ("fp32", "none"): 28, ("bf16", "none"): 22, ("bf16", "fp32"): 28, ("bf16", "remainder"): 26,
    ("bf16", "stochastic"): 22,
}  # fmt: skip


def bert_large(quick: bool) -> list[tuple[int, ...]]:
    """Shapes of 334 M parameters in 388 tensors."""
    width, layers, words = (32, 2, 500) if quick else (1024, 24, 30522)
    layer = [(width, width), (width,)] * 4 + [(width,)] * 4
    layer += [(4 * width, width), (4 * width,), (width, 4 * width), (width,)]
    return [(words, width), (512, width), (width,), (width,)] + layer * layers


def adapters(quick: bool) -> list[tuple[int, ...]]:
    """Shapes of low-rank adapters: 4096 tensors of 64 K elements, or a few."""
    return [(16, 256), (256, 16)] * 4 if quick else [(16, 4096), (4096, 16)] * 2048


def cases(device: torch.device, quick: bool) -> Iterator[Case]:
    for label, shapes in (("BERT-large", bert_large(quick)), ("adapters", adapters(quick))):
        count = sum(torch.Size(shape).numel() for shape in shapes)
        shape = f"{label}: {count / 1e6:.0f} M in {len(shapes)}"
        for (dtype, master), size in ADAMW.items():
            name = dtype if master == "none" else f"{dtype} + {master}"
            yield Case(
                "adamw", "step", shape, name, size * count, lambda s=shapes, d=dtype, m=master: _adamw(s, device, d, m)
            )
        yield Case("adamw + clip", "step", shape, "fp32", 32 * count, lambda s=shapes: _adamw_clip(s, device))
        yield Case("sgd", "step", shape, "fp32", 20 * count, lambda s=shapes: _sgd(s, device))
        yield Case("lamb", "step", shape, "fp32", 32 * count, lambda s=shapes: _lamb(s, device))
        yield Case("novograd", "step", shape, "fp32", 24 * count, lambda s=shapes: _novograd(s, device))
        yield Case("clip", "step", shape, "fp32", 12 * count, lambda s=shapes: _clip(s, device, 1e-3))
        yield Case("clip, below", "step", shape, "fp32", 4 * count, lambda s=shapes: _clip(s, device, 1e9))


def parameters(shapes: list[tuple[int, ...]], device: torch.device, dtype: torch.dtype = torch.float32) -> list[Tensor]:
    """Parameters with gradients."""
    made = [torch.nn.Parameter(torch.randn(shape, device=device, dtype=dtype) * 0.02) for shape in shapes]
    for parameter in made:
        parameter.grad = torch.randn_like(parameter) * 1e-3
    return made


def _torchs(
    make: Callable[..., torch.optim.Optimizer], shapes: list[tuple[int, ...]], device: torch.device
) -> Programs:
    programs: Programs = {}
    for name in ("fused", "foreach"):
        optimizer = make(parameters(shapes, device), **{name: True})
        if device.type == "cuda" and "capturable" in optimizer.defaults:
            optimizer.param_groups[0]["capturable"] = True
        programs[f"torch {name}"] = optimizer.step
    return programs


def _adamw(shapes: list[tuple[int, ...]], device: torch.device, dtype: str, master: str) -> Programs:
    if dtype == "fp32":
        programs = {"fusedops": optim.AdamW(parameters(shapes, device)).step}
        return programs | _torchs(torch.optim.AdamW, shapes, device)
    ours = optim.AdamW(parameters(shapes, device, torch.bfloat16), master_weights=master)
    programs = {"fusedops": ours.step}
    if master in ("fp32", "remainder"):
        low = parameters(shapes, device, torch.bfloat16)
        masters = parameters(shapes, device)
        optimizer = torch.optim.AdamW(masters, fused=True, capturable=device.type == "cuda")
        gradients = [p.grad for p in masters]

        def step() -> None:
            torch._foreach_copy_(gradients, [p.grad for p in low])
            optimizer.step()
            with torch.no_grad():
                torch._foreach_copy_(low, masters)

        programs["torch fused, masters copied"] = step
    else:
        low = parameters(shapes, device, torch.bfloat16)
        programs["torch fused, bf16 moments"] = torch.optim.AdamW(
            low, fused=True, capturable=device.type == "cuda"
        ).step
    return programs


def _adamw_clip(shapes: list[tuple[int, ...]], device: torch.device) -> Programs:
    programs = {"fusedops": optim.AdamW(parameters(shapes, device), max_grad_norm=1.0).step}
    theirs = parameters(shapes, device)
    optimizer = torch.optim.AdamW(theirs, fused=True, capturable=device.type == "cuda")

    def step() -> None:
        torch.nn.utils.clip_grad_norm_(theirs, 1.0, foreach=True)
        optimizer.step()

    return programs | {"torch clip + fused": step}


def _sgd(shapes: list[tuple[int, ...]], device: torch.device) -> Programs:
    programs = {"fusedops": optim.SGD(parameters(shapes, device), lr=1e-3, momentum=0.9).step}
    return programs | _torchs(lambda p, **o: torch.optim.SGD(p, lr=1e-3, momentum=0.9, **o), shapes, device)


def _clip(shapes: list[tuple[int, ...]], device: torch.device, limit: float) -> Programs:
    from fusedops.ops.multi_tensor import clip_grad_norm_

    mine, theirs = parameters(shapes, device), parameters(shapes, device)
    return {
        "fusedops": lambda: clip_grad_norm_(mine, limit),
        "torch foreach": lambda: torch.nn.utils.clip_grad_norm_(theirs, limit, foreach=True),
    }


def _lamb(shapes: list[tuple[int, ...]], device: torch.device) -> Programs:
    return {
        "fusedops": optim.LAMB(parameters(shapes, device)).step,
        "torch foreach functions": foreach_lamb(parameters(shapes, device)),
    }


def _novograd(shapes: list[tuple[int, ...]], device: torch.device) -> Programs:
    return {
        "fusedops": optim.NovoGrad(parameters(shapes, device), weight_decay=1e-2).step,
        "torch foreach functions": foreach_novograd(parameters(shapes, device)),
    }


def foreach_lamb(
    parameters: list[Tensor], lr: float = 1e-3, decay: float = 0.01, eps: float = 1e-6
) -> Callable[[], None]:
    """A step of LAMB in foreach functions (after the first steps, when the bias correction has become one)."""
    m, v = ([torch.zeros_like(p) for p in parameters] for _ in range(2))

    @torch.no_grad()
    def step() -> None:
        gradients = [p.grad for p in parameters]
        norm = torch.linalg.vector_norm(torch.stack(torch._foreach_norm(gradients)))
        scaled = torch._foreach_mul(gradients, torch.clamp(1.0 / norm, max=1.0))
        torch._foreach_lerp_(m, scaled, 0.1)
        torch._foreach_mul_(v, 0.999)
        torch._foreach_addcmul_(v, scaled, scaled, 1e-3)
        divisor = torch._foreach_add(torch._foreach_sqrt(v), eps)
        update = torch._foreach_add(torch._foreach_div(m, divisor), parameters, alpha=decay)
        ratios = torch._foreach_div(torch._foreach_norm(parameters), torch._foreach_norm(update))
        torch._foreach_sub_(parameters, torch._foreach_mul(update, torch._foreach_mul(ratios, lr)))

    return step


def foreach_novograd(
    parameters: list[Tensor], lr: float = 1e-3, decay: float = 0.01, eps: float = 1e-8
) -> Callable[[], None]:
    """A step of NovoGrad in foreach functions (likewise)."""
    m = [torch.zeros_like(p) for p in parameters]
    running = list(torch._foreach_norm([p.grad for p in parameters]))

    @torch.no_grad()
    def step() -> None:
        gradients = [p.grad for p in parameters]
        squares = torch._foreach_pow(torch._foreach_norm(gradients), 2.0)
        mean = torch._foreach_lerp(torch._foreach_pow(running, 2.0), squares, 1e-3)
        torch._foreach_copy_(running, torch._foreach_sqrt(mean))
        torch._foreach_lerp_(m, gradients, 0.1)
        update = torch._foreach_div(m, torch._foreach_add(running, eps))
        torch._foreach_add_(update, parameters, alpha=decay)
        torch._foreach_add_(parameters, update, alpha=-lr)

    return step
