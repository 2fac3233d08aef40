#!/usr/bin/env bash
# Train with NPROC processes on this machine (default 1; "gpu": one per GPU). Options: `dlx run SE3Transformer train -- --help`.
set -euo pipefail
exec "$(dirname "$0")/../../../../dlx" run SE3Transformer train --nproc "${NPROC:-1}" -- "$@"
