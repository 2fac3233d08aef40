"""Measure speaking, vocoding and training; side by side with a peer where one is named.

    ./dlx bench Tacotron2 -- --mode decode --batch_sizes "[1, 64]" --engines "[fused, graph]" --peers "[torchaudio]"
    ./dlx bench Tacotron2 -- --mode vocoder --arch waveglow --peers "[graph, plain, unfolded]"
    ./dlx bench Tacotron2 -- --mode vocoder --arch hifigan --peers "[graph, plain]"
    ./dlx bench Tacotron2 -- --mode pipeline --vocoder waveglow --peers "[plain]"
    ./dlx bench Tacotron2 -- --mode training --arch tacotron2 --batch_sizes "[128]" --peers "[plain]"
    ./dlx bench Tacotron2 -- --mode training --arch waveglow --batch_sizes "[10]" --peers "[plain]"

Weights are fresh: speed does not depend on them. Gates are ruled out, so that every program makes the same number of
frames. A peer that cannot run (torchaudio where it is not installed) leaves a row that says why. Each program's output
is compared with that of the plain one in the same run. Writes one JSON record.
"""

from __future__ import annotations

import functools
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor

from dlx import bench, dist, inference
from dlx import config as configs
from dlx.kernels import has_kernels
from dlx.precision import DTYPES
from dlx.record import Record
from dlx.speech.fast_vocoder import FastHifiGan
from dlx.speech.frontend import FrontEnd
from dlx.speech.mel import MelConfig
from dlx.speech.vocoder import HifiGan, audible

from . import plain, registry
from .decoding import FastDecoder, decode
from .fast_waveglow import FastWaveGlow
from .model import Tacotron2, Tacotron2Config
from .options import CONFIGS, TASK
from .pretrained import Found
from .synthesis import Synthesizer
from .training_benchmark import training_step
from .vocoding import SIGMA, WaveGlowVocoder
from .waveglow import WaveGlow, WaveGlowConfig

ENGINES = ("fused", "graph", "compiled", "steps")
PEERS = {
    "decode": ("plain", "torchaudio"),
    "vocoder": ("graph", "plain", "unfolded"),
    "pipeline": ("plain",),
    "training": ("plain",),
}
TEXT = (
    "The quick brown fox jumps over the lazy dog, and the boy who looks on says that nobody would ever believe "
    "that it was really so."
)
NEVER = -1e4  # the bias of a gate that does not fire


@dataclass
class BenchmarkConfig:
    """Throughput and latency. Everything is measured in this process, peers in turns with ours."""

    mode: Literal["decode", "vocoder", "pipeline", "training"] = configs.field("decode", help="what is timed")
    arch: str = configs.field("tacotron2", help="a name of tacotron2.registry; hifigan in mode vocoder, too")
    vocoder: str = configs.field("waveglow", help="of mode pipeline: waveglow, waveglow_compact, hifigan")
    batch_sizes: list[int] = configs.field([1], help="items per call", ge=1)
    text_length: int = configs.field(128, help="symbols of an item", ge=1)
    frames: int = configs.field(800, help="of an item's spectrogram", ge=1)
    segment: int = configs.field(8000, help="samples of an item when WaveGlow is trained", ge=8)
    text: str = configs.field(TEXT, help="what is said in mode pipeline")
    engines: list[str] = configs.field(
        [], help=f"of the decoder, the first is ours: {', '.join(ENGINES)}; none: the best there is"
    )
    engine: Literal["auto", "eager", "graph", "compile"] = configs.field("auto", help="how ours trains")
    peers: list[str] = configs.field([], help="measured side by side, by mode: " + str(PEERS).replace("'", ""))
    precision: Literal["fp32", "tf32", "bf16", "fp16"] = configs.field("bf16", help="of the matrix products")
    warmup: int = configs.field(2, help="calls that do not count", ge=1)
    iterations: int = configs.field(5, help="timed calls per turn", ge=2)
    pairs: int = configs.field(3, help="turns of ours and peer", ge=1)
    seed: int = configs.field(1, help="of weights and inputs", ge=0)
    device: str = configs.field("auto", help="auto, cpu, cuda or cuda:N")
    output: str = configs.field("runs/benchmark.json", help="the record")

    def __post_init__(self) -> None:
        if self.warmup >= self.iterations:
            raise ValueError(f"warmup {self.warmup} must be less than iterations {self.iterations}")
        for known, given, what in ((PEERS[self.mode], self.peers, "peer"), (ENGINES, self.engines, "engine")):
            unknown = [name for name in given if name not in known]
            if unknown:
                raise ValueError(f"unknown {what} {unknown[0]!r} of mode {self.mode}; known: {', '.join(known)}")

    @property
    def dtype(self) -> torch.dtype:
        return DTYPES[self.precision]


