"""The options of training: a recipe is a file of configs/ with values for them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from dlx import config as configs
from dlx.trainer import TrainOptions

from . import corpora
from .language import LanguageOptions
from .options import SourceOptions
from .tdnn import TdnnConfig


@dataclass
class TrainConfig(SourceOptions, TrainOptions):
    """Train a recogniser: GMM-HMMs, language model, graph, network. `--config NAME` takes a recipe of configs/."""

    language: Literal["mixed", "own", "loop"] = configs.field(
        "mixed",
        help="mixed: transcripts and English; own: transcripts alone; loop: all strings of their words",
        group="language",
    )
    order: int = configs.field(3, help="words of the transcripts' n-grams", ge=1, le=5, group="language")
    background_order: int = configs.field(2, help="words of the n-grams of English", ge=1, le=4, group="language")
    least: int = configs.field(5, help="times that a word of English must occur", ge=1, group="language")
    lexicon: str | None = configs.field(None, help="your own lexicon.txt instead of the dictionary", group="language")
    mono_components: int = configs.field(700, help="Gaussians of the monophones", ge=1, group="gmm")
    leaves: int = configs.field(500, help="most pdfs of phones in context", ge=1, group="gmm")
    components: int = configs.field(3000, help="Gaussians of phones in context", ge=1, group="gmm")
    lda: int = configs.field(40, help="dimensions of the features (LDA and MLLT); 0: differences", ge=0, group="gmm")
    cmvn: Literal["speaker", "utterance", "none"] = configs.field(
        "speaker", help="whose mean is subtracted from the GMMs' features", group="gmm"
    )
    acoustic: Literal["tdnn", "gmm"] = configs.field("tdnn", help="what scores frames: the network, or the GMMs alone")
    copies: int = configs.field(0, help="changed copies of each utterance: speed, noise, volume", ge=0, group="network")
    hidden: int = configs.field(192, help="width of the network", ge=1, group="network")
    bottleneck: int = configs.field(48, help="width of its factors", ge=1, group="network")
    dilations: list[int] = configs.field(
        [1, 1, 1, 0, 3, 3, 3, 3], help="frames between the moments that a layer sees", group="network"
    )
    dropout: float = configs.field(0.1, help="share of values left out", ge=0, lt=1, group="network")
    chunk: int = configs.field(100, help="frames of a piece", ge=10, group="network")
    mask_time: int = configs.field(20, help="longest stretch of frames that is hidden", ge=0, group="network")
    mask_bands: int = configs.field(8, help="most features that are hidden", ge=0, group="network")
    batch_size: int = configs.field(8, help="pieces per step and device", ge=1, group="network")
    epochs: int = configs.field(24, help="passes over the training data", ge=1, group="recipe")
    lr: float = configs.field(3e-3, help="peak learning rate", gt=0, group="recipe")
    end_lr: float = configs.field(1e-5, help="rate that cosine and linear end at", ge=0, group="recipe")
    warmup_epochs: float = configs.field(1.0, help="linear warm-up", ge=0, group="recipe")
    weight_decay: float = configs.field(0.01, help="not of norms and biases", ge=0, group="recipe")
    gradient_clip: float | None = configs.field(5.0, help="largest norm of all gradients", gt=0, group="recipe")
    beam: float = configs.field(14.0, help="of the search", gt=0, group="search")
    max_active: int = configs.field(7000, help="most states of the search", ge=10, group="search")
    device: str = configs.field("auto", help="cpu, cuda or auto")

    def language_options(self) -> LanguageOptions:
        return LanguageOptions(self.order, self.background_order, self.least)

    def tdnn(self, num_features: int, num_pdfs: int) -> TdnnConfig:
        return TdnnConfig(
            num_features, num_pdfs, self.hidden, self.bottleneck, tuple(self.dilations), dropout=self.dropout
        )

    def identity(self) -> dict[str, str]:
        return {self.data: corpora.identity(corpora.folder_of(self))}
