"""Operations on whole lists of tensors in one or two launches: scale, a x + b y, L2 norm, unscale, clip.

The kernels take float32, float16 and bfloat16 tensors that are dense in memory, of any size and alignment; tensors of
several dtypes may be mixed (one launch per combination of dtypes), and all else runs in the plain form. Arithmetic is
in float32 (float64 for float64 tensors), and every sum is added in an order that depends on the sizes only, so that a
result is the same in each run. Nothing here waits for the device: factors, norms and flags are tensors on it.

Under torch.compile each operation is one custom operator (``fusedops::multi_tensor_*``).
"""

from __future__ import annotations

import math
import threading
from collections import OrderedDict
from collections.abc import Callable, Iterable, Sequence

import torch
from torch import Tensor

from fusedops.dispatch import backend_for, device_guard, requested
from fusedops.ops.multi_tensor_table import TensorTable, is_dense, same_layout

__all__ = [
    "clip_grad_norm_",
    "multi_tensor_axpby",
    "multi_tensor_l2norm",
    "multi_tensor_scale",
    "multi_tensor_unscale_",
]

TABLES = 64  # tables kept by a thread for the functions of this module
KERNEL_DTYPES = (torch.float32, torch.float16, torch.bfloat16)


@torch.no_grad()
def multi_tensor_scale(
    inputs: Sequence[Tensor], outputs: Sequence[Tensor], factor: float | Tensor = 1.0, found_inf: Tensor | None = None
) -> Tensor:
    """outputs[i] = inputs[i] * factor; -> ``found_inf``, float32 [1], 1 where an input is infinite or not a number.

    ``factor``: a number or a tensor of one element. A ``found_inf`` that is given is only ever set, never cleared.
    Each output has the shape of its input and any floating dtype; it may be the input. ValueError for lists that do
    not match.
    """
    if torch.compiler.is_compiling():
        found = torch.ops.fusedops.multi_tensor_scale(
            list(inputs), list(outputs), *_as_number_or_tensor(factor, inputs, outputs)
        )
        return found if found_inf is None else found_inf.copy_(torch.maximum(found_inf, found))
    check_lists("multi_tensor_scale", inputs, outputs)
    found_inf = _flag(found_inf, inputs, outputs)
    if not _takes_kernels("multi_tensor_scale", inputs, outputs):
        return multi_tensor_scale_plain(inputs, outputs, factor, found_inf)
    from fusedops.ops import multi_tensor_kernels as kernels

    for (x, y), table in _tables("scale", inputs, outputs):
        with device_guard(inputs[0]):
            kernels.scale_kernel[(table.programs,)](
                table.addresses, table.items, table.num_items, table.num_tensors, factor, found_inf,
                FACTOR_LOADED=isinstance(factor, Tensor), X=kernels.TYPES[x], Y=kernels.TYPES[y],
                SIZE=kernels.BLOCK, num_warps=kernels.NUM_WARPS,
            )  # fmt: skip
    return found_inf


@torch.no_grad()
def multi_tensor_scale_plain(
    inputs: Sequence[Tensor], outputs: Sequence[Tensor], factor: float | Tensor, found_inf: Tensor
) -> Tensor:
    """The plain form of `multi_tensor_scale`."""
    for x, y in zip(inputs, outputs, strict=True):
        found_inf.copy_(torch.maximum(found_inf, (~torch.isfinite(x)).any().to(found_inf)))
        y.copy_(_wide(x) * factor)
    return found_inf


@torch.no_grad()
def multi_tensor_unscale_(
    tensors: Sequence[Tensor], inverse_scale: float | Tensor, found_inf: Tensor | None = None
) -> Tensor:
    """tensors[i] *= inverse_scale in place; -> ``found_inf`` as in `multi_tensor_scale`."""
    if torch.compiler.is_compiling():
        found = torch.ops.fusedops.multi_tensor_unscale_(
            list(tensors), *_as_number_or_tensor(inverse_scale, tensors, tensors)
        )
        return found if found_inf is None else found_inf.copy_(torch.maximum(found_inf, found))
    return multi_tensor_scale(tensors, tensors, inverse_scale, found_inf)


