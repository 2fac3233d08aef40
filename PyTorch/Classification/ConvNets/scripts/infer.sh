#!/usr/bin/env bash
# infer: options are those of `dlx run ConvNets infer -- --help`.
set -euo pipefail
exec "$(dirname "$0")/../../../../dlx" run ConvNets infer -- "$@"
