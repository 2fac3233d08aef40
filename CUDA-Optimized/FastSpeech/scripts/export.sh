#!/usr/bin/env bash
# export: options are those of `dlx run FastSpeech export -- --help`.
set -euo pipefail
exec "$(dirname "$0")/../../../dlx" run FastSpeech export -- "$@"
