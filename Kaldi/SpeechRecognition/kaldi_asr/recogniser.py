"""A trained recogniser in one folder, ready to transcribe: acoustic model, graph, search.

recogniser = Recogniser.load("runs/kaldi_quickstart")
found = recogniser.transcribe(wave, nbest=5)            # 16 kHz, -1..1
found.words, found.confidences, found.times, found.ctm("call-17")

FOLDER/recogniser.json   settings                FOLDER/gmm/         GMM-HMM: tree, transitions, mixtures
FOLDER/lang/             lexicon, symbols        FOLDER/graph/       HCLG.fst, transition ids to words
FOLDER/tdnn/             network, where there is one
"""

from __future__ import annotations

import copy
import json
import os
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

import kaldifst
import numpy as np
import torch
from safetensors.torch import load_file, save_file

from dlx.files import atomic_path, atomic_write

from . import alignment, datadir, features, graph
from .decoding import Decoder, Hypothesis, SearchOptions, confidences
from .features import FRAME_SHIFT, FeatureConfig
from .hmm import HmmModel
from .lexicon import Lexicon
from .tdnn import Tdnn, TdnnConfig, pad_context

SETTINGS = "recogniser.json"
PRIOR_FRAMES = 300.0  # that the training's mean counts as when a single utterance is normalised


@dataclass
class Transcript:
    """Words with confidences (0 to 1) and times (start, duration in seconds); other hypotheses, the best first."""

    words: list[str]
    confidences: list[float] = field(default_factory=list)
    times: list[tuple[float, float]] = field(default_factory=list)
    nbest: list[Hypothesis] = field(default_factory=list)

    @property
    def text(self) -> str:
        return " ".join(self.words)

    def ctm(self, name: str) -> list[str]:
        """Lines `NAME 1 START DURATION WORD CONFIDENCE`, NIST's format."""
        rows = zip(self.words, self.times, self.confidences, strict=True)
        return [f"{name} 1 {start:.2f} {length:.2f} {word} {sure:.2f}" for word, (start, length), sure in rows]


def save_network(network: Tdnn, config: FeatureConfig, folder: Path) -> None:
    """The weights as safetensors, the architecture and features as JSON."""
    with atomic_path(folder / "network.safetensors") as temporary:
        save_file({name: value.contiguous() for name, value in network.state_dict().items()}, temporary)
    values = {"network": network.config.to_dict(), "features": config.to_dict()}
    atomic_write(folder / "network.json", json.dumps(values, indent=1) + "\n")


def load_network(folder: Path) -> tuple[Tdnn, FeatureConfig]:
    if not (folder / "network.json").is_file():
        raise ValueError(f"{folder}: holds no network.json")
    values = json.loads((folder / "network.json").read_text())
    network = Tdnn(TdnnConfig.from_dict(values["network"]))
    network.load_state_dict(load_file(folder / "network.safetensors"))
    return network.eval(), FeatureConfig.from_dict(values["features"])


