"""The network as TensorRT engines behind the call that every form has: one engine a bucket of lengths, made and kept
when first needed. B batch, T symbols, F frames."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from ..cuda import torch_ops
from ..cuda.engine import bucket, check, on
from ..model import FastSpeech, Prediction
from . import cache, layers, network, plugins

TEXT_BUCKETS = (32, 64, 96, 128, 256, 512)
FRAME_BUCKETS = (256, 512, 768, 1024, 2048, 4096)


class TensorRTEngine:
    """Encoder and decoder engines for batches up to ``batch``. Needs CUDA and TensorRT (or TensorRT-RTX, without
    plugins, on the GPUs that it supports); ValueError or ImportError where one is missing."""

    form = "tensorrt"

    def __init__(
        self,
        model: FastSpeech,
        batch: int = 8,
        text_buckets: Sequence[int] = TEXT_BUCKETS,
        frame_buckets: Sequence[int] = FRAME_BUCKETS,
        watch: bool = False,
    ) -> None:
        self.trt = layers.load()
        weight = model.embedding.weight
        if not weight.is_cuda:
            raise ValueError(f"form tensorrt needs a CUDA device, got {weight.device}")
        self.config, self.device, self.dtype = model.config, weight.device, weight.dtype
        self.batch, self.watch = batch, watch
        self.text_buckets, self.frame_buckets = tuple(text_buckets), tuple(frame_buckets)
        self.weights = {name: value.detach().float().cpu().numpy() for name, value in model.state_dict().items()}
        self.plugins = None
        if not layers.is_rtx(self.trt):
            self.plugins = plugins.Plugins(self.trt, self._library)
            plugins.register(self.trt, self._library)
        self.runtime = self.trt.Runtime(self.trt.Logger(self.trt.Logger.WARNING))
        self.contexts: dict[tuple[str, int], Any] = {}
        self.lock = threading.RLock()  # a context holds the addresses of one call

    def _library(self) -> Any:
        return torch_ops.device_library(torch.empty(0, device=self.device))[0]

    def shapes(self, half: str, size: int) -> network.Shapes:
        """The range of one bucket: from the next smaller one to its size."""
        sizes = self.text_buckets if half == "encoder" else self.frame_buckets
        below = max([other for other in sizes if other < size], default=0)
        return network.Shapes(self.batch, size, below + 1, max(self.text_buckets))

    def context(self, half: str, length: int) -> Any:
        """The execution context of the smallest bucket that ``length`` fits."""
        sizes = self.text_buckets if half == "encoder" else self.frame_buckets
        size = bucket(length, sizes)
        if (half, size) not in self.contexts:
            shapes = self.shapes(half, size)
            properties = torch.cuda.get_device_properties(self.device)
            gpu = f"{properties.name} {properties.major}.{properties.minor}"
            dtype = str(self.dtype).removeprefix("torch.")

            def make() -> bytes:
                return network.build(
                    self.trt, half, self.config, self.weights, shapes, dtype, self.plugins, watch=self.watch
                )

            key = cache.key(self.trt, gpu, half, self.config, self.weights, shapes, dtype, self.plugins is not None)
            engine = self.runtime.deserialize_cuda_engine(cache.engine(key | {"watch": self.watch}, make))
            if engine is None:
                raise ValueError(f"{self.trt.__name__} cannot run its engine on {gpu}; its log says why")
            self.contexts[half, size] = (engine, engine.create_execution_context())
        return self.contexts[half, size]

    def run(self, half: str, length: int, inputs: dict[str, Tensor]) -> dict[str, Tensor]:
        """All outputs of one half, queued on the current stream. ``length``: symbols or frames."""
        engine, context = self.context(half, length)
        inputs = {name: value.contiguous() for name, value in inputs.items()}
        types = {
            self.trt.float32: torch.float32, self.trt.float16: torch.float16, self.trt.bfloat16: torch.bfloat16,
            self.trt.int32: torch.int32,
        }  # fmt: skip
        for name, value in inputs.items():
            if types[engine.get_tensor_dtype(name)] != value.dtype:
                raise ValueError(f"{name} must be {engine.get_tensor_dtype(name)}, got {value.dtype}")
            context.set_input_shape(name, tuple(value.shape))
            context.set_tensor_address(name, value.data_ptr())
        outputs = {}
        for number in range(engine.num_io_tensors):
            name = engine.get_tensor_name(number)
            if name in inputs:
                continue
            shape, dtype = tuple(context.get_tensor_shape(name)), types[engine.get_tensor_dtype(name)]
            outputs[name] = torch.empty(shape, dtype=dtype, device=self.device)
            context.set_tensor_address(name, outputs[name].data_ptr())
        if not context.execute_async_v3(torch.cuda.current_stream(self.device).cuda_stream):
            raise RuntimeError(f"TensorRT could not run the {half}; its log says why")
        return outputs

    def encode(
        self, text: Tensor, lengths: Tensor, speed: float | Tensor, emphasis: Tensor | None, pauses: Tensor | None
    ) -> dict[str, Tensor]:
        shape, device = text.shape, self.device
        if not isinstance(speed, Tensor):
            speed = torch.full(shape[:1], float(speed), device=device)
        given = {
            "text": text.to(device, torch.int32),
            "lengths": lengths.to(device, torch.int32),
            "speed": speed.to(device, torch.float32),
            "emphasis": torch.ones(shape, device=device) if emphasis is None else emphasis.to(device, torch.float32),
            "pauses": torch.zeros(shape, dtype=torch.int32, device=device)
            if pauses is None
            else pauses.to(device, torch.int32),
        }
        return self.run("encoder", shape[1], given)

    def decode(self, hidden: Tensor, durations: Tensor, size: int) -> dict[str, Tensor]:
        if self.plugins is not None:
            frames = torch.empty(size, dtype=torch.int32, device=self.device)
            return self.run("decoder", size, {"hidden": hidden, "durations": durations, "frames": frames})
        expanded, lengths = torch_ops.regulate(hidden, durations, size)
        found = self.run("decoder", size, {"expanded": expanded, "mel_lengths": lengths})
        return found | {"mel_lengths": lengths}

    def __call__(self, text, text_lengths, durations=None, size=None, speed=1.0, emphasis=None, pauses=None):
        with self.lock, on(self.device), torch.inference_mode():
            return self._speak(text, text_lengths, durations, size, speed, emphasis, pauses)

    def _speak(self, text, text_lengths, durations, size, speed, emphasis, pauses) -> Prediction:
        check(text, text_lengths, self.config.num_symbols, speed)
        if len(text) > self.batch or text.shape[1] > self.text_buckets[-1]:
            raise ValueError(
                f"engines take up to {self.batch} texts of {self.text_buckets[-1]} symbols, got {tuple(text.shape)}"
            )
        encoded = self.encode(text, text_lengths, speed, emphasis, pauses)
        if durations is None:
            durations = encoded["durations"]
            first = torch.arange(text.shape[1], device=self.device) == 0
            durations = torch.where(first & (durations.sum(1, keepdim=True) == 0), 1, durations)
        durations = durations.to(self.device, torch.int32)
        size = max(int(durations.sum(1).max()), 1) if size is None else size
        found = self.decode(encoded["hidden"], durations, size)
        return Prediction(
            found["mel"].transpose(1, 2), found["mel_lengths"].long(), encoded["log_durations"], durations.long()
        )
