"""Durations: letters and phones, brute force of monotonic paths, and a learnt alignment that finds known borders."""

import itertools
from pathlib import Path

import numpy as np
import pytest
import torch

from dlx.loading import DataError
from dlx.speech.corpora import Utterance
from dlx.speech.mel import MelConfig
from fastspeech import aligner, durations
from fastspeech.letters import Spelling

WORDS = {
    "the": "dh ax", "box": "b aa k s", "one": "w ah n", "night": "n ay t", "she": "sh iy", "sing": "s ih ng",
    "thought": "th ao t", "cat": "k ae t", "queen": "k w iy n", "phone": "f ow n",
}  # fmt: skip


def sentences(count, seed=0):
    generator = np.random.default_rng(seed)
    texts, phones = [], []
    for _ in range(count):
        words = [str(word) for word in generator.choice(list(WORDS), generator.integers(1, 6))]
        comma = len(words) > 2 and generator.random() < 0.5
        texts.append(" " + (words[0] + "," if comma else words[0]) + "".join(f" {word}" for word in words[1:]) + ".")
        spoken = [WORDS[word].split() for word in words]
        phones.append(["pau", *spoken[0], *(["pau"] if comma else []), *itertools.chain(*spoken[1:]), "pau"])
    return texts, phones


def test_letters_speak_the_phones_of_their_own_word():
    texts, phones = sentences(60)
    spelling = Spelling(texts, phones)
    for text, row, counts in zip(texts, phones, spelling.align(texts, phones), strict=True):
        assert len(counts) == len(text) and counts.sum() == len(row) and counts[0] == counts[-1] == 1
        place, word, heard = 0, "", []
        for symbol, number in zip(text, counts, strict=True):
            if symbol.isalpha():
                word, heard = word + symbol, heard + row[place : place + number]
            else:
                assert not word or " ".join(heard) == WORDS[word]
                word, heard = "", []
                assert set(row[place : place + number]) <= {"pau"}
            place += number
    one = spelling.align([" one."], [["pau", "w", "ah", "n", "pau"]])[0]
    assert one[3] == 0 and one.sum() == 5  # the e is silent
    assert spelling.align([" box."], [["pau", "b", "aa", "k", "s", "pau"]])[0].tolist() == [1, 1, 1, 2, 1]
    with pytest.raises(ValueError, match="7 phones cannot be spoken by the 2 symbols"):
        spelling.align([" a"], [["k"] * 7])
    with pytest.raises(ValueError, match="'zh' was in no example"):
        spelling.align([" the."], [["zh"]])


def test_phones_give_every_frame_to_a_symbol():
    mel = MelConfig()
    texts, phones = sentences(30, seed=1)
    generator = np.random.default_rng(2)
    utterances, frames = [], []
    for number, row in enumerate(phones):
        ends = np.cumsum(generator.uniform(0.03, 0.2, len(row)))
        frames.append(mel.frames(round(ends[-1] * mel.sample_rate)))
        named = tuple(zip(row, ends.tolist(), strict=True))
        utterances.append(Utterance(str(number), Path(f"{number}.wav"), texts[number], phones=named))
    found = durations.from_phones(texts, utterances, frames, mel)
    for row, text, utterance, total in zip(found, texts, utterances, frames, strict=True):
        assert row.dtype == np.int64 and len(row) == len(text) and row.sum() == total and (row >= 0).all()
        pause = utterance.phones[0][1] * 22050 / 256
        assert abs(row[0] - pause) <= 0.5
    with pytest.raises(DataError, match=r"0\.wav: the times of its phones are not known \(1 such"):
        durations.from_phones([" a."], [Utterance("0", Path("0.wav"), "a")], [3], mel)


def brute(scores):
    frames, symbols = scores.shape
    best = (-np.inf, None)
    for borders in itertools.combinations(range(1, frames), symbols - 1):
        parts = np.diff([0, *borders, frames])
        path = np.repeat(np.arange(symbols), parts)
        best = max(best, (scores[np.arange(frames), path].sum(), parts.tolist()))
    return best[1]


@pytest.mark.parametrize("seed", range(8))
def test_the_best_path_is_that_of_all(seed):
    generator = np.random.default_rng(seed)
    frames = int(generator.integers(4, 9))
    scores = generator.normal(size=(frames, int(generator.integers(1, 5))))
    assert durations.monotonic_durations(scores).tolist() == brute(scores)


