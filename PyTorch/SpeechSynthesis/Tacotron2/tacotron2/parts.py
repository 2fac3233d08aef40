"""The models cut into parts that other runtimes can run: encoder, one decoder step, postnet, WaveGlow.

Every part is a function of tensors alone, with fixed names and dynamic sizes: B batch, T symbols, F frames, P positions
of WaveGlow (F times hop_length / group), M mels, E encoder width, A attention width, H width of the RNNs, G group.
The caller draws the prenet's dropout and WaveGlow's noise, loops over steps, and looks at the gate.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from .masking import length_mask
from .model import Postnet, Tacotron2
from .stepper import Source, State, Stepper
from .waveglow import WaveGlow

LARGEST = 16384  # of a dimension that varies


@dataclass(frozen=True)
class Part:
    """``inputs``: for each input its dimensions, a name for one that varies ("32F" is 32 times F), a number else."""

    module: nn.Module
    inputs: dict[str, tuple[str | int, ...]]
    outputs: tuple[str, ...]

    def dynamic(self) -> tuple[dict[int, Any], ...]:
        """For torch.export: the dimensions of each input that may vary."""
        symbols = {name: torch.export.Dim(name, min=1, max=LARGEST) for name in ("B", "T", "F")}

        def dimension(size: str) -> Any:
            return int(size[:-1]) * symbols[size[-1]] if len(size) > 1 else symbols[size]

        return tuple(
            {place: dimension(size) for place, size in enumerate(shape) if isinstance(size, str)}
            for shape in self.inputs.values()
        )

    def example(self, batch: int, length: int, seed: int = 0, device: str | torch.device = "cpu") -> tuple[Tensor, ...]:
        """Inputs of so many items, symbols and frames, whose own lengths differ."""
        generator = torch.Generator().manual_seed(seed)
        sizes = {"B": batch, "T": length, "F": length}
        found = []
        for name, shape in self.inputs.items():
            size = [int(s[:-1] or 1) * sizes[s[-1]] if isinstance(s, str) else s for s in shape]
            if name == "lengths":
                value = (length - torch.arange(batch)).clamp(min=1)
            elif name == "text":
                value = torch.randint(1, self.module.num_symbols, size, generator=generator)
            elif name == "keep":
                value = torch.randint(2, size, generator=generator) * 2.0
            else:
                value = torch.randn(size, generator=generator) * 0.5
            found.append(value.to(device))
        return tuple(found)


class SymbolicLSTM(nn.Module):
    """A one-layer LSTM (B, L, C) -> (B, L, H) as ONNX's operator: only for export."""

    def __init__(self, lstm: nn.LSTM):
        super().__init__()
        self.hidden = lstm.hidden_size

        def reordered(value: Tensor) -> Tensor:
            enter, forget, value, leave = value.detach().chunk(4)
            return torch.cat((enter, leave, forget, value))[None]

        self.register_buffer("weight", reordered(lstm.weight_ih_l0))
        self.register_buffer("recurrence", reordered(lstm.weight_hh_l0))
        both = torch.cat((reordered(lstm.bias_ih_l0), reordered(lstm.bias_hh_l0)), 1)
        self.register_buffer("biases", both)

    def forward(self, x: Tensor) -> tuple[Tensor, None]:
        turned = x.transpose(0, 1)
        found = torch.onnx.ops.symbolic(
            "LSTM",
            (turned, self.weight, self.recurrence, self.biases),
            {"hidden_size": self.hidden},
            dtype=x.dtype,
            shape=(turned.shape[0], 1, turned.shape[1], self.hidden),
            version=14,
        )
        return found[:, 0].transpose(0, 1), None


class LoopLSTM(nn.Module):
    """The same as a loop of the graph, which AOTInductor compiles for every length."""

    def __init__(self, lstm: nn.LSTM):
        super().__init__()
        self.hidden = lstm.hidden_size
        self.register_buffer("weight", lstm.weight_ih_l0.detach())
        self.register_buffer("recurrence", lstm.weight_hh_l0.detach())
        self.register_buffer("bias", (lstm.bias_ih_l0 + lstm.bias_hh_l0).detach())

    def forward(self, x: Tensor) -> tuple[Tensor, None]:
        from torch._higher_order_ops.while_loop import while_loop

        recurrence = self.recurrence
        offsets = F.linear(x, self.weight, self.bias).transpose(0, 1).contiguous()  # L B 4H
        hidden = offsets.new_zeros(offsets.shape[1], self.hidden)
        found = offsets.new_zeros(offsets.shape[0], offsets.shape[1], self.hidden)

        def goes_on(step: Tensor, hidden: Tensor, cell: Tensor, found: Tensor, offsets: Tensor) -> Tensor:
            return step < offsets.shape[0]

        def advance(
            step: Tensor, hidden: Tensor, cell: Tensor, found: Tensor, offsets: Tensor
        ) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
            gates = torch.index_select(offsets, 0, step.view(1))[0] + hidden @ recurrence.T
            enter, forget, value, leave = gates.chunk(4, 1)
            cell = forget.sigmoid() * cell + enter.sigmoid() * value.tanh()
            hidden = leave.sigmoid() * cell.tanh()
            # What a body gives back must not be what it was given.
            return step + 1, hidden, cell, torch.index_copy(found, 0, step.view(1), hidden[None]), offsets.clone()

        start = torch.zeros((), dtype=torch.int64, device=x.device)
        found = while_loop(goes_on, advance, (start, hidden, hidden.clone(), found, offsets))[3]
        return found.transpose(0, 1), None


