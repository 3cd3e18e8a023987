#!/bin/sh
# What a diffusion model of additions keeps of its answers as its caches recompute less: shares,
# ranks, curves over depth, refresh intervals, all caches, and decoding in parallel.
#
#     bench/diffusion_sweeps.sh OUT [MODEL]
#
# Leaves OUT/STEPS/bench-diffusion.json and a chart for 16 and 5 steps, and OUT/parallel.
set -eu

out=${1:?give a folder for the results}
model=${2:-arithmetic}
caches=none,dllm,dkv,prefix,dual
for ratio in 0.05 0.1 0.16 0.2 0.25 0.5; do
    caches="$caches,spa:ratio=$ratio"
done
for ratio in 0.16 0.25; do
    caches="$caches,spa:curve=llada-8b:ratio=$ratio,spa:preset=paper:ratio=$ratio"
done
for rank in 1 4 16 32; do
    caches="$caches,spa:ratio=0.25:rank=$rank"
done
for interval in 2 4 16; do
    caches="$caches,spa:ratio=0.25:refresh_generated=$interval"
done

race() {
    name=$1
    shift
    kvfold diffuse bench --model "$model" --rows 500 --rounds 1 --threads 1 --out "$out/$name" "$@"
}

race 16 --steps 16 --caches "$caches"
race 5 --steps 5 --caches "$caches"
race parallel --threshold 0.9 --caches none,spa:ratio=0.25,spa:ratio=0.16,dllm,dkv,prefix,dual