@torch.no_grad()
def multi_tensor_axpby(
    x: Sequence[Tensor],
    y: Sequence[Tensor],
    out: Sequence[Tensor],
    a: float,
    b: float,
    check: int = -1,
    found_inf: Tensor | None = None,
) -> Tensor:
    """out[i] = a * x[i] + b * y[i]; -> ``found_inf`` as in `multi_tensor_scale`.

    ``check``: which inputs are looked at for infinities, 0 for x, 1 for y, -1 for both. ``out`` may be x or y.
    """
    if check not in (-1, 0, 1):
        raise ValueError(f"multi_tensor_axpby: check is -1, 0 or 1, not {check}")
    if torch.compiler.is_compiling():
        found = torch.ops.fusedops.multi_tensor_axpby(list(x), list(y), list(out), a, b, check)
        return found if found_inf is None else found_inf.copy_(torch.maximum(found_inf, found))
    check_lists("multi_tensor_axpby", x, y, out)
    found_inf = _flag(found_inf, x, y, out)
    if not _takes_kernels("multi_tensor_axpby", x, y, out):
        return multi_tensor_axpby_plain(x, y, out, a, b, check, found_inf)
    from fusedops.ops import multi_tensor_kernels as kernels

    for (x_type, y_type, out_type), table in _tables("axpby", x, y, out):
        with device_guard(x[0]):
            kernels.axpby_kernel[(table.programs,)](
                table.addresses, table.items, table.num_items, table.num_tensors, float(a), float(b), found_inf,
                X=kernels.TYPES[x_type], Y=kernels.TYPES[y_type], OUT=kernels.TYPES[out_type], CHECK=check,
                SIZE=kernels.BLOCK, num_warps=kernels.NUM_WARPS,
            )  # fmt: skip
    return found_inf


@torch.no_grad()
def multi_tensor_axpby_plain(
    x: Sequence[Tensor], y: Sequence[Tensor], out: Sequence[Tensor], a: float, b: float, check: int, found_inf: Tensor
) -> Tensor:
    """The plain form of `multi_tensor_axpby`."""
    for x_i, y_i, out_i in zip(x, y, out, strict=True):
        for looked_at in ((x_i,), (y_i,), (x_i, y_i))[check]:
            found_inf.copy_(torch.maximum(found_inf, (~torch.isfinite(looked_at)).any().to(found_inf)))
        out_i.copy_(a * _wide(x_i) + b * _wide(y_i))
    return found_inf


@torch.no_grad()
def multi_tensor_l2norm(
    tensors: Sequence[Tensor], per_tensor: bool = False, factor: float | Tensor = 1.0, table: str = "l2norm"
) -> tuple[Tensor, Tensor]:
    """-> L2 norm of all elements of all tensors times |factor|, float32 [1]; and of each tensor, [N] (else [0]).

    float64 tensors give float64 norms. Infinite or not a number where an element is, or where the float32 sum of
    squares overflows. Two launches. ``table``: the name by which the table of addresses is kept; lists of equal sizes
    that are used in turns do not replace each other's if their names differ.
    """
    if torch.compiler.is_compiling():
        return torch.ops.fusedops.multi_tensor_l2norm(
            list(tensors), per_tensor, *_as_number_or_tensor(factor, tensors, tensors)
        )
    where, known = _known(table, tensors)
    if known is None:
        check_lists("multi_tensor_l2norm", tensors)
        if not tensors or not _takes_kernels("multi_tensor_l2norm", [t for t in tensors if is_dense(t)] or tensors):
            return multi_tensor_l2norm_plain(tensors, per_tensor, factor)
    from fusedops.ops import multi_tensor_kernels as kernels

    tensors = [tensor if is_dense(tensor) else tensor.contiguous() for tensor in tensors]
    device = tensors[0].device
    with device_guard(tensors[0]):
        if known is None:
            known = _grouped(table, tensors)
            _remember(table, where, known)
        places, tables = known
        partials = torch.empty(sum(each.programs for _, each in tables), dtype=torch.float32, device=device)
        norms = torch.empty(len(tensors) if per_tensor else 0, dtype=torch.float32, device=device)
        norm = torch.empty(1, dtype=torch.float32, device=device)
        parts: dict[int, Tensor] = {}
        done = 0
        for number, ((x,), each) in enumerate(tables):
            item_partials = torch.empty(each.num_items if per_tensor else 0, dtype=torch.float32, device=device)
            run_squares(each, 0, x, partials[done:], item_partials if per_tensor else None)
            done += each.programs
            last = number == len(tables) - 1
            counted = each.num_tensors if per_tensor else 0
            if not counted and not last:
                continue
            here = norms if len(tables) == 1 else torch.empty(counted, dtype=torch.float32, device=device)
            kernels.norms_kernel[(counted + last,)](
                partials, done, item_partials, each.first_item, counted,
                factor if isinstance(factor, Tensor) else math.fabs(factor), norm, here,
                FACTOR_LOADED=isinstance(factor, Tensor), SIZE=kernels.PARTIALS, num_warps=kernels.NUM_WARPS,
            )  # fmt: skip
            if here is not norms:
                parts.update(zip(places[number], here, strict=False))
    return norm, norms if len(tables) == 1 or not per_tensor else torch.stack([parts[i] for i in range(len(tensors))])


