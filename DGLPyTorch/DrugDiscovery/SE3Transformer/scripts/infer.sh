#!/usr/bin/env bash
# infer: options are those of `dlx run SE3Transformer infer -- --help`.
set -euo pipefail
exec "$(dirname "$0")/../../../../dlx" run SE3Transformer infer -- "$@"
