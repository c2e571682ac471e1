#!/usr/bin/env bash
#SBATCH --job-name=olmo3-training
#SBATCH --nodes=16
#SBATCH --ntasks-per-node=1
#SBATCH --exclusive
#SBATCH --requeue
# Training starts on all nodes only where preflight passed, on the very bytes that it judged.
#
#   sbatch examples/launch/slurm.sh CANDIDATE COMMAND [ARGUMENT ...]
#
# preflight runs here, on the first node, driven by the parity.toml in the folder that sbatch was called in. A report that
# still holds is used again, so that a requeued job costs one reading of the weights. Whatever preflight ends with but 0 is
# what the job ends with: 1 something differs, 2 bad input, 3 inconclusive.
set -euo pipefail

if [ "$#" -lt 2 ]; then
    echo "usage: sbatch $0 CANDIDATE COMMAND [ARGUMENT ...]" >&2
    exit 2
fi
candidate=$1
shift
report=${PARITY_REPORT:-preflight-report.json}
max_age=${PARITY_MAX_AGE:-24h}

holds() { olmo-parity check-report "$report" "$candidate" --max-age "$max_age"; }

if [ ! -e "$report" ] || ! holds; then
    olmo-parity preflight --candidate "$candidate" --json "$report" # with --strict nothing may be left out
    holds                                                          # the weights once more, as they are now
fi
srun "$@"