@torch.no_grad()
def multi_tensor_l2norm_plain(
    tensors: Sequence[Tensor], per_tensor: bool, factor: float | Tensor
) -> tuple[Tensor, Tensor]:
    """The plain form of `multi_tensor_l2norm`."""
    dtype = torch.float64 if any(tensor.dtype == torch.float64 for tensor in tensors) else torch.float32
    if not tensors:
        return torch.zeros(1), torch.zeros(0)
    norms = torch.stack([torch.linalg.vector_norm(tensor, dtype=dtype) for tensor in tensors])
    norm = torch.linalg.vector_norm(norms).reshape(1) * _magnitude(factor)
    return norm, norms * _magnitude(factor) if per_tensor else norms[:0]


@torch.no_grad()
def clip_grad_norm_(
    parameters: Tensor | Iterable[Tensor],
    max_norm: float,
    norm_type: float = 2.0,
    error_if_nonfinite: bool = False,
    foreach: bool | None = None,
) -> Tensor:
    """Scale the gradients in place so that their norm is at most ``max_norm``; -> the norm before, a scalar tensor.

    The rule is that of `torch.nn.utils.clip_grad_norm_`: factor = min(1, max_norm / (norm + 1e-6)). Two launches and
    no synchronisation (``error_if_nonfinite=True`` waits for the norm); gradients below the limit are read once and
    not written. Norms other than 2 are torch's own. ``foreach`` is accepted for the sake of the signature.
    """
    parameters = [parameters] if isinstance(parameters, Tensor) else list(parameters)
    gradients = [parameter.grad for parameter in parameters if parameter.grad is not None]
    if float(norm_type) != 2.0 or not gradients:
        return torch.nn.utils.clip_grad_norm_(parameters, max_norm, norm_type, error_if_nonfinite, foreach)
    norm = clip_by_norm_(gradients, max_norm)
    if error_if_nonfinite and not bool(torch.isfinite(norm)):
        raise RuntimeError(
            f"The total norm of order {norm_type} for gradients from `parameters` is non-finite ({float(norm)}), "
            "so it cannot be clipped"
        )
    return norm


@torch.no_grad()
def clip_by_norm_(tensors: Sequence[Tensor], max_norm: float) -> Tensor:
    """`clip_grad_norm_` (L2) on the tensors themselves."""
    if torch.compiler.is_compiling():
        return torch.ops.fusedops.multi_tensor_clip_(list(tensors), float(max_norm))
    places, known = _known("clip", tensors)
    if known is None:
        check_lists("clip_grad_norm_", tensors)
        if not _takes_kernels("clip_grad_norm_", tensors):
            return clip_by_norm_plain_(tensors, max_norm)
    from fusedops.ops import multi_tensor_kernels as kernels

    device = tensors[0].device
    with device_guard(tensors[0]):
        if known is None:
            known = _grouped("clip", tensors)
            _remember("clip", places, known)
        tables = known[1]
        partials = torch.empty(sum(table.programs for _, table in tables), dtype=torch.float32, device=device)
        norm = torch.empty((), dtype=torch.float32, device=device)
        done = 0
        for (x,), table in tables:
            run_squares(table, 0, x, partials[done:])
            done += table.programs
        for (x,), table in tables:
            kernels.clip_kernel[(table.programs,)](
                table.addresses, table.items, table.num_items, table.num_tensors, partials, done, float(max_norm), norm,
                X=kernels.TYPES[x], SIZE=kernels.BLOCK, PARTIALS=kernels.PARTIALS, num_warps=kernels.NUM_WARPS,
            )  # fmt: skip
    return norm


@torch.no_grad()
def clip_by_norm_plain_(tensors: Sequence[Tensor], max_norm: float) -> Tensor:
    """The plain form of `clip_by_norm_`."""
    norm = multi_tensor_l2norm_plain(tensors, False, 1.0)[0].reshape(())
    factor = torch.clamp(max_norm / (norm + 1e-6), max=1.0)
    for tensor in tensors:
        tensor.copy_(_wide(tensor) * factor)
    return norm


