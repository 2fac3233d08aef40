#!/usr/bin/env bash
# Train with NPROC processes on this machine (default 1; "gpu": one per GPU). Options: `dlx run FastSpeech train -- --help`.
set -euo pipefail
exec "$(dirname "$0")/../../../dlx" run FastSpeech train --nproc "${NPROC:-1}" -- "$@"
