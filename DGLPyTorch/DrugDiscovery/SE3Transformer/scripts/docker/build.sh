#!/usr/bin/env bash
# Build the image dlx/se3_transformer:latest. Options are those of `dlx build`: --engine podman, --tag NAME, --build-arg A=B.
set -euo pipefail
exec "$(dirname "$0")/../../../../../dlx" build DGLPyTorch/DrugDiscovery/SE3Transformer "$@"
