#!/usr/bin/env bash
# Build the image dlx/rn50_mxnet:latest. Options are those of `dlx build`: --engine podman, --tag NAME, --build-arg A=B.
set -euo pipefail
exec "$(dirname "$0")/../../../../../dlx" build MxNet/Classification/RN50v1.5 "$@"
