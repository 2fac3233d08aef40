#!/usr/bin/env bash
# evaluate: options are those of `dlx run Tacotron2 evaluate -- --help`.
set -euo pipefail
exec "$(dirname "$0")/../../../../dlx" run Tacotron2 evaluate -- "$@"
