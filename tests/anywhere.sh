#!/usr/bin/env bash
# Runs the suite where tests that wait for seconds, or rely on their terminal, fail: first beside four
# busy loops, then from a shell that ignores SIGINT, as background jobs of scripts do.
#
#   tests/anywhere.sh [TIMES] [arguments of pytest]      default: 3 times, the default suite
#   tests/anywhere.sh 1 -n 2                             once, with two workers
set -euo pipefail
cd "$(dirname "$0")/.."
times="${1:-3}"
shift || true
run() { .venv/bin/python -m pytest -q -n auto --dist loadfile "$@"; }

loops=()
stop_loops() { if [ "${#loops[@]}" -gt 0 ]; then kill "${loops[@]}" 2>/dev/null || true; loops=(); fi; }
trap stop_loops EXIT

for turn in $(seq "$times"); do
    echo "=== $turn of $times: beside four busy loops"
    for _ in 1 2 3 4; do
        while :; do :; done &
        loops+=("$!")
    done
    run "$@"
    stop_loops
    echo "=== $turn of $times: SIGINT ignored"
    (trap '' INT && run "$@")
done
