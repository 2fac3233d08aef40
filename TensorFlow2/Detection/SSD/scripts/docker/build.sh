#!/usr/bin/env bash
# Build the image dlx/tf_ssd:latest. Options are those of `dlx build`: --engine podman, --tag NAME, --build-arg A=B.
set -euo pipefail
exec "$(dirname "$0")/../../../../../dlx" build TensorFlow2/Detection/SSD "$@"
