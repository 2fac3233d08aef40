"""The whole network on the kernels: half precision, channels last, five launches a block and no copy between them.

B batch, T symbols, F frames, L either, C channels, M mels.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from ..model import Block, FastSpeech, Stack
from . import launches, torch_ops

EPSILON = 1e-5  # of every norm


def refusal(model: FastSpeech) -> str | None:
    """Why the kernels do not take a model, if they do not."""
    config, dtype = model.config, model.embedding.weight.dtype
    if dtype not in torch_ops.HALF_TYPES:
        return f"the kernels compute in fp16 or bf16, got {dtype}"
    if config.head_channels != 64:
        return f"the kernels take heads of 64 channels, got {config.head_channels}"
    if config.channels % 32 or config.channels > 512:
        return f"the kernels take channels in multiples of 32 up to 512, got {config.channels}"
    if config.feed_forward % 8 or config.num_mels % 8:
        return f"the kernels take sizes in multiples of 8, got {config.feed_forward} and {config.num_mels} mels"
    if config.predictor not in (128, 256):
        return f"the kernels take predictors of 128 or 256 channels, got {config.predictor}"
    return None


def taps_first(weight: Tensor) -> Tensor:
    """A convolution's (O, I, K) or a linear layer's (O, I) weight as the kernels read it, (O, K, I)."""
    return (weight[:, :, None] if weight.dim() == 2 else weight).transpose(1, 2).contiguous()


class KernelNetwork:
    """A model's two halves as launches; its weights are taken over in their type and on their device.

    Calls queue up on the current stream; one object serves one stream at a time, since counters are shared.
    ``library_rows``: from that many rows (B * L) on, the convolutions are cuDNN's and only what follows is a kernel;
    None: never. ValueError where kernels do not take the model.
    """

    def __init__(self, model: FastSpeech, library_rows: int | None = None) -> None:
        if reason := refusal(model):
            raise ValueError(reason)
        self.config, self.library_rows = model.config, library_rows
        self.table = model.embedding.weight.detach().contiguous()
        self.encoder, self.decoder = self._stack(model.encoder), self._stack(model.decoder)
        predictor = model.durations
        layers = (predictor.first, predictor.first_norm, predictor.second, predictor.second_norm)
        self.predictor = [part for layer in layers for part in (_weight(layer), layer.bias.detach())]
        self.predictor += [predictor.output.weight.detach()[0].contiguous(), predictor.output.bias.detach()]
        self.mel = _pair(model.mel)
        self._arrived = [torch.zeros(0, device=self.table.device, dtype=torch.int32)]

    @staticmethod
    def _stack(stack: Stack) -> list[dict[str, tuple[Tensor, ...]]]:
        def parts(block: Block) -> dict[str, tuple[Tensor, ...]]:
            attention, forward = block.attention, block.feed_forward
            return {
                "qkv": _pair(attention.qkv),
                "output": (*_pair(attention.output), *_pair(attention.norm)),
                "first": _pair(forward.first),
                "second": (*_pair(forward.second), *_pair(forward.norm)),
            }

        return [parts(block) for block in stack.blocks]

    def encode(
        self,
        text: Tensor,
        lengths: Tensor,
        speed: Tensor | None = None,
        emphasis: Tensor | None = None,
        pauses: Tensor | None = None,
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Hidden states (B, T, C), float32 log(frames + 1) and int32 whole frames (B, T) of symbols (B, T), int32.

        An item without frames keeps none here; `decode` gives it one.
        """
        x = self._run(self.encoder, torch_ops.embed(self.table, text, lengths), lengths)
        return x, *torch_ops.predict_durations(x, self.predictor, lengths, speed, emphasis, pauses, EPSILON)

    def decode(self, x: Tensor, durations: Tensor, size: int, least: int = 1) -> tuple[Tensor, Tensor]:
        """Spectrogram (B, size, M), 0 beyond the int32 lengths (B,), of hidden states and whole frames (B, T)."""
        x, lengths = torch_ops.regulate(x, durations, size, least, True)
        x = self._run(self.decoder, x, lengths)
        return torch_ops.convolution(x, *self.mel, lengths), lengths

    def _run(self, blocks: list[dict[str, tuple[Tensor, ...]]], x: Tensor, lengths: Tensor) -> Tensor:
        heads = self.config.heads
        library = self.library_rows is not None and x.shape[0] * x.shape[1] >= self.library_rows
        arrived = self._counters(x)
        for block in blocks:
            found = torch_ops.attention64(torch_ops.convolution(x, *block["qkv"], lengths), lengths, heads)
            weight, bias, gain, shift = block["output"]
            x = torch_ops.convolution_norm(
                found, weight, bias, x, gain, shift, lengths, epsilon=EPSILON, arrived=arrived
            )
            if library:
                x = self._library_forward(block, x, lengths)
                continue
            hidden = torch_ops.convolution(x, *block["first"], lengths, relu=True)
            weight, bias, gain, shift = block["second"]
            x = torch_ops.convolution_norm(
                hidden, weight, bias, x, gain, shift, lengths, epsilon=EPSILON, arrived=arrived
            )
        return x

    def _library_forward(self, block: dict[str, tuple[Tensor, ...]], x: Tensor, lengths: Tensor) -> Tensor:
        weight, bias = block["first"]
        hidden = _convolve(x, weight, bias, relu=True)
        # The second convolution sees one row beyond an item's end, which has to be 0; the others do not matter.
        rows = torch.arange(len(x), device=x.device)
        ends = lengths.long().clamp(max=x.shape[1] - 1)
        hidden[rows, ends] *= (lengths >= x.shape[1])[:, None].to(x.dtype)
        weight, bias, gain, shift = block["second"]
        found = _convolve(hidden, weight, None, relu=False)
        return torch_ops.residual_norm(found, bias, x, gain, shift, lengths, EPSILON)

    def _counters(self, x: Tensor) -> Tensor:
        """Zeros, made once for the largest input so far. Smaller ones stay: graphs were captured with them."""
        needed = launches.tickets(x.shape[0], x.shape[1])
        if len(self._arrived[-1]) < needed:
            self._arrived.append(torch.zeros(2 * needed, device=x.device, dtype=torch.int32))
        return self._arrived[-1]


def _weight(layer: torch.nn.Module) -> Tensor:
    weight = layer.weight.detach()
    return taps_first(weight) if weight.dim() > 1 else weight.contiguous()


def _pair(layer: torch.nn.Module) -> tuple[Tensor, Tensor]:
    return _weight(layer), layer.bias.detach().contiguous()


def _convolve(x: Tensor, weight: Tensor, bias: Tensor | None, relu: bool) -> Tensor:
    """The library's convolution of x (B, L, I) by (O, K, I), with channels last: nothing is moved."""
    image, kernel = x.transpose(1, 2)[:, :, None], weight.transpose(1, 2)[:, :, None]
    if relu and x.is_cuda:
        y = torch.cudnn_convolution_relu(image, kernel, bias, (1, 1), (0, 1), (1, 1), 1)
    else:
        y = F.conv2d(image, kernel, bias, padding=(0, 1))
        y = y.relu_() if relu else y
    return y[:, :, 0].transpose(1, 2)