Programs = dict[str, Callable[[], Any]]


def measure(
    config: BenchmarkConfig, programs: Programs, batch: int, device: torch.device, items: float, unit: str, mode: str
) -> list[dict[str, Any]]:
    """Rows of all programs, the first being ours."""
    return bench.against_peers(
        programs,
        pairs=config.pairs,
        items=items,
        unit=unit,
        device=device,
        warmup=config.warmup,
        iterations=config.iterations,
        batch=batch,
        precision=config.precision,
        mode=mode,
    )


def gap(found: Tensor, reference: Tensor) -> dict[str, float]:
    """How far a program's output is from the plain one's; a recurrence enlarges what rounding began."""
    difference = (found.double() - reference.double()).abs()
    size = max(float(reference.double().abs().max()), 1e-12)
    return {"largest_difference": float(difference.max()), "mean_difference": float(difference.mean()), "size": size}


def fresh_voice(config: BenchmarkConfig, arch: str, device: torch.device) -> Tacotron2:
    """In evaluation mode and the precision asked for; its gate never fires."""
    registry.of_kind(arch, Tacotron2Config)
    torch.manual_seed(config.seed)
    model = registry.build(arch).eval().requires_grad_(False)
    model.decoder.gate.bias.fill_(NEVER)
    return model.to(device, config.dtype)


def decoder_of(model: Tacotron2, engine: str) -> FastDecoder:
    """`ENGINES` as `FastDecoder` has them; ValueError where an engine cannot run."""
    if engine == "graph":
        if not model.decoder.mel.weight.is_cuda:
            raise ValueError("engine graph needs a CUDA device")
        return FastDecoder(model, "steps", graphs=True)
    return FastDecoder(model, engine, graphs=False if engine == "steps" else None)


def best_engines(config: BenchmarkConfig, model: Tacotron2) -> list[str]:
    best = FastDecoder(model)
    return config.engines or ["graph" if best.engine == "steps" and best.graphs else best.engine]


def measure_decode(config: BenchmarkConfig, batch: int, device: torch.device) -> list[dict[str, Any]]:
    """Frames per second of the acoustic model, encoder and postnet included."""
    model = fresh_voice(config, config.arch, device)
    generator = torch.Generator().manual_seed(config.seed)
    shape = (batch, config.text_length)
    text = torch.randint(1, model.config.num_symbols, shape, generator=generator).to(device)
    lengths = torch.full((batch,), config.text_length, device=device)

    def seeded() -> torch.Generator:
        return torch.Generator().manual_seed(config.seed)

    programs: Programs = {}
    skipped: list[dict[str, Any]] = []
    for engine in best_engines(config, model):
        decoder = decoder_of(model, engine)

        def say(decoder: FastDecoder = decoder) -> Tensor:
            return decode(decoder, text, lengths, generator=seeded(), limit=config.frames).refined

        programs[engine] = say
    if "plain" in config.peers:
        programs["plain"] = lambda: plain.decode_fixed(model, text, lengths, seeded(), config.frames)
    if "torchaudio" in config.peers:
        try:
            other = plain.torchaudio_decoder(model, config.frames)
            with torch.inference_mode():
                other(text, lengths)
            programs["torchaudio"] = torch.inference_mode()(functools.partial(other, text, lengths))
        except (ImportError, OSError, RuntimeError) as error:
            skipped.append({"program": "torchaudio", "skipped": f"{type(error).__name__}: {error}"})
    reference = plain.decode_fixed(model, text, lengths, seeded(), config.frames)
    checks = {name: gap(run(), reference) for name, run in programs.items() if name != "torchaudio"}
    rows = measure(config, programs, batch, device, batch * config.frames, "mel frames/s", "latency")
    return [row | checks.get(row["program"], {}) for row in rows] + skipped


