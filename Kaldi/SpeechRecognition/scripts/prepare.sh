#!/usr/bin/env bash
# prepare: options are those of `dlx run Kaldi/SpeechRecognition prepare -- --help`.
set -euo pipefail
exec "$(dirname "$0")/../../../dlx" run Kaldi/SpeechRecognition prepare -- "$@"
