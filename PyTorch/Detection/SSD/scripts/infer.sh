#!/usr/bin/env bash
# infer: options are those of `dlx run SSD infer -- --help`.
set -euo pipefail
exec "$(dirname "$0")/../../../../dlx" run SSD infer -- "$@"