def fresh_vocoder(config: BenchmarkConfig, arch: str, device: torch.device) -> WaveGlow | HifiGan:
    """In evaluation mode and float32."""
    torch.manual_seed(config.seed)
    if arch == "hifigan":
        return audible(HifiGan().eval().requires_grad_(False)).to(device)
    registry.of_kind(arch, WaveGlowConfig)
    model = registry.build(arch)
    for flow in model.flows:
        torch.nn.init.normal_(flow.wn.end.weight, std=0.01)
    return model.eval().requires_grad_(False).to(device)


def vocoder_programs(
    config: BenchmarkConfig, arch: str, device: torch.device, mel: Tensor, noise: Tensor
) -> tuple[Programs, Callable[[], Tensor]]:
    """Ours and the peers asked for, and what gives the sound in float32."""
    kernels = has_kernels(device.type)
    programs: Programs = {}
    exact = fresh_vocoder(config, arch, device)
    if isinstance(exact, HifiGan):
        half = fresh_vocoder(config, arch, device).to(config.dtype)
        simple: Callable[[Tensor, Tensor], Tensor] = lambda mel, noise: half(mel)  # noqa: E731
        if kernels:
            fast = FastHifiGan(half)
            programs["fused"] = lambda: fast(mel)
        return _with_peers(config, programs, simple, mel, noise), lambda: exact(mel)
    half = fresh_vocoder(config, arch, device).prepare(config.dtype)
    simple = lambda mel, noise: half.infer(mel, SIGMA, noise=noise)  # noqa: E731
    if kernels:
        engine = FastWaveGlow(half)
        programs["fused"] = lambda: engine.infer(mel, SIGMA, noise)
    programs = _with_peers(config, programs, simple, mel, noise)
    if "unfolded" in config.peers:
        kind, cast = mel.device.type, config.dtype != torch.float32

        def unfolded() -> Tensor:
            with torch.autocast(kind, config.dtype if cast else torch.bfloat16, enabled=cast):
                return exact.infer(mel, SIGMA, noise=noise)

        programs["unfolded"] = unfolded
    return programs, lambda: exact.infer(mel, SIGMA, noise=noise)


def _with_peers(
    config: BenchmarkConfig, programs: Programs, simple: Callable[[Tensor, Tensor], Tensor], mel: Tensor, noise: Tensor
) -> Programs:
    if "graph" in config.peers and mel.is_cuda:
        graphed = inference.GraphedModel(simple, mel, noise)
        programs["graph"] = lambda: graphed(mel, noise)
    if "plain" in config.peers or not programs:

        def eager() -> Tensor:
            with torch.inference_mode():
                return simple(mel, noise)

        programs["plain"] = eager
    return programs


def measure_vocoder(config: BenchmarkConfig, batch: int, device: torch.device) -> list[dict[str, Any]]:
    """Milliseconds and samples per second of a vocoder on spectrograms that are there."""
    generator = torch.Generator().manual_seed(config.seed)
    mel = torch.randn(batch, 80, config.frames, generator=generator).to(device)
    noise = torch.randn(1, 8, config.frames * 32, generator=generator).to(device)
    arch = "waveglow" if config.arch == "tacotron2" else config.arch
    programs, exact = vocoder_programs(config, arch, device, mel, noise)
    with torch.inference_mode():
        reference = exact()
    checks = {name: gap(run(), reference) for name, run in programs.items()}
    items = batch * config.frames * 256
    rows = measure(config, programs, batch, device, items, "samples/s", "latency")
    return [{"arch": arch} | row | checks[row["program"]] for row in rows]


