"""`python -m dlx` is the launcher; `./dlx` starts it."""

import sys

from dlx.cli import main

sys.exit(main(sys.argv[1:]))
