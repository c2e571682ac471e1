#!/usr/bin/env bash
# Training starts only where both frameworks compute the same function, on the very bytes that were compared.
#
#   examples/launch/launch.sh CANDIDATE COMMAND [ARGUMENT ...]
#
# The gate's options (reference, batch, profile, ...) stand in the nearest parity.toml. A report that still holds (same
# weights, config, code and parity.toml, not too old) is used again, so that a restart after a crash costs one reading of
# the weights and no second run of the gate.
set -euo pipefail

if [ "$#" -lt 2 ]; then
    echo "usage: $0 CANDIDATE COMMAND [ARGUMENT ...]" >&2
    exit 2
fi
candidate=$1
shift
report=${PARITY_REPORT:-parity-report.json}
max_age=${PARITY_MAX_AGE:-24h}

holds() { olmo-parity check-report "$report" "$candidate" --max-age "$max_age"; }

if [ ! -e "$report" ] || ! holds; then
    olmo-parity --candidate "$candidate" --json "$report" # any exit code but 0 ends this script with it
    holds                                                 # the weights once more, as they are now
fi
exec "$@"
