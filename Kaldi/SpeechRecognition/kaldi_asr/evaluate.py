"""Word error rate of a trained recogniser on a data folder, with alignments, confidence and speed.

./dlx run Kaldi/SpeechRecognition evaluate -- --checkpoint runs/kaldi_quickstart
./dlx run Kaldi/SpeechRecognition evaluate -- --checkpoint runs/asterisk --data_dir data/test --acoustic gmm
"""

from __future__ import annotations

import json
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from dlx import config as configs
from dlx.files import atomic_write
from dlx.record import Record
from dlx.runlog import RunLog

from . import datadir, wer
from .features import FRAME_SHIFT
from .options import CONFIGS, TASK
from .recogniser import Recogniser

SHOWN = 40  # wrong utterances in a record


@dataclass
class EvaluateConfig:
    """Decode a data folder and count the errors."""

    checkpoint: str = configs.field(help="folder of a training run")
    data_dir: str | None = configs.field(None, help="Kaldi data folder; null: the test set of that training")
    acoustic: str | None = configs.field(None, help="tdnn or gmm; null: what the training chose")
    beam: float | None = configs.field(None, help="of the search; null: what the training chose", gt=0)
    max_active: int | None = configs.field(None, help="most states of the search", ge=10)
    acoustic_scale: float | None = configs.field(None, help="weight of acoustic scores", gt=0)
    device: str = configs.field("cpu", help="cpu or cuda, for the network")
    output_dir: str = configs.field("runs/evaluate", help="where log, record and alignments go")


@dataclass
class Decoded:
    """Errors, and the times that scoring frames and searching took, in seconds."""

    result: wer.Result
    audio_seconds: float
    score_seconds: float
    search_seconds: float

    @property
    def real_time_factor(self) -> float:
        """Seconds of work per second of sound."""
        return (self.score_seconds + self.search_seconds) / max(self.audio_seconds, 1e-9)


def decode(recogniser: Recogniser, utterances: Sequence[datadir.Utterance]) -> Decoded:
    """Transcribe utterances and compare with their texts."""
    clock = time.perf_counter()
    scores = recogniser.scores_of_set(utterances)
    middle = time.perf_counter()
    heard = {u.id: recogniser.decoder.decode(x).words for u, x in zip(utterances, scores, strict=True)}
    end = time.perf_counter()
    result = wer.score({u.id: list(u.words) for u in utterances}, heard)
    return Decoded(result, sum(len(x) for x in scores) * FRAME_SHIFT, middle - clock, end - middle)


def tune(recogniser: Recogniser, utterances: Sequence[datadir.Utterance], scales: Sequence[float]) -> float:
    """The acoustic scale with the fewest edits; of several the middle one."""
    scores = recogniser.scores_of_set(utterances)
    references = {u.id: list(u.words) for u in utterances}
    edits = []
    for scale in scales:
        decoder = recogniser.with_search(acoustic_scale=scale).decoder
        heard = {u.id: decoder.decode(x).words for u, x in zip(utterances, scores, strict=True)}
        edits.append(wer.score(references, heard).edits)
    best = [scale for scale, count in zip(scales, edits, strict=True) if count == min(edits)]
    return best[len(best) // 2]


def record_result(record: Record, found: Decoded, prefix: str, report: Path) -> None:
    """Rates into the record, the alignments of wrong utterances into a file."""
    low, high = found.result.interval()
    record.metric(f"{prefix}wer", found.result.wer, "%", "MINIMIZE")
    record.metric(f"{prefix}wer_low", low, "%")
    record.metric(f"{prefix}wer_high", high, "%")
    for name in ("words", "substitutions", "insertions", "deletions"):
        record.metric(f"{prefix}{name}", getattr(found.result, name), "")
    record.metric(f"{prefix}sentence_errors", found.result.sentence_errors, "%", "MINIMIZE")
    record.metric(f"{prefix}real_time_factor", found.real_time_factor, "", "MINIMIZE")
    text = f"{found.result.summary()}\n{found.result.report()}\n"
    atomic_write(report, text)
    record.attach(f"{prefix}alignments", text.splitlines()[: 2 * SHOWN + 1])


def test_set(checkpoint: Path) -> Path:
    """The test folder of the training that made a checkpoint."""
    from . import corpora
    from .recipe import TrainConfig

    path = checkpoint / "record.json"
    if not path.is_file():
        raise ValueError(f"{checkpoint}: has no record.json that would name its data: give --data_dir")
    config = configs.from_dict(TrainConfig, json.loads(path.read_text())["config"], str(path))
    return corpora.prepare(config) / "test"


def main(args: list[str] | None = None) -> dict[str, Any]:
    config = configs.parse(EvaluateConfig, args, configs_dir=CONFIGS, prog="evaluate")
    checkpoint, output = Path(config.checkpoint), Path(config.output_dir)
    search = {"beam": config.beam, "max_active": config.max_active, "acoustic_scale": config.acoustic_scale}
    recogniser = Recogniser.load(checkpoint, config.acoustic, config.device, **search)
    utterances = datadir.read(config.data_dir or test_set(checkpoint))
    with RunLog(output) as log:
        record = Record.start(TASK, "evaluate", configs.to_dict(config), run_id=log.run_id)
        found = decode(recogniser, utterances)
        record_result(record, found, "", output / "alignments.txt")
        record.finish().save(output)
        log.log((), {"summary": found.result.summary(), "real_time_factor": found.real_time_factor})
        for reference, heard, times in found.result.confusions(5):
            log.log((), {"reference": reference, "heard": heard, "times": times})
    return record.fields


if __name__ == "__main__":
    main()
