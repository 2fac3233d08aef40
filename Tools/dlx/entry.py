"""Run a module the way `python -m` does, but let Ctrl-C end it with status 130 and no traceback.

For example: `python -m dlx.entry convnets.train --config quickstart`
"""

from __future__ import annotations

import os
import runpy
import sys


def main() -> None:
    """Replace this program by the module that the first argument names; the rest are its arguments."""
    module, *arguments = sys.argv[1:]
    sys.argv = [module, *arguments]  # runpy puts the module's file in place of its name
    try:
        runpy.run_module(module, run_name="__main__", alter_sys=True)
    except KeyboardInterrupt:
        print("\ninterrupted", file=sys.stderr)
        sys.stdout.flush()
        os._exit(130)  # at once: clean-up of worker processes that were interrupted too would print their tracebacks


if __name__ == "__main__":
    main()
