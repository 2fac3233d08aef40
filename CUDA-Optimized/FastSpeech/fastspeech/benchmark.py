"""Measure speaking in its forms, the stages and kernels it is made of, and training; side by side with plain peers.

    ./dlx bench FastSpeech -- --mode latency --forms "[graph, kernels]" --peers "[plain, compiled]"
    ./dlx bench FastSpeech -- --mode throughput --batch_sizes "[32]" --forms "[graph, graph_library]" --peers "[plain]"
    ./dlx bench FastSpeech -- --mode stages --batch_sizes "[1, 32]"
    ./dlx bench FastSpeech -- --mode pipeline --peers "[plain]"
    ./dlx bench FastSpeech -- --mode vocoder
    ./dlx bench FastSpeech -- --mode serving --batch_sizes "[1, 4, 16, 64]" --iterations 20
    ./dlx bench FastSpeech -- --mode training --batch_sizes "[32]" --peers "[graph_compiled, graph_fused, plain]"

Weights are fresh: speed does not depend on them. Every symbol is made to last so long that each program makes the same
number of frames. Each program's spectrogram is compared with the float32 one in the same run; a form that cannot run
here leaves a row that says why. Writes one JSON record.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor

from dlx import bench, dist
from dlx import config as configs
from dlx.precision import DTYPES
from dlx.record import Record
from dlx.speech import fast_vocoder
from dlx.speech.vocoder import HifiGan, audible

from . import registry
from .cuda import engine as engines
from .model import FastSpeech
from .options import CONFIGS, TASK
from .serving_benchmark import measure_serving
from .stages import measure_stages, roofline

CAPTURED = ("graph_compiled", "graph_fused")
LIBRARY = "graph_library"  # the graph form with cuDNN's convolutions, whatever the size
FORMS = (*engines.FORMS, LIBRARY)
PEERS = ("plain", "compiled", *CAPTURED)


@dataclass
class BenchmarkConfig:
    """Speed of inference and training. Everything is measured in this process, peers in turns with ours."""

    mode: Literal["latency", "throughput", "stages", "pipeline", "vocoder", "serving", "training"] = configs.field(
        "latency", help="what is timed"
    )
    arch: str = configs.field("fastspeech", help=f"one of {', '.join(registry.ARCHITECTURES)}")
    batch_sizes: list[int] = configs.field([1], help="items per call; of serving, callers at once", ge=1)
    text_length: int = configs.field(128, help="symbols of an item", ge=1)
    frames: int = configs.field(800, help="of an item's spectrogram", ge=1)
    forms: list[str] = configs.field([], help=f"the first is ours: {', '.join(FORMS)}; none: the best there is")
    peers: list[str] = configs.field([], help=f"measured side by side: {', '.join(PEERS)} (graph_... in training)")
    library_rows: int | None = configs.field(
        None, help="positions of a batch from which on convolutions are cuDNN's; null: never"
    )
    precision: Literal["fp32", "tf32", "bf16", "fp16"] = configs.field("bf16", help="of the matrix products")
    warmup: int = configs.field(5, help="calls that do not count", ge=1)
    iterations: int = configs.field(50, help="timed calls per turn", ge=2)
    pairs: int = configs.field(3, help="turns of ours and peer", ge=1)
    seed: int = configs.field(1, help="of weights and inputs", ge=0)
    device: str = configs.field("auto", help="auto, cpu, cuda or cuda:N")
    output: str = configs.field("runs/benchmark.json", help="the record")

    def __post_init__(self) -> None:
        if self.warmup >= self.iterations:
            raise ValueError(f"warmup {self.warmup} must be less than iterations {self.iterations}")
        for known, given, what in ((PEERS, self.peers, "peer"), (FORMS, self.forms, "form")):
            unknown = [name for name in given if name not in known]
            if unknown:
                raise ValueError(f"unknown {what} {unknown[0]!r}; known: {', '.join(known)}")
        if self.mode != "training" and (captured := [name for name in self.peers if name in CAPTURED]):
            raise ValueError(f"peer {captured[0]} is one of training, not of {self.mode}")

    @property
    def dtype(self) -> torch.dtype:
        return DTYPES[self.precision]


Programs = dict[str, Callable[[], Any]]


@dataclass
class Speech:
    """A batch of texts of full length and the pauses that make every item ``frames`` long."""

    text: Tensor
    lengths: Tensor
    pauses: Tensor


def fresh_voice(config: BenchmarkConfig, device: torch.device, dtype: torch.dtype) -> FastSpeech:
    """In evaluation mode; every symbol lasts frames // text_length frames."""
    torch.manual_seed(config.seed)
    model = registry.build(config.arch).eval().requires_grad_(False)
    model.durations.output.weight.zero_()
    model.durations.output.bias.fill_(math.log(config.frames // config.text_length + 1))
    return model.to(device, dtype)


def speech(config: BenchmarkConfig, batch: int, device: torch.device) -> Speech:
    generator = torch.Generator().manual_seed(config.seed)
    shape = (batch, config.text_length)
    text = torch.randint(1, registry.SYMBOLS, shape, generator=generator)
    pauses = torch.zeros(shape, dtype=torch.int64)
    pauses[:, : config.frames % config.text_length] = 1
    lengths = torch.full((batch,), config.text_length)
    return Speech(text.to(device), lengths.to(device), pauses.to(device))


def _engine(config: BenchmarkConfig, model: FastSpeech, form: str) -> engines.Engine:
    if form == LIBRARY:
        return engines.build(model, "graph", library_rows=1)
    if form in ("kernels", "graph"):
        return engines.build(model, form, library_rows=config.library_rows)
    return engines.build(model, form, **({"batch": max(config.batch_sizes)} if form == "tensorrt" else {}))


def speaking(config: BenchmarkConfig, batch: int, device: torch.device) -> tuple[Programs, list[dict[str, Any]]]:
    """The forms and peers asked for, each saying one batch, and rows of those that cannot be."""
    given = speech(config, batch, device)
    model = fresh_voice(config, device, config.dtype)
    programs: Programs = {}
    skipped: list[dict[str, Any]] = []
    for form in config.forms or ["auto"]:
        try:
            run = _engine(config, model, form)
            run(given.text, given.lengths, pauses=given.pauses)  # what cannot be built or launched shows here
        except (ImportError, ValueError, RuntimeError) as error:
            skipped.append({"program": form, "skipped": f"{type(error).__name__}: {error}"})
            continue
        programs[form if form == LIBRARY else run.form] = lambda run=run: run(
            given.text, given.lengths, pauses=given.pauses
        )
    if "plain" in config.peers and "plain" not in programs:
        plain = engines.build(model, "plain")
        programs["plain"] = lambda: plain(given.text, given.lengths, pauses=given.pauses)
    if "compiled" in config.peers:
        compiled = torch.compile(model, mode="max-autotune-no-cudagraphs" if device.type == "cuda" else None)

        @torch.inference_mode()
        def say() -> Any:
            return compiled(given.text, given.lengths, size=config.frames, pauses=given.pauses)

        programs["compiled"] = say
    return programs, skipped


def conditions(config: BenchmarkConfig, batch: int, device: torch.device) -> dict[str, Any]:
    """How `bench.against_peers` is to measure."""
    turns = {"pairs": config.pairs, "warmup": config.warmup, "iterations": config.iterations}
    return turns | {"device": device, "batch": batch, "precision": config.precision}


def timed(
    config: BenchmarkConfig, programs: Programs, batch: int, device: torch.device, mode: str, scale: int = 1
) -> list[dict[str, Any]]:
    """Rows of all programs, the first being ours, none where there is none. ``scale``: samples of a frame, if sound."""
    items, unit = batch * config.frames * scale, "mel frames/s" if scale == 1 else "samples/s"
    if not programs:
        return []
    return bench.against_peers(programs, items=items, unit=unit, mode=mode, **conditions(config, batch, device))


def gap(found: Tensor, reference: Tensor) -> dict[str, float]:
    """How far a program's output is from the float32 one."""
    difference = (found.double() - reference.double()).abs()
    size = max(float(reference.double().abs().max()), 1e-12)
    return {"largest_difference": float(difference.max()), "mean_difference": float(difference.mean()), "size": size}


def memory(program: Callable[[], Any], device: torch.device) -> dict[str, float]:
    """Megabytes of the GPU at most while a program runs, weights of all programs included; nothing on a CPU."""
    if device.type != "cuda":
        return {}
    torch.cuda.reset_peak_memory_stats(device)
    program()
    return {"gpu_memory_mb": torch.cuda.max_memory_allocated(device) / 1e6}


def measure_speaking(config: BenchmarkConfig, batch: int, device: torch.device) -> list[dict[str, Any]]:
    """A batch of texts to spectrograms: mode latency waits for each call, mode throughput lets them queue up."""
    given = speech(config, batch, device)
    exact = engines.build(fresh_voice(config, device, torch.float32), "plain")
    reference = exact(given.text, given.lengths, pauses=given.pauses)
    programs, skipped = speaking(config, batch, device)
    checks = {}
    for name, run in programs.items():
        found = run()
        if found.mel.shape != reference.mel.shape:
            raise ValueError(f"{name} made {tuple(found.mel.shape)} instead of {tuple(reference.mel.shape)}")
        checks[name] = gap(found.mel, reference.mel) | memory(run, device)
    rows = timed(config, programs, batch, device, config.mode)
    return [row | checks[row["program"]] for row in rows] + skipped


def measure_pipeline(config: BenchmarkConfig, batch: int, device: torch.device) -> list[dict[str, Any]]:
    """Texts to sound with HiFi-GAN, on kernels where they run; peers with the vocoder in plain PyTorch."""
    acoustic, skipped = speaking(config, batch, device)
    torch.manual_seed(config.seed)
    simple = audible(HifiGan().eval().requires_grad_(False)).to(device, config.dtype)
    fast = fast_vocoder.optimize(simple, config.dtype)
    programs: Programs = {}
    for name, say in acoustic.items():

        @torch.inference_mode()
        def sound(say: Callable[[], Any] = say, vocoder: Any = simple if name in config.peers else fast) -> Tensor:
            found = say()
            return vocoder(found.mel, found.mel_lengths)

        programs[name] = sound
    seconds = batch * config.frames * simple.mel.hop_length / simple.mel.sample_rate
    rows = timed(config, programs, batch, device, "latency", simple.mel.hop_length)
    for row in rows:
        row |= {"audio_seconds": seconds, "real_time_factor": seconds / (row["p50_ms"] / 1e3)}
    return rows + skipped


def measure_vocoder(config: BenchmarkConfig, batch: int, device: torch.device) -> list[dict[str, Any]]:
    """Spectrograms to sound by HiFi-GAN, a step of `fast_vocoder.ladder` a row; "ours" is the last there is."""
    torch.manual_seed(config.seed)
    simple = audible(HifiGan().eval().requires_grad_(False)).to(device)
    mel = torch.randn(batch, simple.config.num_mels, config.frames, device=device) - 5
    steps = fast_vocoder.ladder(simple, config.dtype)
    skipped = [{"program": name, "skipped": step} for name, step in steps.items() if isinstance(step, str)]
    programs: Programs = {}
    with torch.inference_mode():
        exact = steps["folded"](mel)
        checks = {}
        for name, step in reversed(steps.items()):
            if isinstance(step, str):
                continue

            @torch.inference_mode()
            def sound(step: Any = step) -> Tensor:
                return step(mel)

            programs[name] = sound
            checks[name] = gap(sound(), exact)
    rows = timed(config, programs, batch, device, "latency", simple.mel.hop_length)
    seconds = batch * config.frames * simple.mel.hop_length / simple.mel.sample_rate
    for row in rows:
        row |= checks[row["program"]] | {"real_time_factor": seconds / (row["p50_ms"] / 1e3), "audio_seconds": seconds}
    return rows[::-1] + skipped


def measure_training(config: BenchmarkConfig, batch: int, device: torch.device) -> list[dict[str, Any]]:
    """Mel frames per second of whole training steps; "plain" is autocast and Adam, not captured, not fused."""
    from .training_benchmark import training_step

    programs = {name: training_step(config, name, batch, device) for name in ["ours", *config.peers]}
    return timed(config, programs, batch, device, "throughput")


MEASURES = {
    "latency": measure_speaking,
    "throughput": measure_speaking,
    "stages": measure_stages,
    "pipeline": measure_pipeline,
    "vocoder": measure_vocoder,
    "serving": measure_serving,
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
        for batch in config.batch_sizes:
            found = MEASURES[config.mode](config, batch, world.device)
            rows += [{"arch": config.arch, "batch_size": batch} | row for row in found]
        record.attach("rows", rows)
        if config.mode == "stages":
            record.attach("roofline", roofline(rows))
        record.finish()
        path = Path(config.output)
        path.parent.mkdir(parents=True, exist_ok=True)
        record.save(path)
        print(f"record: {path}")
    return record.fields


if __name__ == "__main__":
    main()
