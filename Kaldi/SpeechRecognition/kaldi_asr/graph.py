"""Decoding graphs HCLG: grammar, lexicon, phonetic context and HMMs in one transducer of transition ids to words.

Mohri, Pereira and Riley, "Speech recognition with weighted finite-state transducers", 2008, in the course of Kaldi's
mkgraph.sh: LG composed, determinised, minimised; composed with context on the fly; with H; determinised, disambiguation
symbols removed, minimised; self-loops added last ("reordered": after the arc that enters a state).
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import kaldifst
import numpy as np

from .alignment import SILENCE_PROBABILITY
from .fst import Arcs, compile_fst
from .lexicon import BOS, EOS, UNKNOWN, Lexicon
from .ngram import NgramModel
from .transitions import NUM_STATES, TransitionModel
from .tree import ContextTree

SELF_LOOP_SCALE = 0.1


@dataclass(frozen=True)
class GraphOptions:
    """`self_loop_scale` weighs the HMMs' transitions; acoustic scores are weighed by about the same at decoding."""

    self_loop_scale: float = SELF_LOOP_SCALE
    silence: float = SILENCE_PROBABILITY


def grammar(model: NgramModel, lexicon: Lexicon) -> kaldifst.StdVectorFst:
    """G: an acceptor of word numbers, but that back-off arcs read #0 and write nothing.

    Words that the lexicon lacks are left out, and so is <unk>. States are contexts that some n-gram follows.
    """
    states: dict[tuple[str, ...], int] = {}

    def state_of(context: tuple[str, ...]) -> int:
        return states.setdefault(context, len(states))

    contexts = {gram[:-1] for level in model.probs for gram in level}
    start = (BOS,) if (BOS,) in contexts else ()
    state_of(start)
    arcs, finals = [], []
    for level in model.probs:
        for gram, score in level.items():
            context, word = gram[:-1], gram[-1]
            if word == EOS:
                finals.append((state_of(context), -score))
            elif word in lexicon.word_ids and word != UNKNOWN:
                following = gram[1:] if len(gram) == model.order else gram
                while following not in contexts:
                    following = following[1:]
                number = lexicon.word_ids[word]
                arcs.append((state_of(context), state_of(following), number, number, -score))
    if not finals or not arcs:
        raise ValueError("the language model shares no word with the lexicon, or never ends a sentence")
    for context in [found for found in states if found]:
        shorter = context[1:]
        while shorter not in contexts:
            shorter = shorter[1:]
        arcs.append((state_of(context), state_of(shorter), lexicon.backoff_id, 0, -model.backoffs.get(context, 0.0)))
    fst = compile_fst(arcs, finals)
    kaldifst.connect(fst)
    kaldifst.arcsort(fst, "ilabel")
    return fst


def word_loop(words: Sequence[str], lexicon: Lexicon) -> kaldifst.StdVectorFst:
    """G for any string of the words, all alike; for small tasks."""
    cost = math.log(len(words) + 1)
    arcs = [(0, 0, lexicon.word_ids[word], lexicon.word_ids[word], cost) for word in words]
    fst = compile_fst(arcs, [(0, cost)])
    kaldifst.arcsort(fst, "ilabel")
    return fst


def lexicon_fst(lexicon: Lexicon, silence: float = SILENCE_PROBABILITY) -> kaldifst.StdVectorFst:
    """L with disambiguation symbols: phones to words; silence may be at the beginning and after each word."""
    rows, highest = lexicon.disambiguated()
    first = len(lexicon.phones) + 1  # the phone number of #0
    quiet, without = -math.log(silence), -math.log(1 - silence)
    loop, before_silence, after_silence = 1, 2, 3
    arcs = [
        (0, loop, 0, 0, without), (0, before_silence, 0, 0, quiet),
        (before_silence, after_silence, 1, 0, 0.0),
        (after_silence, loop, first + highest + 1, 0, 0.0),  # tells silence from none, or L would be ambiguous
        (loop, loop, first, lexicon.backoff_id, 0.0),
    ]  # fmt: skip
    state = 4
    for word, phones, number in rows:
        symbols = [lexicon.phone_ids[phone] for phone in phones] + ([first + number] if number else [])
        here, output = loop, lexicon.word_ids[word]
        for symbol in symbols[:-1]:
            arcs.append((here, state, symbol, output, 0.0))
            here, output, state = state, 0, state + 1
        arcs.append((here, loop, symbols[-1], output, without))
        arcs.append((here, before_silence, symbols[-1], output, quiet))
    fst = compile_fst(arcs, [(loop, 0.0)])
    kaldifst.arcsort(fst, "olabel")
    return fst