def test_attention_becomes_durations():
    true = np.array([3, 1, 4, 2])
    weights = np.eye(4)[np.repeat(np.arange(4), true)] * 0.8 + 0.05
    weights[4, 0] = 0.9  # one frame that looks back is not followed
    batch = np.zeros((2, 12, 5))
    batch[0, :10, :4], batch[1, :2, :2] = weights, np.eye(2)
    found = durations.from_attention(batch, [4, 2], [10, 2])
    assert found[0].tolist() == brute(np.log(weights + 1e-8)) and found[1].tolist() == [1, 1]
    clean = np.eye(4)[np.repeat(np.arange(4), true)]
    assert durations.from_attention(clean[None], [4], [10])[0].tolist() == true.tolist()
    with pytest.raises(ValueError, match="2 frames are too few for 3 symbols"):
        durations.from_attention(np.ones((1, 2, 3)), [3], [2])
    with pytest.raises(ValueError, match="item 0 holds values"):
        durations.from_attention(np.full((1, 4, 2), np.nan), [2], [4])


def test_durations_of_a_file_are_checked():
    assert durations.check(np.array([1, 2], np.int32), 2, 3, "x").dtype == np.int64
    for bad, why in (([1, 2, 3], "3 durations of 2"), ([1, 1], "durations of 2 frames"), ([1.5, 1.5], "whole")):
        with pytest.raises(DataError, match=f"x: .*{why}"):
            durations.check(np.array(bad), 2, 3, "x")


class Made:
    """Utterances of symbols that each have their own spectrum, of known durations."""

    class front_end:
        symbols = list(range(9))

    mel = MelConfig(num_mels=12, n_fft=64, win_length=64, hop_length=16, sample_rate=2000, fmax=1000)

    def __init__(self, count):
        generator = np.random.default_rng(0)
        spectra = generator.normal(-5, 3, (9, 12))
        # No symbol twice in a text: where one of two equal ones ends nobody could tell.
        self.text = [generator.permutation(np.arange(1, 9))[: generator.integers(4, 9)] for _ in range(count)]
        self.true = [generator.integers(2, 9, len(row)) for row in self.text]
        self.utterances = [Utterance(str(n), Path(str(n)), "") for n in range(count)]
        self.frames = np.array([row.sum() for row in self.true])
        self.made = {
            Path(str(n)): (spectra[np.repeat(row, true)].T + generator.normal(0, 0.4, (12, true.sum()))).astype("f4")
            for n, (row, true) in enumerate(zip(self.text, self.true, strict=True))
        }
        self.mels = self

    def get(self, path):
        return self.made[path]

    def __len__(self):
        return len(self.text)


def test_a_learnt_alignment_finds_the_borders():
    split = Made(60)
    state = torch.get_rng_state()
    found = aligner.durations_of(aligner.learn(split, steps=150, lr=5e-3), split, batch_size=7)
    assert torch.equal(state, torch.get_rng_state())
    errors, naive = [], []
    for mine, true in zip(found, split.true, strict=True):
        assert mine.sum() == true.sum() and len(mine) == len(true)
        errors.append(np.abs(np.cumsum(mine) - np.cumsum(true))[:-1])
        naive.append(np.abs(true.sum() / len(true) * np.arange(1, len(true)) - np.cumsum(true)[:-1]))
    assert np.concatenate(errors).mean() < 0.5 < 1 < np.concatenate(naive).mean()


def test_the_likelihood_is_that_of_all_alignments():
    """CTC with an impossible blank is the sum over monotonic paths."""
    torch.manual_seed(0)
    logs = torch.randn(1, 6, 3).log_softmax(2)
    padded = torch.nn.functional.pad(logs, (1, 0), value=aligner.BLANK).log_softmax(2)
    total = []
    for path in itertools.product(range(4), repeat=6):  # 0 is the blank
        kept = [symbol for symbol, group in itertools.groupby(path) if symbol]
        if kept == [1, 2, 3]:
            total.append(sum(float(padded[0, frame, symbol]) for frame, symbol in enumerate(path)))
    expected = -torch.logsumexp(torch.tensor(total), 0) / 6
    loss = aligner.forward_sum_loss(logs, torch.tensor([3]), torch.tensor([6]))
    torch.testing.assert_close(loss, expected, atol=1e-4, rtol=1e-4)
