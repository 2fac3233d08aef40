#!/usr/bin/env bash
# export: options are those of `dlx run Kaldi/SpeechRecognition export -- --help`.
set -euo pipefail
exec "$(dirname "$0")/../../../dlx" run Kaldi/SpeechRecognition export -- "$@"
