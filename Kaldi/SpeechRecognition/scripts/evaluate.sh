#!/usr/bin/env bash
# evaluate: options are those of `dlx run Kaldi/SpeechRecognition evaluate -- --help`.
set -euo pipefail
exec "$(dirname "$0")/../../../dlx" run Kaldi/SpeechRecognition evaluate -- "$@"
