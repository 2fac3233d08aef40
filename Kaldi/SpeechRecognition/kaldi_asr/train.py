"""Train a recogniser from data folders: GMM-HMMs, language model, graph, network; decode the test set.

./dlx run Kaldi/SpeechRecognition train -- --config quickstart                            digits, GMMs and a network
./dlx run Kaldi/SpeechRecognition train -- --config asterisk --output_dir runs/asterisk   one real voice
./dlx run Kaldi/SpeechRecognition train -- --config asterisk --acoustic gmm               without the network
./dlx run Kaldi/SpeechRecognition train -- --data_dir my_data --data own --recordings list.txt

What is finished is not made again: the same command goes on where it was stopped.
"""

from __future__ import annotations

import hashlib
import json
import shutil
import time
from collections import Counter
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import kaldifst
import numpy as np

from dlx import config as configs
from dlx import training
from dlx.files import atomic_path, atomic_write
from dlx.record import Record
from dlx.runlog import RunLog
from dlx.speech.preparing import Progress

from . import acoustic_training, corpora, datadir, dictionary, features, gmm_training, graph, language, ngram
from . import lexicon as lexicons
from .decoding import SearchOptions
from .evaluate import decode, record_result, tune
from .hmm import HmmModel
from .options import CONFIGS, TASK
from .recipe import TrainConfig
from .recogniser import Recogniser, save_network, save_settings
from .tdnn import Tdnn

GMM_SCALES = (0.03, 0.04, 0.05, 0.06, 0.08, 0.1)  # of acoustic scores, tried on val
TDNN_SCALES = (0.05, 0.07, 0.1, 0.13, 0.16, 0.2, 0.3, 0.4)
GMM_OPTIONS = (
    "data", "data_dir", "recordings", "utterances", "voices", "max_seconds", "test_share", "val_share", "seed",
    "language", "order", "background_order", "least", "lexicon", "mono_components", "leaves", "components", "lda",
    "cmvn",
)  # fmt: skip


@dataclass
class Data:
    """The splits of a run; val is train's first utterances where there is none."""

    folder: Path
    train: list[datadir.Utterance]
    val: list[datadir.Utterance]
    test: list[datadir.Utterance]


def load_data(config: TrainConfig) -> Data:
    """Make or find the data of a configuration."""
    folder = corpora.prepare(config, Progress())
    splits = {name: datadir.read(folder / name) if (folder / name).is_dir() else [] for name in corpora.SPLITS}
    return Data(folder, splits["train"], splits["val"] or splits["train"][:20], splits["test"])


def make_language(config: TrainConfig, data: Data) -> tuple[lexicons.Lexicon, ngram.NgramModel | None, dict[str, Any]]:
    """The lexicon, the language model (None: a loop over the words), and what was measured."""
    own = [utterance.words for utterance in data.train]
    counts = Counter(word for words in own for word in words)
    known = lexicons.read_lexicon(Path(config.lexicon)) if config.lexicon else dictionary.read_cmudict()
    model, measures = None, {}
    words = set(counts)
    tuning = [utterance.words for utterance in data.val]
    if config.language == "mixed":
        model, measures = language.mixed(own, tuning, known, config.language_options())
        words = set(model.vocabulary) - {lexicons.EOS, lexicons.UNKNOWN}
    elif config.language == "own":
        model = ngram.estimate(own, config.order, words)
        measures = {"perplexity": model.perplexity(tuning)}
    found, report = lexicons.build(words, known, counts=counts)
    tests = Counter(word for utterance in data.test for word in utterance.words)
    missing = sum(number for word, number in tests.items() if word not in found.entries)
    measures |= {"words": len(found.words), "guessed": len(report.guesses)}
    measures |= {"test_oov": 100 * missing / max(sum(tests.values()), 1)}
    return found, model, measures | {"guesses": report.lines()}


def make_gmm(config: TrainConfig, data: Data, lexicon: lexicons.Lexicon, log: RunLog) -> HmmModel:
    """Monophones from a flat start, then phones in context, then (with lda) in better features."""
    items = features.extract_all(data.train)
    mean = features.Cmvn.of(items).mean
    corpus = gmm_training.Corpus(
        features.normalise_speakers(data.train, items, config.cmvn), [list(u.words) for u in data.train]
    )

    def report(stage: str, step: int, values: dict[str, float]) -> None:
        if step % 4 == 0:
            log.log((step,), {f"{stage}.{name}": value for name, value in values.items()})

    model, found = gmm_training.train_monophones(
        corpus, lexicon, components=config.mono_components, seed=config.seed, cmvn=config.cmvn, report=report
    )
    sizes = {"leaves": config.leaves, "components": config.components, "seed": config.seed, "report": report}
    model, found = gmm_training.train_triphones(corpus, model, found, name="tri", **sizes)
    if config.lda:
        model, found = gmm_training.train_triphones(corpus, model, found, name="lda", lda=config.lda, **sizes)
    model.mean = mean
    lost = [u.id for u, ids in zip(data.train, found, strict=True) if ids is None]
    log.log((), {"pdfs": model.tree.num_pdfs, "not_aligned": len(lost), "e.g.": lost[0] if lost else ""})
    return model