def run_squares(
    table: TensorTable,
    which: int,
    dtype: torch.dtype,
    partials: Tensor,
    item_partials: Tensor | None = None,
    largest: bool = False,
) -> None:
    """Launch the first stage of a norm over list ``which`` of a table.

    Writes the sums of squares to ``partials[:programs]`` and ``item_partials[:items]``, there the largest magnitudes
    if asked.
    """
    from fusedops.ops import multi_tensor_kernels as kernels

    kernels.squares_kernel[(table.programs,)](
        table.addresses, table.items, table.num_items, table.num_tensors, partials,
        partials if item_partials is None else item_partials, LIST=which, X=kernels.TYPES[dtype],
        PER_ITEM=item_partials is not None, LARGEST=largest, SIZE=kernels.BLOCK, num_warps=kernels.NUM_WARPS,
    )  # fmt: skip


def check_lists(name: str, *lists: Sequence[Tensor]) -> None:
    """ValueError unless the lists are as long as each other and tensors of one index have one shape and a floating
    dtype.
    """
    for number, tensors in enumerate(lists):
        if len(tensors) != len(lists[0]):
            raise ValueError(f"{name}: list {number} has {len(tensors)} tensors, list 0 has {len(lists[0])}")
        for index, tensor in enumerate(tensors):
            if tensor.shape != lists[0][index].shape:
                raise ValueError(
                    f"{name}: tensor {index} of list {number} is {tuple(tensor.shape)}, "
                    f"of list 0 {tuple(lists[0][index].shape)}"
                )
            if not tensor.is_floating_point() or tensor.layout != torch.strided:
                raise ValueError(f"{name}: tensor {index} of list {number} is {tensor.layout}, {tensor.dtype}")
            if tensor.device != lists[0][0].device:
                raise ValueError(
                    f"{name}: tensor {index} of list {number} was not on the same device as the first tensor: "
                    f"{tensor.device}, not {lists[0][0].device}"
                )


def _takes_kernels(name: str, *lists: Sequence[Tensor]) -> bool:
    if not lists[0] or backend_for(*(tensor for tensors in lists for tensor in tensors), op=name) != "triton":
        return False
    return all(
        is_dense(tensors[0]) and all(same_layout(tensors[0], other) for other in tensors[1:])
        for tensors in zip(*lists, strict=True)
    )


def by_dtypes(*lists: Sequence[Tensor]) -> dict[tuple[torch.dtype, ...], list[int]]:
    """Indexes of the tensors by their dtypes in each list, in order of first appearance."""
    groups: dict[tuple[torch.dtype, ...], list[int]] = {}
    for index, tensors in enumerate(zip(*lists, strict=True)):
        groups.setdefault(tuple(tensor.dtype for tensor in tensors), []).append(index)
    return groups


Places = list[tuple[int, int, torch.dtype]]
Grouped = tuple[list[list[int]], list[tuple[tuple[torch.dtype, ...], TensorTable]]]


class _Tables(threading.local):
    """Tables of a thread by what they are for; and, by operation and number of tensors, where the last call's tensors
    lay.
    """

    def __init__(self) -> None:
        self.of: OrderedDict[object, TensorTable] = OrderedDict()
        self.last: dict[tuple[str, int], tuple[Places, Grouped]] = {}


_TABLES = _Tables()


def _known(name: str, tensors: Sequence[Tensor]) -> tuple[Places, Grouped | None]:
    """-> where contiguous tensors lie (else nothing), and their tables if the last call's lay there, too.

    That spares the checks of the tensors, which would cost more time than a norm of some hundreds of them takes.
    """
    if requested() == "plain" or not all(tensor.is_contiguous() for tensor in tensors):
        return [], None
    places = [(tensor.data_ptr(), tensor.numel(), tensor.dtype) for tensor in tensors]
    last = _TABLES.last.get((name, len(tensors)))
    if last is not None and last[0] == places and last[1]:
        if all(table.is_current(tensors[0].device) for _, table in last[1][1]):
            return places, last[1]
    return places, None


def _remember(name: str, places: Places, grouped: Grouped) -> None:
    """Tables for `_known`: those of the last call of an operation with so many tensors, if they are all contiguous."""
    if len(_TABLES.last) >= TABLES:
        _TABLES.last.clear()
    count = sum(len(indexes) for indexes in grouped[0])
    _TABLES.last.pop((name, count), None)  # its tables may have been bound to others by now
    if places:
        _TABLES.last[name, count] = places, grouped


