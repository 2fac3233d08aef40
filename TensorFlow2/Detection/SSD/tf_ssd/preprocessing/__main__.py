"""The steps of the library, and a check of YAML files with steps.

python -m tf_ssd.preprocessing --list-steps
python -m tf_ssd.preprocessing augment.yaml
"""

from __future__ import annotations

import argparse
import sys

from . import list_steps, load_steps


def main(args: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="tf_ssd.preprocessing", description="Steps of preprocessing and augmentation")
    parser.add_argument("--list-steps", action="store_true", help="print every step with its parameters and defaults")
    parser.add_argument("files", nargs="*", metavar="FILE", help="YAML files with a list of steps, to be checked")
    options = parser.parse_args(args)
    if not options.list_steps and not options.files:
        parser.error("give --list-steps or a file to check")
    if options.list_steps:
        print(list_steps())
    try:
        for file in options.files:
            for function, arguments in load_steps(file):
                print(f"{file}: {function.__name__} {arguments}")
    except (ValueError, OSError) as error:
        print(error, file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main())
