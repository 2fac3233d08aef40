#!/usr/bin/env bash
# benchmark: options are those of `dlx run SE3Transformer benchmark -- --help`.
set -euo pipefail
exec "$(dirname "$0")/../../../../dlx" run SE3Transformer benchmark -- "$@"
