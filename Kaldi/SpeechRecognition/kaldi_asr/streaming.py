"""Recognition while somebody speaks: samples in, words so far out.

    stream = StreamingRecogniser(recogniser)
    stream.accept(samples); stream.partial().words; ...; stream.finish().words

The result is that of the whole utterance at once where the network scores frames: it sees the same context, and
frames are scored when the frames after them that it needs have arrived (about 0.2 s).
"""

from __future__ import annotations

import numpy as np
import torch

from . import features
from .decoding import Hypothesis
from .recogniser import Recogniser


class StreamingRecogniser:
    """One utterance. ValueError where the recogniser has no network: GMMs need their speaker's mean beforehand."""

    def __init__(self, recogniser: Recogniser) -> None:
        if recogniser.network is None:
            raise ValueError("streams are scored by a network, this recogniser has GMMs only: train with acoustic tdnn")
        self.recogniser = recogniser
        self.computer = features.computer(recogniser.network_features)
        self.search = recogniser.decoder.stream()
        self.context = recogniser.network.config.context
        self.frames = np.empty((0, recogniser.network_features.dim), np.float32)  # that a later score may need
        self.taken = 0  # frames taken from the computer
        self.finished = False

    def accept(self, samples: np.ndarray) -> None:
        """(N,) samples in -1..1 at the recogniser's rate; any N."""
        if self.finished:
            raise ValueError("the stream has been finished")
        if len(samples):
            scaled = np.asarray(samples, np.float32) * np.float32(features.SCALE)
            self.computer.accept_waveform(self.recogniser.sample_rate, scaled)
            self._advance()

    def partial(self) -> Hypothesis:
        """The best words of what has been scored so far."""
        return self.search.partial()

    def finish(self) -> Hypothesis:
        """Score what is left, and end: the best words of all."""
        if not self.finished:
            self.computer.input_finished()
            self._advance(last=True)
            self.finished = True
        return self.search.finish()

    def _advance(self, last: bool = False) -> None:
        ready = self.computer.num_frames_ready
        if ready > self.taken:
            new = np.stack([self.computer.get_frame(index) for index in range(self.taken, ready)]).astype(np.float32)
            self.computer.pop(ready - self.taken)  # or an endless stream would fill the memory
            if not self.taken:
                new = np.concatenate([np.repeat(new[:1], self.context, 0), new])  # stands for what was before
            self.taken = ready
            self.frames = np.concatenate([self.frames, new])
        if last and len(self.frames):
            self.frames = np.concatenate([self.frames, np.repeat(self.frames[-1:], self.context, 0)])
        if len(self.frames) > 2 * self.context:
            network = self.recogniser.network
            with torch.no_grad():
                batch = torch.from_numpy(self.frames)[None].to(self.recogniser.device)
                scores = network.log_likelihoods(batch)[0].float().cpu().numpy()
            self.search.accept(scores)
            self.frames = self.frames[len(self.frames) - 2 * self.context :]
