#!/usr/bin/env bash
# Several machines: run the same line on each. HEAD is one of them, by a name that all can reach; PORT must be open there.
#
#   NODES=2 RANKS=8 HEAD=node0 examples/launch/several_nodes.sh --folder /shared/runs/job --steps 60
#
# --folder is a folder that all machines share. If the names of the machines do not resolve to their addresses, HEAD is
# an address, and LOCAL is this machine's own: where the two are equal, torchrun holds the rendezvous.
set -euo pipefail
: "${NODES:?how many machines}" "${HEAD:?the name or address of one of them}"
here=()
if [ -n "${LOCAL:-}" ]; then
  here=(--local-addr "$LOCAL" --rdzv-conf "is_host=$([ "$LOCAL" = "$HEAD" ] && echo 1 || echo 0)")
fi
exec torchrun --nnodes "$NODES" --nproc-per-node "${RANKS:-1}" --max-restarts 3 \
  --rdzv-backend c10d --rdzv-endpoint "$HEAD:${PORT:-29500}" --rdzv-id "${JOB:-job}" "${here[@]}" \
  "$(dirname "$0")/job.py" "$@"
