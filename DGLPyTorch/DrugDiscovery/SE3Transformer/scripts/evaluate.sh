#!/usr/bin/env bash
# evaluate: options are those of `dlx run SE3Transformer evaluate -- --help`.
set -euo pipefail
exec "$(dirname "$0")/../../../../dlx" run SE3Transformer evaluate -- "$@"
