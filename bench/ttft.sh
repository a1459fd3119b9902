#!/usr/bin/env bash
# Time to first token by ticket beside the stage-by-stage route, in every load that docs/LOG.md reports.
#
#     bench/ttft.sh DIRECTORY [LOAD...]
#
# One JSON document and one HTML report for each load go to DIRECTORY. A load that was cut off goes on from its last round when this is
# run again, and one that is done is not measured again. LIMIT=280 stops each load after 280 s (it goes on the next time). Nothing else
# should run meanwhile. PYTHON, MODEL, REQUESTS and REPEAT may be set in the environment.
#
# Every round has 32 requests unless REPEAT says otherwise: a round begins with an empty pipeline and ends with one, so that in a round
# of 8 requests with 4 in flight more than half of them do not meet the load that is named. Four stages have rounds of 64, as they take
# longer to fill. One at a time there is nothing to fill.
set -u
cd "$(dirname "$0")/.."
PYTHON=${PYTHON:-.venv/bin/python} MODEL=${MODEL:-demo} REQUESTS=${REQUESTS:-64} REPEAT=${REPEAT:-$((${REQUESTS:-64} / 32))} LIMIT=${LIMIT:-0}

declare -A LOADS=(
    [misses]="--groups miss --pp 2 --concurrency 2"
    [mixed-pp4]="--groups mixed --pp 4 --concurrency 4 --requests 128 --repeat 2"
    [chunk-256]="--groups mixed --pp 2 --concurrency 8 --chunk-size 256"
    [mixed-pp2]="--groups mixed --pp 2 --concurrency 2"
    [one-at-a-time]="--groups miss,mixed,hit --pp 2 --concurrency 1 --repeat 8"
    [published-pairing]="--groups mixed --pp 4 --concurrency 4 --requests 128 --repeat 2 --routes ticket:staging,staged:cache"
    [open-70]="--groups mixed --pp 2 --utilisation 0.7"
)
ORDER="misses mixed-pp4 chunk-256 mixed-pp2 one-at-a-time published-pairing open-70"

[ $# -ge 1 ] || { echo "usage: bench/ttft.sh DIRECTORY [LOAD...]; loads: $ORDER" >&2; exit 2; }
out=$1; shift
for load in ${*:-$ORDER}; do
    [ -n "${LOADS[$load]:-}" ] || { echo "ttft.sh: there is no load $load; allowed: $ORDER" >&2; exit 2; }
done
mkdir -p "$out" || exit 2
status=0
for load in ${*:-$ORDER}; do
    echo "== $load: forebay bench ttft $MODEL --requests $REQUESTS --repeat $REPEAT ${LOADS[$load]}"
    # shellcheck disable=SC2086  # the options are words
    timeout --signal=INT --kill-after=60 "$LIMIT" "$PYTHON" -m forebay.cli bench ttft "$MODEL" \
        --requests "$REQUESTS" --repeat "$REPEAT" ${LOADS[$load]} --resume --output "$out/$load.json" --html "$out/$load.html" || status=$?
done
exit $status
