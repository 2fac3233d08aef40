#!/usr/bin/env bash
# Train with NPROC processes on this machine (default 1; "gpu": one per GPU). Options: `dlx run Tacotron2 train -- --help`.
set -euo pipefail
exec "$(dirname "$0")/../../../../dlx" run Tacotron2 train --nproc "${NPROC:-1}" -- "$@"
