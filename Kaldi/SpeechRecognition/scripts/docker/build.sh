#!/usr/bin/env bash
# Build the image dlx/kaldi_asr:latest. Options are those of `dlx build`: --engine podman, --tag NAME, --build-arg A=B.
set -euo pipefail
exec "$(dirname "$0")/../../../../dlx" build Kaldi/SpeechRecognition "$@"
