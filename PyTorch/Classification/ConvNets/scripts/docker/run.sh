#!/usr/bin/env bash
# Run a command (default: a shell) in the image, with the cache of data and weights and the current folder mounted.
#   scripts/docker/run.sh python -m convnets.quickstart --output_dir /workspace/output
# ENGINE=podman chooses the engine, IMAGE=NAME another image, GPUS=all passes GPUs on (docker and podman >= 5).
set -euo pipefail
engine=${ENGINE:-$(command -v docker || command -v podman)} || { echo "run.sh: needs docker or podman" >&2; exit 2; }
cache=${DLX_HOME:-$HOME/.cache/dlx}
mkdir -p "$cache" output
options=(--rm --ipc=host --volume "$cache:/home/dlx/.cache/dlx" --volume "$PWD/output:/workspace/output")
# Files that the container writes belong to the caller. Rootless podman maps that by itself.
case $engine in *docker*) options+=(--user "$(id -u):$(id -g)") ;; *podman*) options+=(--userns=keep-id:uid=10001,gid=10001) ;; esac
if [ -n "${GPUS:-}" ]; then options+=(--gpus "$GPUS"); fi
if [ -t 0 ] && [ -t 1 ]; then options+=(--interactive --tty); fi
exec "$engine" run "${options[@]}" "${IMAGE:-dlx/convnets:latest}" "$@"
