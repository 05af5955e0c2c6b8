#!/usr/bin/env bash
# Hand a run that is stopped in mid-cycle from one TensorFlow to another, from a static graph to Keras and back. Needs tox.
set -euo pipefail
cd "$(dirname "$0")/.."
folder=$PWD/.tox/convert
on() {
    tox run -e "$1-script" -- "tests/support/$2.py" "$3" "$folder" "${@:4}"
}
on py37-tf1.15 convert_environments write graph
on py37-tf1.15 architectures write
on py37-tf2.2 convert_environments write graph
for newer in py311-tf2.15 py311-tf2.21; do
    on "$newer" convert_environments read
    on "$newer" architectures read
done
on py311-tf2.15 convert_environments write keras
on py37-tf1.15 convert_environments read