class Recogniser:
    """What `load` gives; `network` is None where the GMMs score frames."""

    def __init__(
        self,
        model: HmmModel,
        lexicon: Lexicon,
        hclg: kaldifst.StdVectorFst,
        search: SearchOptions,
        network: Tdnn | None = None,
        network_features: FeatureConfig = features.TDNN_FEATURES,
        device: str | torch.device = "cpu",
    ) -> None:
        self.model, self.lexicon = model, lexicon
        self.device = torch.device(device)
        self.network = network.to(self.device).eval() if network is not None else None
        self.network_features = network_features
        self.decoder = Decoder(graph.with_pdf_labels(hclg, model.transitions), lexicon, search)

    @classmethod
    def load(
        cls,
        folder: str | os.PathLike[str],
        acoustic: str | None = None,
        device: str | torch.device = "cpu",
        **search: Any,
    ) -> Recogniser:
        """`acoustic` "gmm" or "tdnn" chooses the one the folder is not set to; `search` changes SearchOptions."""
        folder = Path(folder)
        if not (folder / SETTINGS).is_file():
            raise ValueError(f"{folder}: holds no {SETTINGS}, so it is no trained recogniser")
        settings = json.loads((folder / SETTINGS).read_text())
        acoustic = acoustic or settings["acoustic"]
        if acoustic not in settings["search"]:
            raise ValueError(f"{folder}: has no acoustic model {acoustic!r}, only {', '.join(settings['search'])}")
        options = SearchOptions(**(settings["search"][acoustic] | {k: v for k, v in search.items() if v is not None}))
        network, config = load_network(folder / "tdnn") if acoustic == "tdnn" else (None, features.TDNN_FEATURES)
        hclg = kaldifst.StdVectorFst.read(str(folder / "graph" / "HCLG.fst"))
        lexicon = Lexicon.load(folder / "lang")
        return cls(HmmModel.load(folder / "gmm"), lexicon, hclg, options, network, config, device)

    @property
    def sample_rate(self) -> int:
        return (self.network_features if self.network is not None else self.model.features).sample_rate

    @torch.no_grad()
    def network_scores(self, item: np.ndarray) -> np.ndarray:
        """(T, D) features -> (T, P) log likelihoods by the network."""
        batch = torch.from_numpy(item)[None].to(self.device)
        return self.network.log_likelihoods(pad_context(batch, self.network.config.context))[0].float().cpu().numpy()

    def scores(self, wave: np.ndarray) -> np.ndarray:
        """(N,) samples -> (T, P) log likelihoods; the GMMs' features are normalised with the training's mean, too."""
        if self.network is not None:
            return self.network_scores(features.extract(wave, self.network_features))
        item = features.extract(wave, self.model.features)
        if self.model.cmvn != "none":
            known = self.model.mean if self.model.mean is not None else np.zeros(item.shape[1])
            mean = (item.sum(0) + PRIOR_FRAMES * known) / (len(item) + PRIOR_FRAMES)
            item = (item - mean).astype(np.float32)
        return self.model.mixtures.log_likelihoods(self.model.frontend(item))

    def scores_of_set(self, utterances: Sequence[datadir.Utterance]) -> list[np.ndarray]:
        """Scores of utterances whose speakers are known: each is normalised as in training."""
        if self.network is not None:
            return [self.network_scores(x) for x in features.extract_all(utterances, self.network_features)]
        items = features.extract_all(utterances, self.model.features)
        items = features.normalise_speakers(utterances, items, self.model.cmvn)
        return [self.model.mixtures.log_likelihoods(self.model.frontend(item)) for item in items]

    def transcribe(self, wave: np.ndarray, nbest: int = 0, times: bool = True) -> Transcript:
        """The words of a waveform; with `nbest` > 0 also that many hypotheses and confidences from ten times more."""
        if len(wave) < 400:
            return Transcript([])
        return self.transcribe_scores(self.scores(wave), nbest, times)

    def transcribe_scores(self, scores: np.ndarray, nbest: int = 0, times: bool = True) -> Transcript:
        best = self.decoder.decode(scores)
        found = Transcript(best.words, [1.0] * len(best.words))
        if nbest:
            listed = self.decoder.nbest(scores, 10 * nbest)
            found.nbest = listed[:nbest]
            found.confidences = confidences([best, *(item for item in listed if item.words != best.words)])
        if times:
            found.times = self.word_times(scores, best.words)
        return found

    def word_times(self, scores: np.ndarray, words: Sequence[str]) -> list[tuple[float, float]]:
        """(start, duration) in seconds of each word, by forced alignment."""
        if not words:
            return []
        text = alignment.text_graph(words, self.lexicon, self.model.tree, self.model.transitions)
        scale = self.decoder.options.acoustic_scale
        [found] = alignment.align(
            [text], [len(scores)], lambda index, pdfs: scores[:, pdfs], self.model.transitions, scale
        )
        if found is None:
            return [(0.0, 0.0)] * len(words)
        result = []
        for place in range(len(words)):
            frames = np.flatnonzero(found.words == place)
            result.append((float(frames[0] * FRAME_SHIFT), float(len(frames) * FRAME_SHIFT)))
        return result

    def with_search(self, **changes: Any) -> Recogniser:
        """The same recogniser with other search options; nothing is loaded again."""
        other = copy.copy(self)
        other.decoder = copy.copy(self.decoder)
        other.decoder.options = replace(self.decoder.options, **changes)
        return other


def save_settings(folder: Path, acoustic: str, search: dict[str, SearchOptions]) -> None:
    """Write recogniser.json: what scores frames by default, and the search options of each acoustic model."""
    values = {"acoustic": acoustic, "search": {name: asdict(options) for name, options in search.items()}}
    atomic_write(folder / SETTINGS, json.dumps(values, indent=1) + "\n")