def _grouped(name: str, *lists: Sequence[Tensor]) -> Grouped:
    """-> indexes of the tensors and (dtypes, table bound to them) for each combination of dtypes."""
    places, tables = [], []
    device = lists[0][0].device
    stream = torch.cuda.current_stream(device).cuda_stream if device.type == "cuda" else 0
    capturing = device.type == "cuda" and torch.cuda.is_current_stream_capturing()
    for dtypes, indexes in by_dtypes(*lists).items():
        chosen = [[tensors[i] for i in indexes] for tensors in lists]
        rest = (name, len(lists[0]), device, dtypes, tuple(tensor.numel() for tensor in chosen[0]))
        key = (stream, *rest)
        if capturing:  # on a stream of its own: the table is the one that was laid out outside, on whatever stream
            key = next((known for known in reversed(_TABLES.of) if known[1:] == rest), key)
        table = _TABLES.of.pop(key, None) or TensorTable()
        _TABLES.of[key] = table
        if len(_TABLES.of) > TABLES:
            _TABLES.of.popitem(last=False)
        places.append(indexes)
        tables.append((dtypes, table.bind(chosen)))
    return places, tables


def _tables(name: str, *lists: Sequence[Tensor]) -> list[tuple[tuple[torch.dtype, ...], TensorTable]]:
    return _grouped(name, *lists)[1]


def _wide(tensor: Tensor) -> Tensor:
    return tensor if tensor.dtype == torch.float64 else tensor.float()


def _magnitude(factor: float | Tensor) -> float | Tensor:
    return factor.abs() if isinstance(factor, Tensor) else math.fabs(factor)


def _flag(found_inf: Tensor | None, *lists: Sequence[Tensor]) -> Tensor:
    if found_inf is not None:
        return found_inf
    device = lists[0][0].device if lists[0] else torch.device("cpu")
    return torch.zeros(1, dtype=torch.float32, device=device)


def _as_number_or_tensor(factor: float | Tensor, *_: object) -> tuple[float, Tensor | None]:
    return (1.0, factor) if isinstance(factor, Tensor) else (float(factor), None)


def _given(number: float, tensor: Tensor | None) -> float | Tensor:
    return number if tensor is None else tensor


@torch.library.custom_op("fusedops::multi_tensor_scale", mutates_args=("outputs",))
def _scale_op(inputs: Sequence[Tensor], outputs: Sequence[Tensor], number: float, factor: Tensor | None) -> Tensor:
    return multi_tensor_scale(inputs, outputs, _given(number, factor))


@torch.library.custom_op("fusedops::multi_tensor_unscale_", mutates_args=("tensors",))
def _unscale_op(tensors: Sequence[Tensor], number: float, factor: Tensor | None) -> Tensor:
    return multi_tensor_scale(tensors, tensors, _given(number, factor))


@torch.library.custom_op("fusedops::multi_tensor_axpby", mutates_args=("out",))
def _axpby_op(
    x: Sequence[Tensor], y: Sequence[Tensor], out: Sequence[Tensor], a: float, b: float, check: int
) -> Tensor:
    return multi_tensor_axpby(x, y, out, a, b, check)


@torch.library.custom_op("fusedops::multi_tensor_l2norm", mutates_args=())
def _l2norm_op(
    tensors: Sequence[Tensor], per_tensor: bool, number: float, factor: Tensor | None
) -> tuple[Tensor, Tensor]:
    return multi_tensor_l2norm(tensors, per_tensor, _given(number, factor))


@torch.library.custom_op("fusedops::multi_tensor_clip_", mutates_args=("tensors",))
def _clip_op(tensors: Sequence[Tensor], max_norm: float) -> Tensor:
    return clip_by_norm_(tensors, max_norm)


def _register_fakes() -> None:
    def flag(first: Sequence[Tensor], *_: object) -> Tensor:
        return first[0].new_empty(1, dtype=torch.float32)

    def norms(tensors: Sequence[Tensor], per_tensor: bool, *_: object) -> tuple[Tensor, Tensor]:
        dtype = torch.float64 if any(tensor.dtype == torch.float64 for tensor in tensors) else torch.float32
        return tensors[0].new_empty(1, dtype=dtype), tensors[0].new_empty(len(tensors) * per_tensor, dtype=dtype)

    def clip(tensors: Sequence[Tensor], max_norm: float) -> Tensor:
        dtype = torch.float64 if any(tensor.dtype == torch.float64 for tensor in tensors) else torch.float32
        return tensors[0].new_empty((), dtype=dtype)

    fakes: list[tuple[torch.library.CustomOpDef, Callable[..., object]]] = [
        (_scale_op, flag), (_unscale_op, flag), (_axpby_op, flag), (_l2norm_op, norms), (_clip_op, clip),
    ]  # fmt: skip
    for op, fake in fakes:
        op.register_fake(fake)


_register_fakes()
