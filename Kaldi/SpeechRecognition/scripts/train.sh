#!/usr/bin/env bash
# train: options are those of `dlx run Kaldi/SpeechRecognition train -- --help`.
set -euo pipefail
exec "$(dirname "$0")/../../../dlx" run Kaldi/SpeechRecognition train -- "$@"
