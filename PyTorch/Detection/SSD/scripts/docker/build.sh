#!/usr/bin/env bash
# Build the image dlx/ssd:latest. Options are those of `dlx build`: --engine podman, --tag NAME, --build-arg A=B.
set -euo pipefail
exec "$(dirname "$0")/../../../../../dlx" build PyTorch/Detection/SSD "$@"
