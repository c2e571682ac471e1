#!/usr/bin/env bash
# The main job on the bundled checkpoint: convert, prove; then plant one fault and see the gate fail.
set -euo pipefail
cd "$(dirname "$0")/.."
bin=${BIN:-.venv/bin}
checkpoint=tests/data/tiny-trained/hf-bfloat16-step900
out=demo/out
rm -rf "$out" && mkdir -p "$out"

echo "== convert $checkpoint to an Orbax tree"
"$bin/olmo-convert" hf2orbax "$checkpoint" "$out/orbax/0"

echo "== prove that both frameworks compute the same function"
"$bin/olmo-parity" --batch demo/prompts.jsonl --reference "$checkpoint" --candidate "$out/orbax/0" --json "$out/good.json"

echo "== plant a fault: gate and up exchanged in layer 2"
"$bin/python" demo/swap_gate_up.py "$checkpoint" "$out/damaged" 2
"$bin/olmo-convert" hf2orbax "$out/damaged" "$out/damaged-orbax/0"
status=0
"$bin/olmo-parity" --reference "$checkpoint" --candidate "$out/damaged-orbax/0" --json "$out/damaged.json" || status=$?
if [ "$status" -ne 1 ]; then
    echo "the gate ended with exit code $status on a damaged checkpoint, 1 was wanted" >&2
    exit 1
fi

"$bin/python" - "$out" <<'PY'
import json, sys
for name in ("good", "damaged"):
    record = json.load(open(f"{sys.argv[1]}/{name}.json"))
    values = {(c["leg"], c["name"]): c for c in record["criteria"]}
    delta, kl = values["float32", "max |delta logit| / spread"], values["bfloat16", "mean KL"]
    print(
        f"{name:8} {record['verdict'].upper()}  exit {record['exit_code']}  float32 max |delta logit| / spread "
        f"{delta['value']:.1e} (limit {delta['limit']:.0e})  bfloat16 mean KL {kl['value']:.1e} nats per token (limit {kl['limit']:.1e})"
    )
PY
