"""Start N workers of `train` with a parameter server, on this machine.

    python -m rn50_mxnet.runner -n 2 -b 64 -- --config quickstart --output_dir runs/two

`-n 1` starts `train` itself, without a server. The first worker that fails ends all; Ctrl-C and SIGTERM reach the
workers, which save and leave. Several machines: scripts/slurm.sub.
"""

from __future__ import annotations

import argparse
import ctypes
import os
import signal
import socket
import subprocess
import sys
import time

from .threads import cores

ROLES = {"scheduler": "import mxnet", "server": "import mxnet"}  # with these roles the import serves, and then ends


def free_port() -> int:
    """A port that nobody listens at, at this moment."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


PR_SET_PDEATHSIG = 1  # Linux: the signal that a process gets when its parent dies
_libc = ctypes.CDLL(None)


def end_with_parent() -> None:
    """In a child: a killed runner must not leave servers that wait for ever, nor workers that wait for each other."""
    if sys.platform == "linux":
        _libc.prctl(PR_SET_PDEATHSIG, signal.SIGKILL)


def environment(role: str, port: int, workers: int, servers: int) -> dict[str, str]:
    """The variables of a process with this role."""
    threads = max(1, cores() // workers)
    return os.environ | {
        "DMLC_ROLE": role, "DMLC_PS_ROOT_URI": "127.0.0.1", "DMLC_PS_ROOT_PORT": str(port),
        "DMLC_NODE_HOST": "127.0.0.1",
        "DMLC_NUM_WORKER": str(workers), "DMLC_NUM_SERVER": str(servers),
        "OMP_NUM_THREADS": os.environ.get("OMP_NUM_THREADS", str(threads)),
    }  # fmt: skip


def launch(workers: int, servers: int, arguments: list[str]) -> int:
    """Run to the end; the first exit status that is not 0, else 0."""
    command = [sys.executable, "-m", "rn50_mxnet.train", *arguments]
    if workers == 1:
        return subprocess.run(command).returncode
    port = free_port()
    # In a session of their own: a terminal or a scheduler signals whole groups of processes, and the workers still need
    # the server to end their step.
    helping = [
        subprocess.Popen(
            [sys.executable, "-c", ROLES[role]], env=environment(role, port, workers, servers), start_new_session=True,
            preexec_fn=end_with_parent,
        )
        for role in ["scheduler", *["server"] * servers]
    ]  # fmt: skip
    running = [
        subprocess.Popen(
            [*command, "--kvstore", "dist_sync"], env=environment("worker", port, workers, servers),
            preexec_fn=end_with_parent,
        )
        for _ in range(workers)
    ]  # fmt: skip

    def forward(number: int, frame: object) -> None:
        for process in running:
            if process.poll() is None:
                process.send_signal(number)

    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
        signal.signal(number, forward)
    try:
        while any(process.poll() is None for process in running):
            if any(process.poll() not in (None, 0) for process in running):
                deadline = time.monotonic() + 30  # the others leave for the same reason, or wait for it in vain
                while time.monotonic() < deadline and any(process.poll() is None for process in running):
                    time.sleep(0.1)
                break
            time.sleep(0.1)
    finally:
        for process in [*running, *helping]:
            if process.poll() is None and process in running:
                process.kill()
        for process in helping:
            try:
                process.wait(5)
            except subprocess.TimeoutExpired:
                process.kill()
        for process in [*running, *helping]:
            process.wait()
    return next((process.returncode for process in running if process.returncode), 0)


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="runner", description="Start N workers of training on this machine.")
    parser.add_argument("-n", "--workers", type=int, default=1, help="processes (default 1)")
    parser.add_argument("-s", "--servers", type=int, default=1, help="parameter servers (default 1)")
    parser.add_argument("-b", "--batch_size", type=int, help="images per worker")
    parser.add_argument("rest", nargs=argparse.REMAINDER, metavar="-- OPTIONS", help="options of train")
    options = parser.parse_args(arguments)
    if options.workers < 1 or options.servers < 1:
        parser.error(f"need at least one worker and one server, got {options.workers} and {options.servers}")
    rest = options.rest[1:] if options.rest[:1] == ["--"] else options.rest
    batch = ["--batch_size", str(options.batch_size)] if options.batch_size is not None else []
    status = launch(options.workers, options.servers, [*rest, *batch])
    return 128 - status if status < 0 else status


if __name__ == "__main__":
    sys.exit(main())