def hmm_fst(
    windows: Sequence[Sequence[int]], tree: ContextTree, model: TransitionModel, num_states: int = NUM_STATES
) -> kaldifst.StdVectorFst:
    """H without self-loops: transition ids to the context transducer's labels.

    `windows`: for each label what it stands for: nothing (epsilon), a disambiguation symbol (negative), or phones.
    Those become the labels num_ids + 1, 2, ... on the side of transition ids.
    """
    arcs = []
    state = 1
    disambiguation = 0
    for label, window in enumerate(windows):
        if not len(window):
            continue
        if len(window) == 1 and window[0] <= 0:
            disambiguation += 1
            arcs.append((0, 0, model.num_ids + disambiguation, label, 0.0))
            continue
        left, phone, right = window if tree.width == 3 else (0, window[0], 0)
        here, output = 0, label
        for number in range(num_states):
            index = model.index[phone, number, tree.pdf(left, phone, right, number)]
            last = number == num_states - 1
            arcs.append((here, 0 if last else state, 2 * index + 2, output, 0.0))
            here, output, state = state, 0, state + (not last)
    fst = compile_fst(arcs, [(0, 0.0)])
    kaldifst.arcsort(fst, "olabel")
    return fst


def add_self_loops(arcs: Arcs, model: TransitionModel, scale: float) -> Arcs:
    """Give each state that a transition id leads to the self-loop of that id's state, and all arcs their probabilities.

    A state that different transition states lead to gets a state before it for each of them.
    """
    log_probabilities = model.log_probabilities()
    count = arcs.num_states
    index = np.where(arcs.ilabel > 0, (arcs.ilabel - 1) // 2, -1)
    cost = arcs.cost - np.where(arcs.ilabel > 0, scale * log_probabilities[np.maximum(arcs.ilabel, 0)], 0.0)
    pairs = np.unique(np.stack([arcs.target, index], 1), axis=0)
    pairs = np.unique(np.concatenate([pairs, [[0, -1]]]), axis=0)  # nothing leads to the start
    several = np.bincount(pairs[:, 0], minlength=count) > 1
    real = pairs[pairs[:, 1] >= 0]
    split = real[several[real[:, 0]]]
    simple = real[~several[real[:, 0]]]
    places = {(int(s), int(i)): count + number for number, (s, i) in enumerate(split)}
    target = arcs.target.copy()
    moved = np.flatnonzero((index >= 0) & several[arcs.target])
    target[moved] = [places[s, i] for s, i in zip(arcs.target[moved].tolist(), index[moved].tolist(), strict=True)]
    new_states = np.arange(count, count + len(split))
    loop_states = np.concatenate([simple[:, 0], new_states])
    loop_ids = 2 * np.concatenate([simple[:, 1], split[:, 1]]) + 1
    zeros = np.zeros(len(split), np.int64)
    return Arcs(
        np.concatenate([arcs.source, new_states, loop_states]),
        np.concatenate([target, split[:, 0], loop_states]),
        np.concatenate([arcs.ilabel, zeros, loop_ids]),
        np.concatenate([arcs.olabel, zeros, np.zeros(len(loop_ids), np.int64)]),
        np.concatenate([cost, zeros, -scale * log_probabilities[loop_ids]]),
        arcs.final_states,
        arcs.final_costs,
    )


def compose_graph(
    words: kaldifst.StdVectorFst,
    lexicon: Lexicon,
    tree: ContextTree,
    model: TransitionModel,
    options: GraphOptions = GraphOptions(),
) -> kaldifst.StdVectorFst:
    """HCLG for a grammar `words` (see `grammar`): transition ids in, words out."""
    _, highest = lexicon.disambiguated()
    symbols = list(range(len(lexicon.phones) + 1, len(lexicon.phones) + highest + 3))
    lg = kaldifst.compose(lexicon_fst(lexicon, options.silence), words)
    kaldifst.determinize_star(lg, use_log=True)
    kaldifst.minimize_encoded(lg)
    kaldifst.arcsort(lg, "ilabel")
    clg, windows = kaldifst.compose_context(symbols, tree.width, tree.width // 2, lg)
    kaldifst.arcsort(clg, "ilabel")
    hclg = kaldifst.compose(hmm_fst(windows, tree, model), clg)
    kaldifst.determinize_star(hclg, use_log=True)
    arcs = Arcs.of(hclg)
    arcs.ilabel = np.where(arcs.ilabel > model.num_ids, 0, arcs.ilabel)
    hclg = arcs.to_fst()
    kaldifst.minimize_encoded(hclg)
    arcs = add_self_loops(Arcs.of(hclg), model, options.self_loop_scale)
    fst = arcs.to_fst()
    kaldifst.arcsort(fst, "ilabel")
    return fst


def with_pdf_labels(fst: kaldifst.StdVectorFst, model: TransitionModel) -> kaldifst.StdVectorFst:
    """The graph with input labels pdf + 1: a decoder then needs scores of pdfs only."""
    arcs = Arcs.of(fst)
    arcs.ilabel = model.pdfs_of_ids()[arcs.ilabel] + 1
    return arcs.to_fst()
