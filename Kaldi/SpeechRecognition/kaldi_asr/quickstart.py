"""From nothing to a report in minutes on a CPU: train a digit recogniser, measure it, transcribe real recordings.

./dlx quickstart Kaldi/SpeechRecognition                           600 strings of digits, GMMs and a network
./dlx quickstart Kaldi/SpeechRecognition -- --acoustic gmm         without the network
"""

from __future__ import annotations

import shutil
import sys
from pathlib import Path
from typing import Any

from dlx import config as configs
from dlx import record as records
from dlx import report
from dlx.speech import audio
from dlx.speech.sources import ASTERISK

from . import alignment, corpora, datadir, features, plots, train, wer
from .options import CONFIGS, SAMPLE_RATE, SourceOptions
from .recipe import TrainConfig
from .recogniser import Recogniser
from .transitions import phone_segments

SHOWN = 3  # utterances drawn


def picture(recogniser: Recogniser, utterance: datadir.Utterance, folder: Path, name: str) -> list[dict[str, Any]]:
    """Draw what was heard and what else might have been; rows for the report."""
    wave = datadir.load(utterance, SAMPLE_RATE)
    scores = recogniser.scores(wave)
    heard = recogniser.transcribe_scores(scores)
    rows = [{"caption": f"{utterance.id}: {utterance.text}", "truth": utterance.text, "prediction": heard.text}]
    model = recogniser.model
    text = alignment.text_graph(heard.words, recogniser.lexicon, model.tree, model.transitions)
    scale = recogniser.decoder.options.acoustic_scale
    [path] = alignment.align([text], [len(scores)], lambda index, pdfs: scores[:, pdfs], model.transitions, scale)
    if path is not None:
        energies = features.extract(wave, features.FeatureConfig(kind="fbank", num_mels=40))
        found = phone_segments(path.ids, model.transitions)
        phones = [(model.lexicon.phones[phone - 1], first, frames) for phone, first, frames in found]
        words = [(word, *span) for word, span in zip(heard.words, heard.times, strict=True)]
        plots.draw_alignment(folder / f"{name}-alignment.png", energies, phones, words)
        rows[0]["image"] = f"pictures/{name}-alignment.png"
    lattice = recogniser.with_search(lattice_beam=8.0).decoder.word_lattice(scores)
    if lattice is not None:
        plots.draw_lattice(folder / f"{name}-lattice.png", lattice, recogniser.decoder.names)
        rows.append({"image": f"pictures/{name}-lattice.png", "caption": f"{utterance.id}: what else it might be"})
    return rows


def real_digits() -> list[datadir.Utterance]:
    """Asterisk's recordings of single digits: a real voice, on which nothing was trained."""
    folder = corpora.prepare(SourceOptions(data="asterisk-en"))
    everything = [u for name in corpora.SPLITS for u in datadir.read(folder / name)]
    return [u for u in everything if len(u.words) == 1 and u.words[0] in corpora.DIGITS]


def main(args: list[str] | None = None) -> None:
    arguments = ["--config", "quickstart", *(sys.argv[1:] if args is None else args)]
    config = configs.parse(TrainConfig, arguments, configs_dir=CONFIGS, prog="quickstart")
    output = Path(config.output_dir)
    print("1/3  train")
    train.run(config)
    recogniser = Recogniser.load(output)
    print(f"2/3  transcribe real recordings ({ASTERISK.citation})")
    real = real_digits()
    heard = {}
    for utterance in real:
        heard[utterance.id] = recogniser.transcribe(datadir.load(utterance, SAMPLE_RATE), times=False).words
        print(f"     {utterance.path.name}: {' '.join(heard[utterance.id])}")
    result = wer.score({u.id: list(u.words) for u in real}, heard)
    print("3/3  pictures")
    tests = datadir.read(corpora.folder_of(config) / "test")[:SHOWN]
    pictures = output / "pictures"
    shutil.rmtree(pictures, ignore_errors=True)
    rows = [row for number, u in enumerate(tests) for row in picture(recogniser, u, pictures, f"test{number}")]
    sounds = []
    for number, utterance in enumerate([*tests, *real[:SHOWN]]):
        audio.write_wav(pictures / f"{number}.wav", datadir.load(utterance, SAMPLE_RATE), SAMPLE_RATE)
        sounds.append({"file": f"pictures/{number}.wav", "caption": f"{utterance.id}: {utterance.text}"})
    record = records.load(output)
    record.metric("real_digits.wer", result.wer, "%", "MINIMIZE")
    record.metric("real_digits.words", result.words, "")
    record.attach("samples", rows)
    record.attach("audio", sounds)
    record.save(output)
    page = report.render(output)
    rate = record.value(f"test.{config.acoustic}.wer")
    print(
        f"\nWord error rate {rate:.2f} % on {record.value(f'test.{config.acoustic}.words'):.0f} words of strings never "
        f"trained on;\n{result.edits} of {result.words} real digits of an unknown speaker wrong.\nReport: {page}"
    )


if __name__ == "__main__":
    main()
