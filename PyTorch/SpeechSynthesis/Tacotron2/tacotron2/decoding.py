"""Speaking with Tacotron 2: frames one after the other, each from the one before, until the gate says stop.

`decode` runs `BLOCK` steps at a time on tensors of fixed shape, without any word from the device between them, so that
on a GPU a block is one CUDA graph; after each block the gates are looked at. `decode_plainly` is the same in the
model's own layers, one step at a time: the reference, and what a first implementation would be.

The prenet's dropout stays on, since without it the voice is not the one that was trained; it comes from a generator, so
that the same seed speaks the same.

B batch, T symbols, F frames, M mels, E encoder width, A attention width, P prenet width, H width of the RNNs, K steps.
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from . import fused_decoding
from .fused_decoding import FusedStepper
from .masking import length_mask
from .model import Tacotron2
from .stepper import Block, Stepper

BLOCK = 32  # steps between two looks at the gates
LIMIT = 2000  # frames
ENGINES = ("auto", "steps", "compiled", "fused")
GRAPHS = 8  # shapes of which CUDA graphs are kept
Generators = torch.Generator | Sequence[torch.Generator]


@dataclass(frozen=True)
class Decoded:
    """What was said: spectrograms before and after the postnet (B, M, F), zero behind each item's end."""

    mel: Tensor
    refined: Tensor
    lengths: Tensor  # (B,) int64 on the model's device
    alignments: Tensor  # (B, F, T)
    reached_limit: list[bool]  # whether an item had to be cut because its gate never fired


def dropout(model: Tacotron2, steps: int, batch: int, generator: Generators) -> Tensor:
    """Factors of the prenet's dropout, (steps, B, layers, P): 0 or 1 / (1 - p), p to the nearest 1/256.

    With one generator per item, an item's factors do not depend on the others in the batch. Drawing steps in several
    calls gives what one call gives, if the generators are on the CPU.
    """
    return _factors(model, _bytes(model, steps, batch, generator))