class EncoderPart(nn.Module):
    """Symbols (B, T) and lengths (B,) -> memory (B, T, E) and what attention makes of it once (B, A, T)."""

    def __init__(self, model: Tacotron2, lstm: Callable[[nn.LSTM], nn.Module] | None):
        super().__init__()
        self.num_symbols = model.config.num_symbols
        self.encoder = copy.deepcopy(model.encoder)
        self.attention = model.decoder.attention
        if lstm is not None:
            self.encoder.forward_lstm = lstm(self.encoder.forward_lstm)
            self.encoder.backward_lstm = lstm(self.encoder.backward_lstm)

    def forward(self, text: Tensor, lengths: Tensor) -> tuple[Tensor, Tensor]:
        memory = self.encoder(text, lengths)
        return memory, self.attention.project(memory)


class StepPart(nn.Module):
    """The state after a step -> the next one, whose frame is that step's, and the gate's logit."""

    def __init__(self, model: Tacotron2):
        super().__init__()
        self.stepper = Stepper(model)

    def forward(
        self,
        frame: Tensor,
        attention_hidden: Tensor,
        attention_cell: Tensor,
        decoder_hidden: Tensor,
        decoder_cell: Tensor,
        context: Tensor,
        history: Tensor,
        memory: Tensor,
        projected: Tensor,
        lengths: Tensor,
        keep: Tensor,
    ) -> tuple[Tensor, ...]:
        state = State(frame, attention_hidden, attention_cell, decoder_hidden, decoder_cell, context, history)
        offsets = tuple(bias.expand(memory.shape[0], -1) for bias in self.stepper.biases)
        source = Source(memory, projected, ~length_mask(lengths, memory.shape[1]), offsets)
        state, gate = self.stepper.step(state, source, keep)
        return (*state, gate)


class PostnetPart(nn.Module):
    """Spectrograms (B, M, F) and lengths (B,) -> refined ones, zero behind each item's end."""

    def __init__(self, postnet: Postnet):
        super().__init__()
        self.postnet = postnet

    def forward(self, mel: Tensor, lengths: Tensor) -> Tensor:
        return self.postnet(mel, length_mask(lengths, mel.shape[2])[:, None])


class WaveGlowPart(nn.Module):
    """Spectrograms (B, M, F) and noise (B, G, P), already scaled -> sound (B, S)."""

    def __init__(self, model: WaveGlow):
        super().__init__()
        self.model = copy.deepcopy(model).prepare()

    def forward(self, mel: Tensor, noise: Tensor) -> Tensor:
        return self.model.inverse(mel, noise)


def tacotron2_parts(model: Tacotron2, lstm: Callable[[nn.LSTM], nn.Module] | None = None) -> dict[str, Part]:
    """The parts of an acoustic model; ``lstm`` writes its encoder's recurrence for a target."""
    c = model.config
    state = {
        "frame": ("B", c.num_mels),
        "attention_hidden": ("B", c.rnn),
        "attention_cell": ("B", c.rnn),
        "decoder_hidden": ("B", c.rnn),
        "decoder_cell": ("B", c.rnn),
        "context": ("B", c.encoder),
        "history": ("B", 2, "T"),
    }
    source = {
        "memory": ("B", "T", c.encoder),
        "projected": ("B", c.attention, "T"),
        "lengths": ("B",),
        "keep": ("B", c.prenet_layers, c.prenet),
    }
    encoder = EncoderPart(model, lstm)
    after = tuple(f"next_{name}" for name in state)
    return {
        "encoder": Part(encoder, {"text": ("B", "T"), "lengths": ("B",)}, ("memory", "projected")),
        "step": Part(StepPart(model), state | source, (*after, "gate")),
        "postnet": Part(PostnetPart(model.postnet), {"mel": ("B", c.num_mels, "F"), "lengths": ("B",)}, ("refined",)),
    }


def waveglow_parts(model: WaveGlow) -> dict[str, Part]:
    """A WaveGlow, whole."""
    c = model.config
    inputs = {"mel": ("B", c.num_mels, "F"), "noise": ("B", c.group, f"{c.positions_per_frame}F")}
    return {"waveglow": Part(WaveGlowPart(model), inputs, ("audio",))}
