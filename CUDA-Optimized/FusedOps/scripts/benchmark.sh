#!/usr/bin/env bash
# benchmark: options are those of `dlx run FusedOps benchmark -- --help`.
set -euo pipefail
exec "$(dirname "$0")/../../../dlx" run FusedOps benchmark -- "$@"