def _bytes(model: Tacotron2, steps: int, batch: int, generator: Generators) -> Tensor:
    """What `dropout` decides by, uint8 (steps, B, layers, P) where the generator is: eight to a random number."""
    config = model.config
    width = config.prenet_layers * config.prenet
    words = -(-width // 8)

    def draw(generator: torch.Generator, *size: int) -> Tensor:
        drawn = torch.empty(*size, words, dtype=torch.int64, device=generator.device)
        return drawn.random_(-(2**63), None, generator=generator)

    if isinstance(generator, torch.Generator):
        drawn = draw(generator, steps, batch)
    elif len(generator) != batch:
        raise ValueError(f"{len(generator)} generators for a batch of {batch}")
    else:
        drawn = torch.stack([draw(one, steps) for one in generator], 1)
    return drawn.view(torch.uint8)[..., :width].unflatten(2, (config.prenet_layers, config.prenet))


def _factors(model: Tacotron2, drawn: Tensor) -> Tensor:
    weight, rate = model.decoder.mel.weight, round(model.config.dropout * 256)
    return (drawn.to(weight.device) >= rate).to(weight.dtype) / (1 - rate / 256)


class GraphedBlock:
    """`Stepper.block` for one batch size and text length as a CUDA graph: a block is launched as a whole."""

    def __init__(self, stepper: Stepper, memory: Tensor, lengths: Tensor, keep: Tensor):
        self.source, self.keep = stepper.source(memory, lengths), keep.clone()
        self.stepper, self.state = stepper, stepper.start(memory)
        with torch.cuda.device(memory.device):
            self._capture()

    def _capture(self) -> None:
        stepper = self.stepper
        stream = torch.cuda.Stream()
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            stepper.block(self.state, self.source, self.keep)  # all of it: a kernel made for a step's addresses, too
        torch.cuda.current_stream().wait_stream(stream)
        self.graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(self.graph):
            state, self.found = stepper.block(self.state, self.source, self.keep)
            for own, new in zip(self.state, state, strict=True):
                own.copy_(new)

    def start(self, memory: Tensor, lengths: Tensor) -> None:
        """Begin another text of the same shape."""
        fresh = self.stepper.source(memory, lengths)
        for own, new in zip(self.source[:3], fresh[:3], strict=True):
            own.copy_(new)
        for own in self.state:
            own.zero_()

    def __call__(self, keep: Tensor) -> Block:
        """The next steps; the result's tensors are overwritten by the next call."""
        self.keep.copy_(keep)
        self.graph.replay()
        return self.found


class FastDecoder:
    """Decodes with the weights that ``model`` has now.

    ``engine``: "steps" is plain PyTorch, "compiled" passes each step through torch.compile, "fused" has kernels of its
    own (Triton); "auto" is "fused" where the kernels apply and the weights have 16 bits (in float32 plain steps in a
    graph are faster), else "steps". ``graphs``: blocks are CUDA graphs, by default where there is CUDA.
    """

    def __init__(self, model: Tacotron2, engine: str = "auto", graphs: bool | None = None, block: int = BLOCK):
        if block < 1:
            raise ValueError(f"a block must have at least one step, got {block}")
        if engine not in ENGINES:
            raise ValueError(f"unknown engine {engine!r}; known: {', '.join(ENGINES)}")
        applies = fused_decoding.applies(model)
        if engine == "fused" and not applies:
            raise ValueError(
                "engine fused needs a CUDA device (and triton), fp32, bf16 or fp16, and rnn a multiple of 4"
            )
        if engine == "auto":
            engine = "fused" if applies and model.decoder.mel.weight.dtype != torch.float32 else "steps"
        self.engine = engine
        self.model, self.steps = model, block
        self.stepper = FusedStepper(model) if self.engine == "fused" else Stepper(model)
        if engine == "compiled":
            self.stepper.step = torch.compile(self.stepper.step, dynamic=False)
        self.graphs = model.decoder.mel.weight.is_cuda if graphs is None else graphs
        self.captured: dict[tuple[int, int], GraphedBlock] = {}

    def blocks(self, memory: Tensor, lengths: Tensor, generator: Generators, limit: int) -> Iterator[Block]:
        """Steps without end but the limit, `steps` at a time; whoever has enough stops asking.

        A block's tensors are overwritten by the next one.
        """
        batch, width = memory.shape[:2]
        if self.graphs:  # of few shapes; more memory than the text needs is masked
            memory = F.pad(memory, (0, 0, 0, -width % 32))
        run = self._runner(memory, lengths)
        drawn = _bytes(self.model, self.steps, batch, generator)
        for first in range(0, limit, self.steps):
            keep = _factors(self.model, drawn)
            found = run(keep if self.graphs else keep[: limit - first])
            drawn = _bytes(self.model, self.steps, batch, generator)  # while a GPU is at work
            yield Block(*(part[: limit - first] for part in found[:2]), found.weights[: limit - first, :, :width])

    def _runner(self, memory: Tensor, lengths: Tensor) -> Callable[[Tensor], Block]:
        if not self.graphs:
            source, state = self.stepper.source(memory, lengths), self.stepper.start(memory)

            def run(keep: Tensor) -> Block:
                nonlocal state
                state, found = self.stepper.block(state, source, keep)
                return found

            return run
        shape = (memory.shape[0], memory.shape[1])
        graphed = self.captured.pop(shape, None)
        if graphed is None:
            config = self.model.config
            size = (self.steps, shape[0], config.prenet_layers, config.prenet)
            graphed = GraphedBlock(self.stepper, memory, lengths, memory.new_ones(size))
        self.captured[shape] = graphed  # the last used comes last
        while len(self.captured) > GRAPHS:
            del self.captured[next(iter(self.captured))]
        graphed.start(memory, lengths)
        return graphed


class Stops:
    """Which items have ended where, told by their gates."""

    def __init__(self, batch: int, threshold: float, limit: int):
        if not 0 < threshold < 1:
            raise ValueError(f"the gate's threshold must be within 0 and 1, got {threshold}")
        if limit < 1:
            raise ValueError(f"the limit must be at least one frame, got {limit}")
        self.logit, self.limit = math.log(threshold / (1 - threshold)), limit
        self.frames = 0
        self.ends: list[int | None] = [None] * batch

    def see(self, gates: Tensor) -> bool:
        """Whether all have ended, after the gate logits (K, B) of the next K frames; the frame that fires counts."""
        for item, row in enumerate((gates > self.logit).T.tolist()):
            if self.ends[item] is None and True in row:
                self.ends[item] = self.frames + row.index(True) + 1
        self.frames += len(gates)
        return None not in self.ends

    @property
    def lengths(self) -> list[int]:
        return [self.frames if end is None else end for end in self.ends]

    @property
    def reached_limit(self) -> list[bool]:
        return [end is None for end in self.ends]


def check_text(model: Tacotron2, text: Tensor, lengths: Tensor) -> None:
    """ValueError for symbols the model does not have, or lengths that do not fit; before anything runs."""
    if text.dim() != 2 or lengths.shape != (len(text),) or not text.numel():
        raise ValueError(f"expected text (B, T) and lengths (B,), got {tuple(text.shape)} and {tuple(lengths.shape)}")
    low, high = int(text.min()), int(text.max())
    if low < 0 or high >= model.config.num_symbols:
        raise ValueError(f"symbols {low}..{high} are not within the {model.config.num_symbols} of the model")
    if int(lengths.min()) < 1 or int(lengths.max()) > text.shape[1]:
        raise ValueError(f"lengths must be within 1 and {text.shape[1]}, got {lengths.tolist()}")


@torch.no_grad()
def decode(
    decoder: Tacotron2 | FastDecoder,
    text: Tensor,
    lengths: Tensor,
    *,
    generator: Generators | None = None,
    threshold: float = 0.5,
    limit: int = LIMIT,
) -> Decoded:
    """The spectrograms of symbols (B, T), each as long as its gate says or ``limit`` frames, then warned of.

    ``generator``: of the prenet's dropout, by default one of seed 0; give one per item where an item's sound must not
    depend on its batch. The model must be in evaluation mode.
    """
    fast = decoder if isinstance(decoder, FastDecoder) else FastDecoder(decoder)
    model = fast.model
    check_text(model, text, lengths)
    stops = Stops(len(text), threshold, limit)
    found = []
    generator = generator if generator is not None else torch.Generator().manual_seed(0)
    for block in fast.blocks(model.encoder(text, lengths), lengths, generator, limit):
        found.append(Block(*(part.clone() for part in block)) if fast.graphs else block)
        if stops.see(block.gates):
            break
    frames, _, weights = (torch.cat(parts) for parts in zip(*found, strict=True))
    return finish(model, frames, weights, stops)


def finish(model: Tacotron2, frames: Tensor, weights: Tensor, stops: Stops) -> Decoded:
    """Frames (F, B, M) and weights (F, B, T) cut where the items end, and refined. Warns once of those cut short."""
    lengths = torch.tensor(stops.lengths, device=frames.device)
    longest = max(stops.lengths)
    mask = length_mask(lengths, longest)[:, None]
    mel = frames[:longest].permute(1, 2, 0) * mask
    if any(stops.reached_limit):
        items = [item for item, reached in enumerate(stops.reached_limit) if reached]
        warnings.warn(
            f"items {items} were cut at the limit of {stops.limit} frames: their gate never fired", stacklevel=3
        )
    alignments = weights[:longest].transpose(0, 1) * mask.transpose(1, 2)
    return Decoded(mel, model.postnet(mel, mask), lengths, alignments, stops.reached_limit)


@torch.no_grad()
def decode_plainly(
    model: Tacotron2,
    text: Tensor,
    lengths: Tensor,
    *,
    generator: Generators | None = None,
    threshold: float = 0.5,
    limit: int = LIMIT,
) -> Decoded:
    """What `decode` computes, layer by layer and step by step: its reference, and its peer in measurements."""
    check_text(model, text, lengths)
    generator = generator if generator is not None else torch.Generator().manual_seed(0)
    decoder, memory = model.decoder, model.encoder(text, lengths)
    attention, stops = decoder.attention, Stops(len(text), threshold, limit)
    projected, mask = attention.memory(memory), length_mask(lengths, text.shape[1])
    frame = memory.new_zeros(len(text), model.config.num_mels)
    hidden = cell = second = second_cell = memory.new_zeros(len(text), model.config.rnn)
    context = memory.new_zeros(len(text), model.config.encoder)
    weights = total = memory.new_zeros(text.shape)
    found = []
    for _ in range(limit):
        known = decoder.prenet(frame, dropout(model, 1, len(text), generator)[0].transpose(0, 1))
        hidden, cell = decoder.attention_rnn(torch.cat((known, context), 1), (hidden, cell))
        history = F.pad(torch.stack((weights, total), 1), [model.config.location_kernel // 2] * 2)
        location = attention.location_dense(attention.location_conv(history).transpose(1, 2))
        energies = attention.score(torch.tanh(attention.query(hidden)[:, None] + location + projected))[:, :, 0]
        weights = energies.masked_fill(~mask, float("-inf")).softmax(1)
        total = total + weights
        context = torch.bmm(weights[:, None], memory)[:, 0]
        second, second_cell = decoder.decoder_rnn(torch.cat((hidden, context), 1), (second, second_cell))
        output = torch.cat((second, context), 1)
        frame = decoder.mel(output)
        found.append((frame, weights))
        if stops.see(decoder.gate(output).T):
            break
    frames, weights = (torch.stack(parts) for parts in zip(*found, strict=True))
    return finish(model, frames, weights, stops)
