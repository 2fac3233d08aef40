#!/usr/bin/env bash
# export: options are those of `dlx run Tacotron2 export -- --help`.
set -euo pipefail
exec "$(dirname "$0")/../../../../dlx" run Tacotron2 export -- "$@"
