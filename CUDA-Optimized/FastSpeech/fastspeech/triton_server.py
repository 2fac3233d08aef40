"""The voice as a model of Triton Inference Server, by the package nvidia-pytriton: `serve --triton true`.

Model "fastspeech", batches made by the server. Inputs: text BYTES (B, 1), UTF-8; speed FP32 (B, 1). Outputs: audio FP32
(B, S), filled up with 0; samples INT32 (B, 1), how many count; error BYTES (B, 1), empty, or why there is no sound: one
text that cannot be said spoils no batch. HTTP at `--port`, gRPC at the next one, metrics at the one after that.
"""

from __future__ import annotations

import os
import signal
import sysconfig
import threading
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from .synthesis import Job, Synthesizer

if TYPE_CHECKING:
    from .serve import ServeConfig

NAME = "fastspeech"
PINS = "nvidia-pytriton==0.7.0 numpy==1.26.4 protobuf==6.33.6 grpcio==1.85.3 tritonclient==2.73.0 pyzmq==27.3.0"


def load() -> Any:
    """The package `pytriton`; ValueError that says what to install where it is missing."""
    try:
        import pytriton.decorators
        import pytriton.model_config
        import pytriton.triton
    except ImportError as error:
        raise ValueError(
            f"--triton needs the package nvidia-pytriton ({error}), in an environment of its own, since it wants an "
            f"older numpy: pip install {PINS}"
        ) from None
    return pytriton


def speak(synthesizer: Synthesizer, text: np.ndarray, speed: np.ndarray, longest: int) -> dict[str, np.ndarray]:
    """The outputs for texts (B, 1) as bytes and speeds (B, 1)."""
    jobs: dict[int, Job] = {}
    errors = [""] * len(text)
    for row, (value, rate) in enumerate(zip(text[:, 0], speed[:, 0], strict=True)):
        try:
            said = value.decode("utf-8") if isinstance(value, bytes) else str(value)
            if len(said) > longest:
                raise ValueError(f"a text has {longest} characters at most, got {len(said)}")
            jobs[row] = synthesizer.job(said, float(rate))
        except ValueError as error:  # also bytes that are no UTF-8
            errors[row] = str(error)
    speeches = dict(zip(jobs, synthesizer.say(list(jobs.values())), strict=True)) if jobs else {}
    counts = [len(speeches[row].audio) if row in speeches else 0 for row in range(len(text))]
    audio = np.zeros((len(text), max(*counts, 1)), np.float32)
    for row, speech in speeches.items():
        audio[row, : counts[row]] = speech.audio
    return {
        "audio": audio,
        "samples": np.array(counts, np.int32)[:, None],
        "error": np.array([[error.encode()] for error in errors], object),
    }


def run(config: ServeConfig, device: torch.device) -> None:
    """Serve until SIGTERM or Ctrl-C."""
    pytriton = load()
    from .infer import build
    from .serve import LONGEST, warm_up

    # Triton's Python stub loads libpython by name: that of this interpreter, not another one of the system.
    places = [sysconfig.get_config_var("LIBDIR") or "", os.environ.get("LD_LIBRARY_PATH", "")]
    os.environ["LD_LIBRARY_PATH"] = ":".join(place for place in places if place)
    synthesizer = build(config, device)
    warm_up(synthesizer)

    @pytriton.decorators.batch
    def infer(text: np.ndarray, speed: np.ndarray) -> dict[str, np.ndarray]:
        return speak(synthesizer, text, speed, LONGEST)

    models = pytriton.model_config
    tensor = models.Tensor
    addresses = {f"{kind}_address": config.host for kind in ("http", "grpc", "metrics")}
    ports = {f"{kind}_port": config.port + number for number, kind in enumerate(("http", "grpc", "metrics"))}
    stopped = threading.Event()
    with pytriton.triton.Triton(config=pytriton.triton.TritonConfig(**addresses, **ports)) as server:
        server.bind(
            model_name=NAME,
            infer_func=infer,
            inputs=[tensor(name="text", dtype=bytes, shape=(1,)), tensor(name="speed", dtype=np.float32, shape=(1,))],
            outputs=[
                tensor(name="audio", dtype=np.float32, shape=(-1,)),
                tensor(name="samples", dtype=np.int32, shape=(1,)),
                tensor(name="error", dtype=bytes, shape=(1,)),
            ],
            config=models.ModelConfig(
                max_batch_size=config.batch_size,
                batcher=models.DynamicBatcher(max_queue_delay_microseconds=int(1e6 * config.wait)),
            ),
        )
        server.run()
        print(f"Triton serves {NAME} at http://{config.host}:{config.port}; SIGTERM ends it", flush=True)
        for number in (signal.SIGTERM, signal.SIGINT):
            signal.signal(number, lambda *_: stopped.set())
        stopped.wait()
