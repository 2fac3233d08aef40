#!/usr/bin/env bash
# Run a command (default: a shell) in the image, with the cache of data and weights and ./runs mounted.
#   scripts/docker/run.sh python -m kaldi_asr.quickstart
# ENGINE=podman chooses the engine, IMAGE=NAME another image, GPUS=all passes GPUs on (docker and podman >= 5).
set -euo pipefail
engine=${ENGINE:-$(command -v docker || command -v podman || true)}
if [ -z "$engine" ]; then echo "run.sh: needs docker or podman" >&2; exit 2; fi
cache=${DLX_HOME:-$HOME/.cache/dlx}
mkdir -p "$cache" runs
options=(--rm --ipc=host --volume "$cache:/home/dlx/.cache/dlx" --volume "$PWD/runs:/workspace/runs")
# Files that the container writes belong to the caller; rootless podman has its own way to say so.
case $engine in
    *podman*) rootless=$("$engine" info --format '{{.Host.Security.Rootless}}') ;;
    *) rootless=false ;;
esac
if [ "$rootless" = true ]; then
    options+=(--userns=keep-id:uid=10001,gid=10001)
else
    options+=(--user "$(id -u):$(id -g)" --env HOME=/tmp)
fi
if [ -n "${GPUS:-}" ]; then options+=(--gpus "$GPUS"); fi
if [ -t 0 ] && [ -t 1 ]; then options+=(--interactive --tty); fi
exec "$engine" run "${options[@]}" "${IMAGE:-dlx/kaldi_asr:latest}" "$@"
