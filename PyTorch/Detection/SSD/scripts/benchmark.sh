#!/usr/bin/env bash
# benchmark: options are those of `dlx run SSD benchmark -- --help`.
set -euo pipefail
exec "$(dirname "$0")/../../../../dlx" run SSD benchmark -- "$@"
