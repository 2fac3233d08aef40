#!/usr/bin/env bash
# infer: options are those of `dlx run FastSpeech infer -- --help`.
set -euo pipefail
exec "$(dirname "$0")/../../../dlx" run FastSpeech infer -- "$@"
