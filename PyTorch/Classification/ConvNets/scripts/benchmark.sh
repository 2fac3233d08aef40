#!/usr/bin/env bash
# benchmark: options are those of `dlx run ConvNets benchmark -- --help`.
set -euo pipefail
exec "$(dirname "$0")/../../../../dlx" run ConvNets benchmark -- "$@"
