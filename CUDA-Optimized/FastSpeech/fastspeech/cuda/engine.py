"""The forms of one network behind one call, which is the model's own: text in, `Prediction` out.

plain       `model.FastSpeech` in PyTorch, any device and precision
kernels     the kernels of csrc/, launched one by one
graph       the same captured as CUDA graphs, one a size: batches, texts and spectrograms are filled up to a bucket
tensorrt    a TensorRT engine (`fastspeech.tensorrt`)

Padding changes no result, so a bucket does not either. B batch, T symbols, F frames.
"""

from __future__ import annotations

import itertools
import threading
from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor

from dlx.inference import GraphedModel

from ..model import FastSpeech, Prediction
from . import torch_ops
from .network import KernelNetwork, refusal

FORMS = ("plain", "kernels", "graph", "tensorrt")
BATCH_BUCKETS = (1, 2, 4, 8, 16, 32, 64)
TEXT_BUCKETS = (32, 64, 96, 128, 192, 256, 384, 512)
FRAME_BUCKETS = (64, 128, 192, 256, 384, 512, 640, 800, 1024, 1280, 1536, 2048)


class Engine(Protocol):
    """What every form has. ``speed``, ``emphasis``, ``pauses``, ``durations``, ``size`` as of `FastSpeech.forward`."""

    form: str

    def __call__(
        self,
        text: Tensor,
        text_lengths: Tensor,
        durations: Tensor | None = None,
        size: int | None = None,
        speed: float | Tensor = 1.0,
        emphasis: Tensor | None = None,
        pauses: Tensor | None = None,
    ) -> Prediction: ...