def measure_pipeline(config: BenchmarkConfig, batch: int, device: torch.device) -> list[dict[str, Any]]:
    """A text to sound on the host, ``batch`` times at once; the parts' medians.

    "plain" decodes step by step on merged weights and vocodes without kernels; neither has graphs.
    """
    model = fresh_voice(config, config.arch, device)
    programs: Programs = {}
    parts: dict[str, list[tuple[float, float]]] = {}
    for name in ["ours", *config.peers]:
        vocoder = fresh_vocoder(config, config.vocoder, device)
        if isinstance(vocoder, HifiGan):
            mel = vocoder.mel
            vocoder.to(config.dtype)
            if name == "ours" and has_kernels(device.type):
                vocoder = FastHifiGan(vocoder)
        else:
            mel = MelConfig()
            engine = "auto" if name == "ours" else "plain"
            vocoder = WaveGlowVocoder(vocoder, mel, dtype=config.dtype, engine=engine)
        voice = Found(model, config.arch, mel, FrontEnd(), "fresh weights")
        options = {"batch_size": batch, "limit": config.frames, "engine": "auto" if name == "ours" else "steps"}
        speaker = Synthesizer(voice, vocoder, device, config.dtype, **options)
        if name != "ours":
            speaker.decoder.graphs = False
        taken = parts.setdefault(name, [])

        def say(speaker: Synthesizer = speaker, taken: list[tuple[float, float]] = taken) -> None:
            before = (speaker.timing.acoustic, speaker.timing.vocoder)
            speaker([config.text] * batch)
            taken.append((speaker.timing.acoustic - before[0], speaker.timing.vocoder - before[1]))

        programs[name] = say
    rows = measure(config, programs, batch, device, batch * config.frames * 256, "samples/s", "latency")
    for row in rows:
        acoustic, vocoder = torch.tensor(parts[row["program"]][config.warmup :]).T
        row |= {"acoustic_ms": float(acoustic.median()) * 1e3, "vocoder_ms": float(vocoder.median()) * 1e3}
        row |= {"characters": len(config.text), "frames": config.frames, "vocoder": config.vocoder}
    return rows


def measure_training(config: BenchmarkConfig, batch: int, device: torch.device) -> list[dict[str, Any]]:
    """Frames (of Tacotron 2) or samples (of WaveGlow) per second of whole training steps."""
    programs: Programs = {}
    checks: dict[str, Any] = {}
    for name in ["ours", *config.peers]:
        programs[name], known = training_step(config, name, batch, device)
        checks |= known
    voice = isinstance(registry.ARCHITECTURES[config.arch].config, Tacotron2Config)
    items, unit = (batch * config.frames, "mel frames/s") if voice else (batch * config.segment, "samples/s")
    rows = measure(config, programs, batch, device, items, unit, "throughput")
    for row in rows:
        row |= checks if row["program"] == "ours" else {}
    return rows


MEASURES = {
    "decode": measure_decode,
    "vocoder": measure_vocoder,
    "pipeline": measure_pipeline,
    "training": measure_training,
}


def main(args: list[str] | None = None) -> dict[str, Any]:
    config = configs.parse(BenchmarkConfig, args, configs_dir=CONFIGS, prog="benchmark")
    torch.backends.cudnn.benchmark = True
    with dist.init(config.device) as world:
        if world.device.type == "cuda":  # what fp32 remainders of lower precisions may use
            torch.set_float32_matmul_precision("highest" if config.precision == "fp32" else "high")
            torch.backends.cudnn.allow_tf32 = config.precision != "fp32"
        record = Record.start(TASK, "benchmark", configs.to_dict(config), seed=config.seed)
        rows = []
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", message=".*gate never fired|.*decoder steps")
            for batch in config.batch_sizes:
                found = MEASURES[config.mode](config, batch, world.device)
                rows += [{"arch": config.arch, "batch_size": batch} | row for row in found]
        record.attach("rows", rows)
        record.finish()
        path = Path(config.output)
        path.parent.mkdir(parents=True, exist_ok=True)
        record.save(path)
        print(f"record: {path}")
    return record.fields


if __name__ == "__main__":
    main()
