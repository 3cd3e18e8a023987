#!/bin/sh
# Trains DistillCache anew with something left out, all alike and far shorter than the shipped
# policy, and puts them into one report beside the shipped policy with other options.
#
#     KVFOLD_DATA=FOLDER bench/distill_ablations.sh OUT [OPTION OF kvfold eval ...]
#
# Called again it goes on where it stopped.
set -eu

out=${1:?give a folder for the policies and the report}
shift
mkdir -p "$out"
methods="shipped=distill,whole-0=distill:whole=0,token=distill:scope=token"
methods="$methods,paper=distill:scope=token+whole=0+sinks=0+recent=0,unprotected=distill:sinks=0+recent=0"
methods="$methods,every-1=distill:every=1"

# train NAME [OPTION ...]: a policy in OUT/NAME.
train() {
    name=$1
    shift
    if [ ! -f "$out/$name/distill.safetensors" ]; then
        resume=
        [ ! -f "$out/$name/checkpoint.safetensors" ] || resume=--resume
        kvfold train distill --out "$out/$name" --length 512 --importance-texts 8 \
            --ranker-texts 24 --validation 8 --steps 16 --every 8 "$@" $resume
    fi
    methods="$methods,$name=distill:policy=$out/$name"
}

train all
train no-mass --features norm,spread,entropy,position
train no-norm --features mass,spread,entropy,position
train no-spread --features mass,norm,entropy,position
train no-entropy --features mass,norm,spread,position
train no-position --features mass,norm,spread,entropy
train attention-only --features mass
train ranker-only --steps 1 --every 1
train no-bonus --entropy-bonus 0

resume=
[ ! -f "$out/report/results.jsonl" ] || resume=--resume
kvfold eval --methods "$methods" --out "$out/report" "$@" $resume
