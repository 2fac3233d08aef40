#!/usr/bin/env bash
# evaluate: options are those of `dlx run FastSpeech evaluate -- --help`.
set -euo pipefail
exec "$(dirname "$0")/../../../dlx" run FastSpeech evaluate -- "$@"
