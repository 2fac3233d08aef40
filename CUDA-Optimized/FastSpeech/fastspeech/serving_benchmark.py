"""What callers of a served voice wait for: latency, time to the first sound, and sound made, by how many ask at once.

In one process and without HTTP: the queue, the batches and the voice are those of `serve`."""

from __future__ import annotations

import asyncio
import time
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from dlx import record
from dlx.precision import DTYPES
from dlx.speech import fast_vocoder
from dlx.speech.frontend import FrontEnd
from dlx.speech.vocoder import HifiGan

from .pretrained import Found
from .service import Service
from .synthesis import Synthesizer

if TYPE_CHECKING:
    from .benchmark import BenchmarkConfig

SENTENCES = (
    "The birch canoe slid on the smooth planks.",
    "Glue the sheet to the dark blue background.",
    "It is easy to tell the depth of a well.",
    "These days a chicken leg is a rare dish.",
    "Rice is often served in round bowls.",
    "The juice of lemons makes fine punch.",
    "The box was thrown beside the parked truck.",
    "Large size in stockings is hard to sell.",
)  # of the Harvard sentences (IEEE 1969)


def fresh_synthesizer(config: BenchmarkConfig, device: torch.device) -> Synthesizer:
    """A voice and a HiFi-GAN of fresh weights; a symbol lasts frames / text_length frames."""
    from .benchmark import fresh_voice

    torch.manual_seed(config.seed)
    dtype = DTYPES[config.precision]
    vocoder = fast_vocoder.optimize(HifiGan().eval().requires_grad_(False).to(device), dtype)
    model = fresh_voice(config, torch.device("cpu"), torch.float32)
    found = Found(model, config.arch, vocoder.mel, FrontEnd(), "fresh weights")
    form = config.forms[0] if config.forms else "auto"
    return Synthesizer(found, vocoder, device, dtype, form=form)


async def _load(service: Service, callers: int, requests: int, streamed: bool) -> dict[str, Any]:
    """``requests`` requests by so many callers, each of whom asks again as soon as the answer is there."""
    texts = iter([" ".join(SENTENCES[(n + k) % len(SENTENCES)] for k in range(1 + n % 4)) for n in range(requests)])
    firsts: list[float] = []
    wholes: list[float] = []
    sound = 0.0

    async def caller() -> None:
        nonlocal sound
        for text in texts:
            began, first = time.perf_counter(), None
            if streamed:
                async for speech in service.stream(text):
                    first = first or time.perf_counter() - began
                    sound += speech.seconds
            else:
                sound += (await service.say(text)).seconds
            wholes.append(time.perf_counter() - began)
            firsts.append(first or wholes[-1])

    began = time.perf_counter()
    await asyncio.gather(*(caller() for _ in range(callers)))
    seconds = time.perf_counter() - began
    return {
        "requests": requests,
        "requests_per_second": requests / seconds,
        "audio_seconds_per_second": sound / seconds,
        **{f"latency_p{percent}_ms": 1000 * float(np.percentile(wholes, percent)) for percent in (50, 90, 99)},
        **{f"first_sound_p{percent}_ms": 1000 * float(np.percentile(firsts, percent)) for percent in (50, 90, 99)},
    }


def measure_serving(config: BenchmarkConfig, callers: int, device: torch.device) -> list[dict[str, Any]]:
    """Whole answers and streams for ``callers`` at once; the entries of `batch_sizes` are numbers of callers."""
    synthesizer = fresh_synthesizer(config, device)

    async def measure() -> list[dict[str, Any]]:
        rows = []
        for streamed in (False, True):
            async with Service(synthesizer, queue_size=max(64, 2 * callers), time_limit=600) as service:
                await _load(service, callers, config.warmup * callers, streamed)
                if device.type == "cuda":
                    torch.cuda.reset_peak_memory_stats(device)
                row = await _load(service, callers, config.iterations * callers, streamed)
                row |= {"mean_batch": service.statistics()["mean_batch"]}
            if device.type == "cuda":
                row["gpu_memory_mb"] = torch.cuda.max_memory_allocated(device) / 1e6
            rows.append({"program": "stream" if streamed else "whole", "form": synthesizer.engine.form} | row)
        return rows

    rows = asyncio.run(measure())
    for row in rows:
        row |= {"callers": callers, "precision": config.precision, "versions": record.versions()}
        print(
            f"{callers:>6}  {row['program']:8s} {row['requests_per_second']:8.1f} requests/s · latency p50 "
            f"{row['latency_p50_ms']:.1f} ms · first sound p50 {row['first_sound_p50_ms']:.1f} ms",
            flush=True,
        )
    return rows
