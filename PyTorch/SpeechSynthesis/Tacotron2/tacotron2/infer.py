"""Say texts: writes a WAV file and a picture for each, and infer.json with lengths, stop flags and speed.

./dlx run Tacotron2 infer -- --checkpoint runs/tacotron2_quickstart --text "Good morning, how are you?"
./dlx run Tacotron2 infer -- --checkpoint runs/tacotron2_quickstart -i sentences.txt --vocoder runs/waveglow
./dlx run Tacotron2 infer -- --checkpoint runs/tacotron2_quickstart -i story.txt --stream true
"""

from __future__ import annotations

import json
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch

from dlx import config as configs
from dlx import dist
from dlx.files import atomic_write
from dlx.precision import inference_dtype
from dlx.speech import audio
from dlx.speech.filelists import read_texts

from . import pretrained
from .options import CONFIGS
from .plots import draw_speech
from .synthesis import CHUNK, PAUSE, Speech, Synthesizer
from .vocoding import SIGMA, STRENGTH

SHORT = {"-i": "--text_file", "-o": "--output_dir"}


@dataclass
class InferConfig:
    """Say the lines of a file, or one text. `-i` and `-o` are short for `--text_file` and `--output_dir`."""

    checkpoint: str = configs.field(help="the voice: a run's folder, a checkpoint, a file or a published name")
    text: str | None = configs.field(None, help="what to say")
    text_file: str | None = configs.field(None, help="a file with a text per line, instead (UTF-8)")
    vocoder: str = configs.field(
        "hifigan_v1.universal", help="griffin-lim, a HiFi-GAN (name or file) or a WaveGlow (name, run or file)"
    )
    arch: str | None = configs.field(None, help="of a bare file that is not recognised")
    chunk: int = configs.field(CHUNK, help="longest piece that is said in one go, in characters", ge=2)
    pause: float = configs.field(PAUSE, help="silence between pieces in seconds", ge=0)
    limit: int = configs.field(2000, help="longest piece in frames", ge=1)
    threshold: float = configs.field(0.5, help="probability of the end from which a piece ends", gt=0, lt=1)
    sigma: float = configs.field(SIGMA, help="deviation of WaveGlow's noise", ge=0)
    denoise: float = configs.field(STRENGTH, help="strength of WaveGlow's denoiser; 0 is off", ge=0)
    batch_size: int = configs.field(8, help="pieces at a time", ge=1)
    precision: Literal["auto", "fp32", "bf16", "fp16"] = configs.field(
        "auto", help="of weights and activations; auto: fp16 on a GPU of sm_80 or newer, else fp32"
    )
    stream: bool = configs.field(False, help="give sound before the text is finished; prints the first piece's latency")
    strict: bool = configs.field(False, help="refuse texts with characters that cannot be said")
    engine: Literal["auto", "steps", "compiled", "fused"] = configs.field(
        "auto", help="of the decoder: fused kernels where there are any, plain PyTorch, or that compiled"
    )
    pictures: bool = configs.field(True, help="draw spectrograms and alignments")
    seed: int = configs.field(0, help="of the prenet's dropout and WaveGlow's noise", ge=0)
    output_dir: str = configs.field("runs/infer", help="0001.wav, 0001.png, ..., infer.json")
    device: str = configs.field("auto", help="auto, cpu, cuda or cuda:N")

    def __post_init__(self) -> None:
        if bool(self.text) == bool(self.text_file):
            raise ValueError("give either text or text_file")


def build(config: InferConfig, device: torch.device) -> Synthesizer:
    """The voice and the vocoder that the options name."""
    voice = pretrained.load_voice(config.checkpoint, arch=config.arch)
    dtype = inference_dtype(config.precision, device)
    vocoder = pretrained.load_vocoder(
        config.vocoder,
        mel=voice.mel,
        device=device,
        dtype=dtype,
        sigma=config.sigma,
        strength=config.denoise,
        seed=config.seed,
    )
    names = ("batch_size", "limit", "threshold", "chunk", "pause", "seed", "strict", "engine")
    return Synthesizer(voice, vocoder, device, dtype, **{name: getattr(config, name) for name in names})


