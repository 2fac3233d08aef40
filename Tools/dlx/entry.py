"""Run a module the way `python -m` does, but let Ctrl-C end it with status 130 and no traceback.

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
        if not hasattr(error, "sigval"):  # torchrun turns the signals that it gets into an exception
            raise
        _leave(error.sigval)


def _leave(number: int) -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # torchrun hands on what the terminal has already sent
    if "LOCAL_RANK" not in os.environ:
        print(f"\nended by {signal.Signals(number).name}", file=sys.stderr)
    sys.exit(128 + number)


if __name__ == "__main__":
    main()
