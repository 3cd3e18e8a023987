#!/bin/sh
# Needles by depth and length, asked for after a cache was cut: sekv at several budgets, beside every
# policy that evicts, and with something left out.
#
#     KVFOLD_DATA=FOLDER bench/needles.sh OUT
#
# Leaves a report in OUT/budgets, OUT/ends, OUT/methods, OUT/ablations and OUT/several. Called again it goes on
# where it stopped; all of it takes some hours on two cores.
set -eu

out=${1:?give a folder for the reports}
evicting=streaming,snapkv,h2o,tova,knorm,distill
ablations="sekv,no-anchors=sekv:deviations=1000,fixed-spans=sekv:deviations=1000+shortest=16+longest=16"
ablations="$ablations,surprisal-means=sekv:weighting=surprisal,no-zoom=sekv:zoom=false"
ablations="$ablations,trained-summaries=sekv:routing=summary,mean-keys=sekv:routing=summary+gates=none"

# look NAME SETS LENGTHS BUDGETS METHODS: a report in OUT/NAME.
look() {
    kvfold eval --protocol agnostic --depths 5 --samples 15 --out "$out/$1" --resume \
        --sets "$2" --length "$3" --budgets "$4" --methods "$5"
}

look budgets niah 1024,2048,4096,8192 0.1,0.15 sekv
look ends niah 1024,2048,4096,8192 0.05,0.2 sekv
look methods niah 1024,2048,4096,8192 0.15 "sekv,$evicting"
look ablations niah 2048 0.15 "$ablations"
look several niah-multikey,niah-multivalue 2048 0.15 sekv,distill,streaming
