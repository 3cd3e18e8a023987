#!/bin/sh
# Needles by depth, asked for after a cache was cut: kvfold's methods beside kvpress's presses and
# transformers' caches, on the same tokens at the same cut.
#
#     KVFOLD_DATA=FOLDER bench/peers/needles.sh PEERS OUT [SAMPLES]
#
# PEERS is an environment that bench/peers/setup.sh makes. Leaves the report in OUT. Called again it
# goes on where it stopped, and with more samples it adds to those that are there; 15 samples take
# some hours on two cores.
set -eu

peers=${1:?give the environment that bench/peers/setup.sh has made}
out=${2:?give a folder for the report}
here=$(dirname "$0")

kvfold eval --protocol agnostic --sets niah --depths 5 --length 2048 --samples "${3:-15}" \
    --budgets 0.1,0.25 --methods sekv,distill,snapkv,streaming --out "$out" --resume
python "$here/exchange.py" ask "$out"
# A peer that fails is named, and the others stand in the report all the same.
"$peers/bin/python" "$here/run.py" "$out" || true
python "$here/exchange.py" merge "$out"
