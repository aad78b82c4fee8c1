#!/usr/bin/env bash
# One machine: a rank for each of RANKS devices or cores, and three restarts of all if one rank dies.
#
#   RANKS=8 examples/launch/one_node.sh --folder runs/job --steps 60
set -euo pipefail
exec torchrun --standalone --nproc-per-node "${RANKS:-2}" --max-restarts 3 "$(dirname "$0")/job.py" "$@"