def make_graph(
    model: HmmModel, lexicon: lexicons.Lexicon, language_model: ngram.NgramModel | None
) -> kaldifst.StdVectorFst:
    """HCLG of a language model, or of a loop over the lexicon's words."""
    words = [word for word in lexicon.words if word != lexicons.UNKNOWN]
    g = graph.word_loop(words, lexicon) if language_model is None else graph.grammar(language_model, lexicon)
    return graph.compose_graph(g, lexicon, model.tree, model.transitions)


def first_stages(config: TrainConfig, data: Data, output: Path, log: RunLog) -> dict[str, Any]:
    """Lexicon, language model, GMM-HMM and graph below `output`, unless they are there; what was measured."""
    chosen = {name: configs.to_dict(config)[name] for name in GMM_OPTIONS} | config.identity()
    key = hashlib.sha256(json.dumps(chosen, sort_keys=True).encode()).hexdigest()
    stamp = output / "stages.json"
    if stamp.is_file() and json.loads(stamp.read_text())["key"] == key:
        return json.loads(stamp.read_text())["measures"]
    clock = time.monotonic()
    lexicon, model, measures = make_language(config, data)
    seconds = {"language": time.monotonic() - clock}
    log.log((), {f"language.{name}": value for name, value in measures.items() if name != "guesses"})
    clock = time.monotonic()
    hmm = make_gmm(config, data, lexicon, log)
    seconds["gmm"] = time.monotonic() - clock
    clock = time.monotonic()
    hclg = make_graph(hmm, lexicon, model)
    seconds["graph"] = time.monotonic() - clock
    lexicon.save(output / "lang")
    atomic_write(output / "lang" / "guesses.txt", "".join(f"{line}\n" for line in measures.pop("guesses")))
    if model is not None:
        ngram.write_arpa(model, output / "lang" / "lm.arpa")
    hmm.save(output / "gmm")
    with atomic_path(output / "graph" / "HCLG.fst") as temporary:
        hclg.write(str(temporary))
    shutil.copyfile(output / "lang" / "words.txt", output / "graph" / "words.txt")
    measures |= {f"{name}_seconds": value for name, value in seconds.items()}
    measures |= {"pdfs": hmm.tree.num_pdfs, "graph_states": hclg.num_states}
    log.log((), measures)
    atomic_write(stamp, json.dumps({"key": key, "measures": measures}, indent=1) + "\n")
    return measures


def settle(config: TrainConfig, data: Data, output: Path, record: Record, acoustic: str) -> None:
    """Choose the acoustic scale on val, write the recogniser's settings, decode test, keep what came out."""
    search = {"gmm": SearchOptions(beam=config.beam, max_active=config.max_active, acoustic_scale=0.05)}
    if acoustic == "tdnn":
        search["tdnn"] = SearchOptions(beam=config.beam, max_active=config.max_active, acoustic_scale=0.3)
    for name, scales in (("gmm", GMM_SCALES), ("tdnn", TDNN_SCALES)):
        if name not in search:
            continue
        save_settings(output, name, search)
        recogniser = Recogniser.load(output, name)
        scale = tune(recogniser, data.val, scales)
        search[name] = SearchOptions(beam=config.beam, max_active=config.max_active, acoustic_scale=scale)
        save_settings(output, name, search)
        record.metric(f"{name}.acoustic_scale", scale, "")
        if data.test:
            found = decode(recogniser.with_search(acoustic_scale=scale), data.test)
            record_result(record, found, f"test.{name}.", output / f"test-{name}.txt")
    save_settings(output, acoustic, search)


def _keep(record: Record, measures: dict[str, Any]) -> None:
    for name, value in measures.items():
        if isinstance(value, int | float) and np.isfinite(value):
            record.metric(f"stage.{name}", value, "s" if name.endswith("_seconds") else "")


def run(config: TrainConfig) -> dict[str, Any]:
    """Train by a configuration; returns the run record's fields. Raises Stopped after a signal, when all is saved."""
    output = Path(config.output_dir)
    data = load_data(config)
    with RunLog(output) as log:
        measures = first_stages(config, data, output, log)
    if config.acoustic == "gmm":
        record = Record.start(TASK, "train", configs.to_dict(config), seed=config.seed, data=config.identity())
        _keep(record, measures)
        settle(config, data, output, record, "gmm")
        record.finish().save(output)
        return record.fields
    model = HmmModel.load(output / "gmm")
    utterances = list(data.train)
    if config.copies:
        utterances += corpora.augmented(data.train, config.copies, output / "copies", config.seed)
    train, val = (acoustic_training.examples(model, group) for group in (utterances, data.val))
    shutil.rmtree(output / "copies", ignore_errors=True)

    def after(network: Tdnn, record: Record, folder: Path) -> None:
        _keep(record, measures)
        save_network(network, features.TDNN_FEATURES, folder / "tdnn")
        settle(config, data, folder, record, "tdnn")

    def build(options: TrainConfig, world: Any) -> acoustic_training.Trainer:
        return acoustic_training.Trainer(options, world, train, val, model.tree.num_pdfs, after)

    return training.run(config, build)


def main(args: list[str] | None = None) -> dict[str, Any]:
    return run(configs.parse(TrainConfig, args, configs_dir=CONFIGS, prog="train"))


if __name__ == "__main__":
    main()
