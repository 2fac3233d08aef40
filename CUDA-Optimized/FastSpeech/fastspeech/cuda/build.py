"""Compile csrc/*.cu with nvcc: a shared library with launchers, and cubins for a driver's own launches.

Results are kept in $DLX_HOME/kernels under a hash of every source, the compiler, its flags and the architecture, so
that a change of any of them builds anew and nothing else does.
"""

from __future__ import annotations

import functools
import hashlib
import os
import re
import shutil
import subprocess
from pathlib import Path

from dlx import files, paths

SOURCES = Path(__file__).resolve().parents[2] / "csrc"
KERNELS = (
    "length_regulation", "positions", "residual_norm", "attention64", "conv_ff", "duration_predictor",
)  # fmt: skip
FLAGS = ("-std=c++17", "-O3", "--expt-relaxed-constexpr")


class BuildError(RuntimeError):
    """There is no compiler, or it refused."""


def find_nvcc() -> str:
    """nvcc of $CUDA_HOME, of the PATH or of /usr/local/cuda; BuildError if there is none."""
    places = [Path(os.environ["CUDA_HOME"]) / "bin" / "nvcc"] if os.environ.get("CUDA_HOME") else []
    places += [Path(found)] if (found := shutil.which("nvcc")) else []
    places.append(Path("/usr/local/cuda/bin/nvcc"))
    for place in places:
        if place.is_file():
            return str(place)
    raise BuildError("nvcc was not found: install the CUDA toolkit and set CUDA_HOME, or use the plain form")


@functools.cache
def compiler_version(nvcc: str) -> str:
    return _run([nvcc, "--version"])


def content_hash(arch: str, kind: str, names: tuple[str, ...] = KERNELS) -> str:
    """Of all that the result depends on: 16 hexadecimal digits."""
    digest = hashlib.sha256()
    for part in (arch, kind, *FLAGS, compiler_version(find_nvcc())):
        digest.update(part.encode() + b"\0")
    for path in sorted(SOURCES.glob("*.cuh")) + [SOURCES / f"{name}.cu" for name in names]:
        digest.update(path.name.encode() + b"\0" + path.read_bytes() + b"\0")
    return digest.hexdigest()[:16]


def check_arch(arch: str) -> str:
    """Checks "sm_90" and the like, 8.0 or newer (asynchronous copies, bf16 products); else ValueError."""
    match = re.fullmatch(r"sm_(\d{2,3})[af]?", arch)
    if not match or int(match[1]) < 80:
        raise ValueError(f"the kernels need an architecture of sm_80 or newer, got {arch!r}")
    return arch


def library(arch: str) -> Path:
    """The shared library of all launchers for one architecture, built if it is not there."""
    target = paths.home() / "kernels" / f"fastspeech-{check_arch(arch)}-{content_hash(arch, 'library')}.so"
    inputs = [str(SOURCES / f"{name}.cu") for name in KERNELS]
    return _once(target, ["-shared", "-Xcompiler", "-fPIC", "--threads", "0", *_code(arch), *inputs])


def cubin(name: str, arch: str) -> Path:
    """The kernels of csrc/``name``.cu for one architecture, for `cuModuleLoad`."""
    if name not in KERNELS:
        raise ValueError(f"unknown kernel {name!r}; known: {', '.join(KERNELS)}")
    target = paths.home() / "kernels" / f"{name}-{check_arch(arch)}-{content_hash(arch, 'cubin', (name,))}.cubin"
    return _once(target, ["-cubin", f"-arch={arch}", str(SOURCES / f"{name}.cu")])


def _code(arch: str) -> list[str]:
    return ["-gencode", f"arch={arch.replace('sm_', 'compute_')},code={arch}"]


def _once(target: Path, arguments: list[str]) -> Path:
    if target.is_file():
        return target
    with files.lock(target.with_suffix(".lock"), message=f"waiting for {target.name}"):
        if not target.is_file():
            with files.atomic_path(target) as temporary:
                _run([find_nvcc(), *FLAGS, "-o", str(temporary), *arguments])
    return target


def _run(command: list[str]) -> str:
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode:
        raise BuildError(f"{' '.join(command)} failed with {done.returncode}:\n{(done.stderr or done.stdout).strip()}")
    return done.stdout
