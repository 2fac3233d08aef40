#!/usr/bin/env bash
# infer: options are those of `dlx run Tacotron2 infer -- --help`.
set -euo pipefail
exec "$(dirname "$0")/../../../../dlx" run Tacotron2 infer -- "$@"
