#!/bin/sh
# Makes an environment in which other libraries answer what kvfold was asked: kvpress's presses and
# transformers' caches, with the versions that they want.
#
#     bench/peers/setup.sh PEERS
#
# Choose the interpreter with PYTHON=/path/to/python; 3.10 to 3.13. Takes 1.5 GB and some minutes.
# torch comes first and by itself: nothing else may choose its version or build.
set -eu

folder=${1:?give a folder for the environment}
here=$(dirname "$0")

"${PYTHON:-python3}" -m venv "$folder"
"$folder/bin/python" -m pip install -q torch==2.13.0
"$folder/bin/python" -m pip install -q -r "$here/requirements.txt"
"$folder/bin/python" -c 'import kvpress, transformers; print("kvpress with transformers", transformers.__version__)'
