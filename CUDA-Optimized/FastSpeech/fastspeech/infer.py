"""Say texts: writes a WAV file and a picture for each, and infer.json with lengths and speed.

./dlx run FastSpeech infer -- --checkpoint runs/fastspeech_quickstart --text "Good morning, how are you?"
./dlx run FastSpeech infer -- --checkpoint runs/flite --text "I *really* mean it. [500ms] Do you?" --speed 0.9
./dlx run FastSpeech infer -- --checkpoint runs/flite -i sentences.txt -o said
"""

from __future__ import annotations

import json
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import torch

from dlx import config as configs
from dlx import dist
from dlx.config import field
from dlx.files import atomic_write
from dlx.precision import inference_dtype
from dlx.speech import audio, fast_vocoder
from dlx.speech import vocoder as vocoders
from dlx.speech.filelists import read_texts

from . import pretrained
from .options import CONFIGS
from .plots import draw_speech
from .synthesis import CHUNK, PAUSE, Speech, Synthesizer

SHORT = {"-i": "--text_file", "-o": "--output_dir"}


@dataclass
class VoiceOptions:
    """A voice, a vocoder, and how they run."""

    checkpoint: str = field(help="the voice: a run's folder, a checkpoint, a file or a published name")
    vocoder: str = field("hifigan_v1.universal", help="griffin-lim, or a HiFi-GAN (name or file)")
    arch: str | None = field(None, help="of a bare file that is not recognised")
    chunk: int = field(CHUNK, help="longest piece that is said in one go, in characters", ge=2)
    pause: float = field(PAUSE, help="silence between pieces in seconds", ge=0)
    batch_size: int = field(8, help="pieces at a time", ge=1)
    precision: Literal["auto", "fp32", "bf16", "fp16"] = field(
        "auto", help="of weights and activations; auto: fp16 on a GPU that has kernels (sm_80), else fp32"
    )
    form: Literal["auto", "plain", "kernels", "graph", "tensorrt"] = field(
        "auto", help="of the network: PyTorch, CUDA kernels, these as graphs, TensorRT; auto: the fastest that can run"
    )
    strict: bool = field(False, help="refuse texts with characters that cannot be said")
    device: str = field("auto", help="auto, cpu, cuda or cuda:N")


@dataclass
class InferConfig(VoiceOptions):
    """Say the lines of a file, or one text. `-i` and `-o` are short for `--text_file` and `--output_dir`."""

    text: str | None = field(None, help="what to say; *word* emphasises, [500ms] pauses")
    text_file: str | None = field(None, help="a file with a text per line, instead (UTF-8)")
    speed: float = field(1.0, help="above 1 is faster", gt=0)
    pictures: bool = field(True, help="draw spectrograms and durations")
    output_dir: str = field("runs/infer", help="0001.wav, 0001.png, ..., infer.json")

    def __post_init__(self) -> None:
        if bool(self.text) == bool(self.text_file):
            raise ValueError("give either text or text_file")


def build(config: VoiceOptions, device: torch.device) -> Synthesizer:
    """The voice and the vocoder that the options name."""
    voice, dtype = pretrained.load(config.checkpoint, arch=config.arch), inference_dtype(config.precision, device)
    vocoder = fast_vocoder.optimize(vocoders.load(config.vocoder, device=device, mel=voice.mel), dtype)
    names = ("batch_size", "chunk", "pause", "strict", "form")
    return Synthesizer(voice, vocoder, device, dtype, **{name: getattr(config, name) for name in names})


def write(speech: Speech, stem: Path, pictures: bool) -> dict[str, Any]:
    """The files of one text, and its entry in infer.json."""
    sound, picture = stem.with_suffix(".wav"), stem.with_suffix(".png")
    clipped = audio.write_wav(sound, speech.audio, speech.sample_rate)
    if clipped:
        print(f"{sound}: {clipped} samples were clipped", file=sys.stderr)
    if pictures:
        draw_speech(picture, speech.mel, speech.chunks, speech.text)
    chunks = [{"text": chunk.text, "frames": chunk.frames} for chunk in speech.chunks]
    return {
        "text": speech.text,
        "audio": sound.name,
        "picture": picture.name if pictures else None,
        "seconds": round(speech.seconds, 3),
        "clipped_samples": clipped,
        "chunks": chunks,
    }


def main(args: list[str] | None = None) -> dict[str, Any]:
    words = [SHORT.get(word, word) for word in (sys.argv[1:] if args is None else args)]
    config = configs.parse(InferConfig, words, configs_dir=CONFIGS, prog="infer")
    texts, names = read_texts(config.text, config.text_file)
    output = Path(config.output_dir)
    output.mkdir(parents=True, exist_ok=True)
    with dist.init(config.device) as world:
        world.require_alone("infer")
        synthesizer = build(config, world.device)
        speeches = synthesizer(texts, names, config.speed)
    entries = [write(speech, output / f"{row:04d}", config.pictures) for row, speech in enumerate(speeches, 1)]
    timing = synthesizer.timing
    content = {
        "checkpoint": synthesizer.voice.source,
        "arch": synthesizer.voice.arch,
        "vocoder": config.vocoder,
        "form": synthesizer.engine.form,
        "precision": str(synthesizer.dtype).removeprefix("torch."),
        "speed": config.speed,
        "texts": entries,
        "real_time_factor": round(timing.real_time_factor, 3),
        "acoustic_seconds": round(timing.acoustic, 4),
        "vocoder_seconds": round(timing.vocoder, 4),
    }
    atomic_write(output / "infer.json", json.dumps(content, indent=1, ensure_ascii=False) + "\n")
    print(f"{timing.sound:.2f} s of sound, {timing.real_time_factor:.2f} times as fast as it is heard")
    print(f"{len(texts)} texts said; {output / 'infer.json'}")
    return content


if __name__ == "__main__":
    main()
