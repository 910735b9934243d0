#!/usr/bin/env bash
# The runs of a served model that take long: on one NVIDIA H200 half an hour in all, alone on the machine. Rows, samples
# and what the commands print go to DIR:
#   bash lab/long_runs.sh DIR
# MINUTES (10) are those of each of the two loads. PRESET=qwen3-0.6b LAYERS=1 CLIENTS=4 KV_MEMORY=128MiB MINUTES=0.5
# tries it without a GPU.
# A run that fails, or hangs past its limit, does not keep the next one from starting.
set -u
out="$(realpath "$1")" minutes="${MINUTES:-10}" clients="${CLIENTS:-128}"
model=(--preset "${PRESET:-qwen3-coder-30b-a3b-fp8}" ${LAYERS:+--layers "$LAYERS"})
# Both servers have the same programs: what the first one compiles, the second one loads.
server=(-- --max-num-seqs "$clients" --max-model-len 2048 --kv-cache-memory "${KV_MEMORY:-24GiB}")
cd "$(dirname "$0")/.."
mkdir -p "$out"

# limited SECONDS NAME COMMAND... prints to DIR/NAME.log.
limited() {
    local seconds="$1" name="$2"
    shift 2
    echo "$(date +%T) $name"
    timeout --signal=INT --kill-after=30 "$seconds" "$@" >"$out/$name.log" 2>&1 || echo "$name: exit code $?"
}

whole=$(awk "BEGIN { print int(60 * $minutes) + 400 }") # seconds, with weights and a first start
limited "$whole" serve-load python -m bench serve-load "${model[@]}" --synthetic-acceptance-length 3.1 \
    --concurrency "$clients" --minutes "$minutes" --prompt-tokens 512 --max-tokens 256 --temperature 1 \
    --out "$out/serve_load.jsonl" "${server[@]}"
limited "$whole" soak python -m lab soak "${model[@]}" --synthetic-acceptance-length 3.1 --minutes "$minutes" \
    --rate 20 --out "$out/soak.jsonl" "${server[@]}"
limited 200 rollouts python -m lab rollouts "${model[@]}" --concurrency 32 --out "$out/rollouts.jsonl"
echo "$(date +%T) end"
