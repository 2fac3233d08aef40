"""Transcribe sound files: words, times, confidences; also as they arrive.

./dlx run Kaldi/SpeechRecognition infer -- --checkpoint runs/kaldi_quickstart --audio call.wav other.flac
./dlx run Kaldi/SpeechRecognition infer -- --checkpoint runs/asterisk --audio call.wav --nbest 5
./dlx run Kaldi/SpeechRecognition infer -- --checkpoint runs/asterisk --audio call.wav --stream true

Writes transcripts.json and transcripts.ctm (NIST: file, channel, start, duration, word, confidence) to output_dir.
"""

from __future__ import annotations

import json
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from dlx import config as configs
from dlx.files import atomic_write
from dlx.speech import audio

from .options import CONFIGS
from .recogniser import Recogniser
from .streaming import StreamingRecogniser

CHUNK = 8160  # samples that a live stream brings at a time: 0.51 s


@dataclass
class InferConfig:
    """Transcribe sound files with a trained recogniser."""

    checkpoint: str = configs.field(help="folder of a training run")
    audio: list[str] = configs.field(help="WAV, FLAC or OGG files")
    acoustic: str | None = configs.field(None, help="tdnn or gmm; null: what the training chose")
    nbest: int = configs.field(0, help="hypotheses per file; with any, words have confidences", ge=0)
    stream: bool = configs.field(False, help="as if the sound arrived bit by bit; prints what is heard so far")
    beam: float | None = configs.field(None, help="of the search; null: what the training chose", gt=0)
    max_active: int | None = configs.field(None, help="most states of the search", ge=10)
    device: str = configs.field("cpu", help="cpu or cuda, for the network")
    output_dir: str = configs.field("runs/infer", help="where transcripts go")


def live(recogniser: Recogniser, wave: np.ndarray) -> dict[str, Any]:
    """Feed a waveform in chunks; what was heard after each that changed it, and the longest wait for one."""
    stream = StreamingRecogniser(recogniser)
    partial, waits, text = [], [], ""
    for start in range(0, len(wave), CHUNK):
        clock = time.perf_counter()
        stream.accept(wave[start : start + CHUNK])
        heard = stream.partial().words
        waits.append(time.perf_counter() - clock)
        if " ".join(heard) != text:
            text = " ".join(heard)
            partial.append({"seconds": min(start + CHUNK, len(wave)) / recogniser.sample_rate, "text": text})
            print(f"  {partial[-1]['seconds']:6.2f} s  {text}", flush=True)
    return {"text": " ".join(stream.finish().words), "partial": partial, "longest_wait": max(waits, default=0.0)}


def main(args: list[str] | None = None) -> list[dict[str, Any]]:
    config = configs.parse(InferConfig, args, configs_dir=CONFIGS, prog="infer")
    search = {"beam": config.beam, "max_active": config.max_active}
    recogniser = Recogniser.load(config.checkpoint, config.acoustic, config.device, **search)
    found, ctm = [], []
    for name in config.audio:
        wave, _ = audio.read(name, recogniser.sample_rate)
        clock = time.perf_counter()
        if config.stream:
            entry = {"audio": name, **live(recogniser, wave)}
        else:
            transcript = recogniser.transcribe(wave, config.nbest)
            ctm += transcript.ctm(Path(name).stem)
            entry = {"audio": name, "text": transcript.text, "confidences": transcript.confidences}
            entry |= {"times": transcript.times}
            entry["nbest"] = [{"text": " ".join(item.words), "cost": item.cost} for item in transcript.nbest]
        entry["real_time_factor"] = (time.perf_counter() - clock) * recogniser.sample_rate / len(wave)
        found.append(entry)
        print(f"{name}: {entry['text']}", flush=True)
    output = Path(config.output_dir)
    atomic_write(output / "transcripts.json", json.dumps(found, indent=1) + "\n")
    if ctm:
        atomic_write(output / "transcripts.ctm", "\n".join(ctm) + "\n")
    return found


if __name__ == "__main__":
    main()
