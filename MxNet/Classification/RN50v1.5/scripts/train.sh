#!/usr/bin/env bash
# Train with WORKERS processes on this machine (default 1). Options: `dlx run rn50_mxnet train -- --help`.
set -euo pipefail
root=$(cd "$(dirname "$0")/../../../.." && pwd)
if [ "${WORKERS:-1}" = 1 ]; then exec "$root/dlx" run rn50_mxnet train -- "$@"; fi
python=$("$root/dlx" env path rn50_mxnet)/bin/python
export DLX_ROOT=$root PYTHONPATH=$root/Tools:$root/MxNet/Classification/RN50v1.5
exec "$python" -m rn50_mxnet.runner -n "$WORKERS" -- "$@"