def bucket(length: int, sizes: Sequence[int]) -> int:
    """The smallest size that fits; beyond the largest, the next multiple of it."""
    for size in sizes:
        if length <= size:
            return size
    return -(-length // sizes[-1]) * sizes[-1]


def check(text: Tensor, text_lengths: Tensor, symbols: int, speed: float | Tensor = 1.0) -> None:
    """ValueError unless text is (B, T) and lengths and speeds (B,), in their ranges. Values are looked at only on the
    host."""
    if text.dim() != 2 or text_lengths.shape != text.shape[:1] or not text.numel():
        raise ValueError(f"expected text (B, T) and lengths (B,), got {tuple(text.shape)}, {tuple(text_lengths.shape)}")
    if not text.is_cuda and (int(text.min()) < 0 or int(text.max()) >= symbols):
        raise ValueError(f"symbols must be from 0 to {symbols - 1}, got {int(text.min())} to {int(text.max())}")
    if not text_lengths.is_cuda and (int(text_lengths.min()) < 0 or int(text_lengths.max()) > text.shape[1]):
        raise ValueError(f"lengths must be from 0 to {text.shape[1]}, got {text_lengths.tolist()}")
    if isinstance(speed, Tensor):
        if speed.shape not in ((), text_lengths.shape):
            raise ValueError(f"expected a speed or one for each of {len(text)} texts, got {tuple(speed.shape)}")
        speeds = [] if speed.is_cuda else speed.flatten().tolist()
    else:
        speeds = [speed]
    if bad := [value for value in speeds if not 0 < value < float("inf")]:
        raise ValueError(f"a speed must be above 0, got {bad[0]}")


def on(device: torch.device) -> AbstractContextManager[Any]:
    """What is launched or captured within goes to this device."""
    return torch.cuda.device(device) if device.type == "cuda" else nullcontext()


class PlainEngine:
    form = "plain"

    def __init__(self, model: FastSpeech) -> None:
        self.model = model.eval()
        self.device = model.embedding.weight.device

    @torch.inference_mode()
    def __call__(self, text, text_lengths, durations=None, size=None, speed=1.0, emphasis=None, pauses=None):
        check(text, text_lengths, self.model.config.num_symbols, speed)
        given = (text, text_lengths, durations, emphasis, pauses)
        text, text_lengths, durations, emphasis, pauses = (
            None if value is None else value.to(self.device) for value in given
        )
        speed = speed.to(self.device) if isinstance(speed, Tensor) else speed
        return self.model(text, text_lengths, durations, size, speed, emphasis, pauses)


class Request:
    """The inputs of a call in one int32 tensor, so that one copy brings them to the device.

    text (B, T), emphasis (float32 bits), pauses, then lengths (B,) and speed (float32 bits), each contiguous.
    """

    def __init__(self, batch: int, symbols: int, device: torch.device, pinned: bool = False) -> None:
        self.data = torch.zeros(batch * (3 * symbols + 2), dtype=torch.int32, device=device, pin_memory=pinned)
        area = batch * symbols
        parts = self.data.split([area, area, area, batch, batch])
        self.text, emphasis, self.pauses = (part.view(batch, symbols) for part in parts[:3])
        self.lengths, speed = parts[3:]
        self.emphasis, self.speed = emphasis.view(torch.float32), speed.view(torch.float32)
        self._controlled = True  # whether emphasis and pauses are other than those of a call without

    def fill(
        self,
        text: Tensor,
        lengths: Tensor,
        speed: float | Tensor = 1.0,
        emphasis: Tensor | None = None,
        pauses: Tensor | None = None,
    ) -> None:
        """Take over a call's inputs, filled up to the size here: by texts of no symbols, and symbols that pad."""
        batch, symbols = text.shape
        if text.shape != self.text.shape:
            self.text.zero_()
            self.lengths.zero_()
            self.speed.fill_(1)
        self.text[:batch, :symbols] = text
        self.lengths[:batch] = lengths
        if self._controlled:
            self.emphasis.fill_(1)
            self.pauses.zero_()
        self._controlled = emphasis is not None or pauses is not None
        if emphasis is not None:
            self.emphasis[:batch, :symbols] = emphasis
        if pauses is not None:
            self.pauses[:batch, :symbols] = pauses
        self.speed[:batch] = speed

    def send(self, target: Request) -> None:
        """To another one of the same size, not waited for."""
        target.data.copy_(self.data, non_blocking=True)
        target._controlled = True


class KernelEngine:
    """Kernels launched one by one on the current stream. Threads take turns, since calls share counters and graphs;
    who reads results while others call holds `lock` until they are read."""

    form = "kernels"

    def __init__(self, model: FastSpeech, library_rows: int | None = None) -> None:
        self.network = KernelNetwork(model.eval(), library_rows)
        self.device = model.embedding.weight.device
        self.lock = threading.RLock()

    def __call__(self, text, text_lengths, durations=None, size=None, speed=1.0, emphasis=None, pauses=None):
        check(text, text_lengths, self.network.config.num_symbols, speed)
        with self.lock, on(self.device), torch.inference_mode():
            return self._speak(text, text_lengths, durations, size, speed, emphasis, pauses)

    def _speak(self, text, text_lengths, durations, size, speed, emphasis, pauses) -> Prediction:
        batch, symbols = text.shape
        run = self._prepared(text, text_lengths, speed, emphasis, pauses)
        encoded = run.encoded
        if durations is None:
            least, durations = 1, encoded.durations[:batch, :symbols]
            totals = encoded.totals[:batch]
        else:
            least, durations = 0, durations.to(self.device, torch.int64)
            encoded.frames.zero_()
            encoded.frames[:batch, :symbols] = durations
            totals = durations.sum(1)
        size = max(*totals.tolist(), 1) if size is None else size  # waits for the device
        mel, lengths = run.decode(size, least)
        mel, lengths = mel[:batch, :size].transpose(1, 2), lengths[:batch].clamp(max=size)
        return Prediction(mel, lengths, encoded.log_durations[:batch, :symbols], durations)

    def _prepared(self, text, lengths, speed, emphasis, pauses) -> _Launched:
        request = Request(*text.shape, self.device)
        request.fill(text, lengths, speed, emphasis, pauses)
        return _Launched(self.network, request)


class _Launched:
    """One call of the network whose first half has been queued."""

    def __init__(self, network: KernelNetwork, request: Request) -> None:
        self.network = network
        self.encoded = encode(network, request)

    def decode(self, size: int, least: int) -> tuple[Tensor, Tensor]:
        return decode(self.network, self.encoded, size, least)


class Encoded(NamedTuple):
    """The first half's results."""

    hidden: Tensor  # (B, T, C)
    log_durations: Tensor  # float32 (B, T)
    frames: Tensor  # int32 (B, T), what the second half reads
    durations: Tensor  # int64 (B, T), with the one frame of an item that has none
    totals: Tensor  # int64 (B,), their sums


def encode(network: KernelNetwork, request: Request) -> Encoded:
    hidden, logs, frames = network.encode(
        request.text, request.lengths, request.speed, request.emphasis, request.pauses
    )
    totals = frames.sum(1)
    durations = frames.long()
    durations[:, 0] += totals == 0
    return Encoded(hidden, logs, frames, durations, totals.clamp(min=1))


def decode(network: KernelNetwork, encoded: Encoded, size: int, least: int) -> tuple[Tensor, Tensor]:
    """Spectrogram (B, size, M) and int64 lengths (B,)."""
    mel, lengths = network.decode(encoded.hidden, encoded.frames, size, least)
    return mel, lengths.long()


class GraphEngine(KernelEngine):
    """Two graphs a size: text to durations, then, when the host knows how many frames there are, to the spectrogram.

    Results are overwritten by the next call; clone what should stay. At most ``keep`` sizes of batches of texts are
    held, the last used, each with its sizes of spectrograms; all work in one memory, of the largest's size.
    """

    form = "graph"

    def __init__(
        self,
        model: FastSpeech,
        library_rows: int | None = None,
        text_buckets: Sequence[int] = TEXT_BUCKETS,
        frame_buckets: Sequence[int] = FRAME_BUCKETS,
        batch_buckets: Sequence[int] = BATCH_BUCKETS,
        keep: int = 48,
    ) -> None:
        super().__init__(model, library_rows)
        if self.device.type != "cuda":
            raise ValueError(f"graphs need a CUDA device, got {self.device}")
        for sizes in (text_buckets, frame_buckets, batch_buckets):
            if not sizes or any(a >= b for a, b in itertools.pairwise([0, *sizes])):
                raise ValueError(f"buckets must grow from above 0, got {tuple(sizes)}")
        self.text_buckets, self.frame_buckets, self.keep = tuple(text_buckets), tuple(frame_buckets), keep
        self.batch_buckets, self.pool = tuple(batch_buckets), torch.cuda.graph_pool_handle()
        self.sizes: dict[tuple[int, int], _Graphs] = {}

    def _prepared(self, text, lengths, speed, emphasis, pauses) -> _Graphs:
        key = (bucket(text.shape[0], self.batch_buckets), bucket(text.shape[1], self.text_buckets))
        graphs = self.sizes.pop(key, None)
        graphs = graphs or _Graphs(self.network, *key, self.device, self.frame_buckets, self.pool)
        self.sizes[key] = graphs  # the last used comes last
        while len(self.sizes) > self.keep:
            del self.sizes[next(iter(self.sizes))]
        graphs.start(text, lengths, speed, emphasis, pauses)
        return graphs


class _Graphs:
    """The graphs of one batch size and one bucket of symbols."""

    def __init__(
        self, network: KernelNetwork, batch: int, symbols: int, device: torch.device, frame_buckets: Sequence[int],
        pool: Any,
    ) -> None:  # fmt: skip
        self.network, self.frame_buckets, self.pool = network, frame_buckets, pool
        self.request = Request(batch, symbols, device)
        self.request.lengths.fill_(1)
        self.request.speed.fill_(1)
        self.staging = Request(batch, symbols, torch.device("cpu"), pinned=True)
        self.sent = torch.cuda.Event()
        self.first = GraphedModel(lambda: encode(network, self.request), pool=pool)
        self.encoded = self.first.output
        self.second: dict[tuple[int, int], GraphedModel] = {}

    def start(self, text, lengths, speed, emphasis, pauses) -> None:
        if text.is_cuda:
            self.request.fill(text, lengths, speed, emphasis, pauses)
        else:
            self.sent.synchronize()  # the copy of the call before has read it
            self.staging.fill(text, lengths, speed, emphasis, pauses)
            self.staging.send(self.request)
            self.sent.record()
        self.first()

    def decode(self, size: int, least: int) -> tuple[Tensor, Tensor]:
        key = (bucket(size, self.frame_buckets), least)
        graph = self.second.get(key)
        if graph is None:
            graph = GraphedModel(lambda: decode(self.network, self.encoded, *key), pool=self.pool)
            self.second[key] = graph
        return graph()


def build(model: FastSpeech, form: str = "auto", **options: Any) -> Engine:
    """An engine of a model that is where and in the type it shall run. ValueError where a form cannot be.

    "auto": graph on a GPU in half precision for models that kernels take, else plain.
    """
    if form == "auto":
        weight = model.embedding.weight
        able = weight.is_cuda and torch.cuda.get_device_capability(weight.device) >= (8, 0)
        form = "graph" if able and refusal(model) is None else "plain"
    if form == "plain":
        return PlainEngine(model)
    if form not in FORMS:
        raise ValueError(f"unknown form {form!r}; known: auto, {', '.join(FORMS)}")
    if form == "tensorrt":
        from ..tensorrt.engine import TensorRTEngine

        return TensorRTEngine(model, **options)
    if torch_ops.device_library(model.embedding.weight) is None:
        raise ValueError(f"form {form} needs a CUDA device, got {model.embedding.weight.device}")
    return (KernelEngine if form == "kernels" else GraphEngine)(model, **options)
