#!/bin/sh
# The record in results/, made anew by this checkout.
#
#     bench/results.sh quick    results/quick, and the README's table: needs no data and no network
#     bench/results.sh all      that, and results/fidelity, results/needles and results/ruler, which
#                               use the folder that KVFOLD_DATA names, if there is one
#
# BIN is the folder of the environment's programs. What is computed stands in build/results/COMMIT,
# so that a run that was interrupted goes on, and never with numbers of another commit.
set -eu

cd "$(dirname "$0")/.."
work=build/results/$(git describe --always --dirty --abbrev=12)
data=${KVFOLD_DATA-}
unset KVFOLD_DATA

# run NAME ARGUMENTS: evaluate.
run() {
    name=$1
    names="${names-} $name"
    shift
    "$BIN/kvfold" eval --out "$work/$name" --resume "$@" >/dev/null
}

run quick --methods full,streaming,snapkv,distill,sekv --budgets 0.1,0.25 \
    --sets niah,prose,arithmetic --length 1024 --samples 8 --seed 0
if [ "$1" = all ]; then
    if [ -n "$data" ]; then export KVFOLD_DATA="$data"; fi
    run fidelity --methods full,streaming,h2o,snapkv,tova,knorm,distill,sekv
    run needles --methods full,streaming,snapkv,distill,sekv --budgets 0.15 --sets niah \
        --protocol agnostic --depths 5 --length 1024,2048,4096 --samples 10
    run ruler --methods full,streaming,snapkv,distill,sekv --budgets 0.25 --sets ruler \
        --length 2048 --samples 8
fi

# Kept when all is done: a record that is written changes what the next one says of its commit.
for name in $names; do
    "$BIN/python" -m bench.results "$work/$name" "results/$name"
done
"$BIN/python" -m bench.results README.md
