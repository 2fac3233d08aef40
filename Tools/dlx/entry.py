"""Run a module the way `python -m` does, but end on a user's mistake with one line, on Ctrl-C with status 130.

Errors of value, of files, of downloads and of arithmetic carry a message written for the user; their traceback is shown
with DLX_DEBUG=1. Every other exception is a fault of the code and keeps its traceback.

For example: `python -m dlx.entry convnets.train --config quickstart`
"""

from __future__ import annotations

import os
import runpy
import signal
import sys


def main() -> None:
    """Replace this program by the module that the first argument names; the rest are its arguments."""
    module, *arguments = sys.argv[1:]
    sys.argv = [module, *arguments]  # runpy puts the module's file in place of its name
    try:
        runpy.run_module(module, run_name="__main__", alter_sys=True)
    except KeyboardInterrupt:
        _leave(signal.SIGINT)
    except Exception as error:
        if hasattr(error, "sigval"):  # torchrun turns the signals that it gets into an exception
            _leave(error.sigval)
        for_user = isinstance(error, ValueError | OSError | ArithmeticError) or type(error).__name__ == "FetchError"
        if not for_user or os.environ.get("DLX_DEBUG"):
            raise
        print(f"{module}: error: {error}\n(DLX_DEBUG=1 shows where)", file=sys.stderr)
        sys.exit(1)


def _leave(number: int) -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # torchrun hands on what the terminal has already sent
    if "LOCAL_RANK" not in os.environ:
        print(f"\nended by {signal.Signals(number).name}", file=sys.stderr)
    sys.exit(128 + number)


if __name__ == "__main__":
    main()
