"""Tables in device memory that let one launch walk over any number of tensors.

A table belongs to L lists of N tensors each (parameters, gradients, moments ...; tensor i of every list has as many
elements). It holds the N x L addresses and the *work items*: pieces of at most ``CHUNK`` elements which persistent
programs take in turn. Three things follow from this layout: a launch has no limit on tensors (kernel arguments would
hold about a hundred), all offsets inside an item fit 32 bits whatever the tensor's size, and a step whose addresses
have not changed uploads nothing.

An item is *vectorised* when every list's address is a multiple of 16 bytes there and its length is a multiple of 16
elements. Tensors that start misaligned, but alike in all lists, get a short head item first; those misaligned in
different ways are walked element by element.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from fusedops.dispatch import processors

# Tuning values.
CHUNK = 16_384  # elements per work item, at most; a multiple of 16
PROGRAMS_PER_MULTIPROCESSOR = 8

VECTOR = 16  # elements: 16 bytes or more of every dtype from one byte up
ITEM_FIELDS = 4  # tensor, first element, elements, 1 if vectorised
CAPTURES = 4  # page-locked tables kept ready, since none can be allocated while a CUDA graph is captured


class TensorTable:
    """Addresses and work items of ``lists`` (L lists of N tensors each), cached between calls of `bind`.

    Attributes after `bind`: ``addresses`` (int64 [L, N]) and ``items`` (int64 [C, 4]) on the device, ``first_item``
    (int32 [N + 1], the items of tensor i are ``first_item[i]:first_item[i + 1]``), ``num_tensors``, ``num_items``,
    ``programs`` (the grid to launch). Given a ``lag``, also ``schedule``: the `two_passes` over the items, int32 [2 C].
    """

    def __init__(
        self, chunk: int = CHUNK, programs_per_multiprocessor: int = PROGRAMS_PER_MULTIPROCESSOR, lag: int | None = None
    ) -> None:
        if chunk <= 0 or chunk % VECTOR:
            raise ValueError(f"chunk must be a positive multiple of {VECTOR}, not {chunk}")
        self.chunk = chunk
        self.programs_per_multiprocessor = programs_per_multiprocessor
        self.lag = lag
        self.schedule: Tensor | None = None
        self.uploads = 0
        self.num_tensors = self.num_items = self.programs = 0
        self._pointers: list[list[int]] = []
        self._fixed: Sequence[Sequence[Tensor]] = ()
        self._fixed_pointers: list[list[int]] = []
        self._numels: list[int] = []
        self._heads: np.ndarray | None = None
        self._stream = 0
        self._spares: list[Tensor] = []
        self._kept_for_graphs: list[tuple[Tensor | None, ...]] = []
        self._uploaded_by_graph = False

    def bind(self, lists: Sequence[Sequence[Tensor]], fixed: Sequence[Sequence[Tensor]] = ()) -> TensorTable:
        """Point the table at these tensors; uploads only what changed. -> itself.

        The tensors must be on one device and dense in memory, those of one index in the same layout, those of one
        list of the same item size. While a CUDA graph is being captured changed addresses are uploaded by a node of
        the graph.
        """
        first = lists[0][0]
        capturing = first.is_cuda and torch.cuda.is_current_stream_capturing()
        stream = (
            torch.cuda.current_stream(first.device).cuda_stream if first.is_cuda and not capturing else self._stream
        )
        if fixed is not self._fixed:
            self._fixed, self._fixed_pointers = fixed, addresses_of(fixed)
        pointers = addresses_of(lists) + self._fixed_pointers
        numels = [tensor.numel() for tensor in lists[0]]
        if (
            stream != self._stream
        ):  # what another stream uploaded may not have arrived, and may be freed under our launches
            self._heads, self._stream = None, stream
        elif pointers == self._pointers and numels == self._numels and not self._uploaded_by_graph:
            if capturing:
                self._kept_for_graphs.append((self.addresses, self.items, self.first_item, self.schedule))
            return self
        lists = [*lists, *fixed]
        self._check(lists)
        table = np.array(pointers, dtype=np.int64)
        heads = head_elements(table, [tensors[0].element_size() for tensors in lists])
        if numels != self._numels or self._heads is None or not np.array_equal(heads, self._heads):
            if capturing:
                raise RuntimeError("the tensors' sizes or alignment changed: run once before capturing a CUDA graph")
            self._lay_out(numels, heads, first.device)
        self.addresses = self._upload(table, first.device, capturing)
        self._pointers, self._numels, self._heads = pointers, numels, heads
        self._uploaded_by_graph = capturing
        self.uploads += 1
        return self

    def is_current(self, device: torch.device) -> bool:
        """Whether the table may be used again as it is, as far as streams and graphs go, if no address has changed."""
        if device.type != "cuda" or not self.uploads:
            return self.uploads > 0
        if self._uploaded_by_graph or torch.cuda.is_current_stream_capturing():
            return False
        return torch.cuda.current_stream(device).cuda_stream == self._stream

    def _check(self, lists: Sequence[Sequence[Tensor]]) -> None:
        numels = [tensor.numel() for tensor in lists[0]]
        device = lists[0][0].device
        for number, tensors in enumerate(lists):
            if len(tensors) != len(numels):
                raise ValueError(f"list {number} has {len(tensors)} tensors, list 0 has {len(numels)}")
            for index, tensor in enumerate(tensors):
                if tensor.numel() != numels[index]:
                    raise ValueError(
                        f"tensor {index} has {tensor.numel()} elements in list {number}, {numels[index]} in list 0"
                    )
                if tensor.device != device:
                    raise ValueError(f"tensor {index} of list {number} is on {tensor.device}, not on {device}")

    def _lay_out(self, numels: Sequence[int], heads: np.ndarray, device: torch.device) -> None:
        items, first_item = work_items(numels, heads, self.chunk)
        self.num_tensors, self.num_items = len(numels), len(items)
        self.programs = min(max(len(items), 1), self.programs_per_multiprocessor * processors(device))
        self.items = torch.from_numpy(items).to(device)
        self.first_item = torch.from_numpy(first_item).to(device)
        if self.lag is not None:
            self.schedule = torch.from_numpy(two_passes(first_item, self.lag)).to(device)

    def _upload(self, table: np.ndarray, device: torch.device, capturing: bool) -> Tensor:
        if device.type != "cuda":
            return torch.from_numpy(table).to(device)
        self._spares = [spare for spare in self._spares if spare.shape == table.shape]
        if not capturing:
            while len(self._spares) <= CAPTURES:
                self._spares.append(torch.empty(table.shape, dtype=torch.int64, device="cpu", pin_memory=True))
        elif not self._spares:
            raise RuntimeError(f"run once before capturing a CUDA graph, and once after {CAPTURES} captures")
        host = self._spares.pop()
        host.numpy()[...] = table
        addresses = torch.empty(table.shape, dtype=torch.int64, device=device).copy_(host, non_blocking=True)
        if capturing:  # each replay repeats the copy, so its source stays as it is for good
            self._kept_for_graphs.append((host, addresses, self.items, self.first_item, self.schedule))
        return addresses


def addresses_of(lists: Sequence[Sequence[Tensor]]) -> list[list[int]]:
    """Addresses of the first elements."""
    return [[tensor.data_ptr() for tensor in tensors] for tensors in lists]


def head_elements(addresses: np.ndarray, sizes: Sequence[int]) -> np.ndarray:
    """Elements before every list of a tensor is 16-byte aligned, int64 [N]; -1 where that never happens at once.

    ``addresses``: int64 [L, N]; ``sizes``: bytes per element of each of the L lists.
    """
    heads = np.full(addresses.shape[1], -1, dtype=np.int64)
    step = np.array(sizes, dtype=np.int64)[:, None]
    for head in reversed(range(VECTOR)):
        heads[((addresses + head * step) % 16 == 0).all(0)] = head
    return heads


def work_items(numels: Sequence[int], heads: np.ndarray, chunk: int) -> tuple[np.ndarray, np.ndarray]:
    """-> items int64 [C, 4] (tensor, first element, elements, 1 if vectorised) in the tensors' order, and first item
    int32 [N + 1].
    """
    rows: list[tuple[int, int, int, int]] = []
    first_item = [0]
    for index, numel in enumerate(numels):
        head = int(heads[index])
        if head < 0 or numel - head < VECTOR:
            body, vectorised, head = numel, 0, 0
        else:
            body, vectorised = (numel - head) // VECTOR * VECTOR, 1
        if head:
            rows.append((index, 0, head, 0))
        rows.extend((index, s, min(chunk, head + body - s), vectorised) for s in range(head, head + body, chunk))
        if head + body < numel:
            rows.append((index, head + body, numel - head - body, 0))
        first_item.append(len(rows))
    items = np.array(rows, dtype=np.int64).reshape(-1, ITEM_FIELDS)
    return items, np.array(first_item, dtype=np.int32)


def two_passes(first_item: np.ndarray, lag: int) -> np.ndarray:
    """-> an order, int32 [2 C], in which every tensor's items come twice: i is the first pass over item i, -1 - i the
    second, which begins ``lag`` items after the first has ended and goes backwards.

    So what the first pass over a tensor has left in the cache is there for the second, last written first read.
    ``first_item``: int32 [N + 1].
    """
    items = np.arange(first_item[-1], dtype=np.int32)
    last = np.repeat(first_item[1:], np.diff(first_item))  # one beyond the last item of the item's tensor
    times = np.concatenate([2 * items.astype(np.int64), 2 * (last[::-1].astype(np.int64) + lag) - 1])
    return np.concatenate([items, -1 - items[::-1]])[np.argsort(times, kind="stable")]


def is_dense(tensor: Tensor) -> bool:
    """Whether the tensor's elements fill one stretch of memory without gaps or overlaps, in any order of its
    dimensions.
    """
    if tensor.is_contiguous():
        return True
    expected = 1
    for stride, size in sorted((st, si) for st, si in zip(tensor.stride(), tensor.shape, strict=True) if si != 1):
        if stride != expected:
            return False
        expected *= size
    return True


def same_layout(first: Tensor, second: Tensor) -> bool:
    """Whether two tensors of one shape keep their elements in the same order in memory."""
    if first.is_contiguous() and second.is_contiguous():
        return True
    strides = zip(first.stride(), second.stride(), first.shape, strict=True)
    return all(a == b for a, b, size in strides if size != 1)
