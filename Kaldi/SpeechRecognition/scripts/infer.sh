#!/usr/bin/env bash
# infer: options are those of `dlx run Kaldi/SpeechRecognition infer -- --help`.
set -euo pipefail
exec "$(dirname "$0")/../../../dlx" run Kaldi/SpeechRecognition infer -- "$@"