def write(speech: Speech, stem: Path, pictures: bool) -> dict[str, Any]:
    """The files of one text, and its entry in infer.json."""
    clipped = audio.write_wav(stem.with_suffix(".wav"), speech.audio, speech.sample_rate)
    if clipped:
        print(f"{stem.with_suffix('.wav')}: {clipped} samples were clipped", file=sys.stderr)
    if pictures:
        draw_speech(stem.with_suffix(".png"), speech.mel, [chunk.alignment for chunk in speech.chunks], speech.text)
    return {
        "text": speech.text,
        "audio": stem.with_suffix(".wav").name,
        "picture": stem.with_suffix(".png").name if pictures else None,
        "seconds": round(speech.seconds, 3),
        "clipped_samples": clipped,
        "chunks": [
            {"text": chunk.text, "frames": chunk.frames, "reached_limit": chunk.reached_limit}
            for chunk in speech.chunks
        ],
    }


def stream(synthesizer: Synthesizer, text: str, row: int, stem: Path) -> dict[str, Any]:
    """Say one text piece by piece; its entry in infer.json."""
    started = time.perf_counter()
    pieces, first = [], 0.0
    for piece in synthesizer.stream(text, row):
        first = first or time.perf_counter() - started
        pieces.append(piece)
    took = time.perf_counter() - started
    sound, rate = np.concatenate(pieces), synthesizer.voice.mel.sample_rate
    clipped = audio.write_wav(stem.with_suffix(".wav"), sound, rate)
    seconds = len(sound) / rate
    print(f"{stem.with_suffix('.wav')}: first sound after {first * 1000:.0f} ms, {seconds:.2f} s in {took:.2f} s")
    return {
        "text": text,
        "audio": stem.with_suffix(".wav").name,
        "seconds": round(seconds, 3),
        "clipped_samples": clipped,
        "pieces": len(pieces),
        "first_piece_seconds": round(first, 4),
        "real_time_factor": round(seconds / took, 3),
    }


def main(args: list[str] | None = None) -> dict[str, Any]:
    words = [SHORT.get(word, word) for word in (sys.argv[1:] if args is None else args)]
    config = configs.parse(InferConfig, words, configs_dir=CONFIGS, prog="infer")
    texts, names = read_texts(config.text, config.text_file)
    output = Path(config.output_dir)
    output.mkdir(parents=True, exist_ok=True)
    stems = [output / f"{number:04d}" for number in range(1, len(texts) + 1)]
    with dist.init(config.device) as world:
        world.require_alone("infer")
        synthesizer = build(config, world.device)
        synthesizer.plan(texts, names)
        content: dict[str, Any] = {
            "checkpoint": synthesizer.voice.source,
            "arch": synthesizer.voice.arch,
            "vocoder": config.vocoder,
            "seed": config.seed,
        }
        if config.stream:
            content["texts"] = [
                stream(synthesizer, text, row, stem) for row, (text, stem) in enumerate(zip(texts, stems, strict=True))
            ]
        else:
            speeches = synthesizer(texts, names)
            timing = synthesizer.timing
            content["texts"] = [
                write(speech, stem, config.pictures) for speech, stem in zip(speeches, stems, strict=True)
            ]
            content |= {
                "real_time_factor": round(timing.real_time_factor, 3),
                "acoustic_seconds": round(timing.acoustic, 4),
                "vocoder_seconds": round(timing.vocoder, 4),
            }
            print(f"{timing.sound:.2f} s of sound, {timing.real_time_factor:.2f} times as fast as it is heard")
    atomic_write(output / "infer.json", json.dumps(content, indent=1, ensure_ascii=False) + "\n")
    print(f"{len(texts)} texts said; {output / 'infer.json'}")
    return content


if __name__ == "__main__":
    main()
