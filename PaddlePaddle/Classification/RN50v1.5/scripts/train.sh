#!/usr/bin/env bash
# Train with NPROC processes on this machine (default 1): NCCL on GPUs, gloo on CPUs. Options are those of the verb train.
# More than one process needs `python` to be the task's own: ./dlx env path rn50_paddle says where it is.
set -euo pipefail
task=$(cd "$(dirname "$0")/.." && pwd)
root=$(cd "$task/../../.." && pwd)
if [ "${NPROC:-1}" = 1 ]; then exec "$root/dlx" run PaddlePaddle/Classification/RN50v1.5 train -- "$@"; fi
python=${PYTHON:-$("$root/dlx" env path PaddlePaddle/Classification/RN50v1.5)/bin/python}
export PYTHONPATH="$root/Tools:$task${PYTHONPATH:+:$PYTHONPATH}" OMP_WAIT_POLICY=${OMP_WAIT_POLICY:-PASSIVE}
options=(--nproc_per_node "$NPROC" --log_dir "${LOG_DIR:-runs/paddle-launch-logs}")
exec "$python" -m paddle.distributed.launch "${options[@]}" "$task/rn50_paddle/launched.py" "$@"
