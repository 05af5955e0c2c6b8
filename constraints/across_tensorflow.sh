#!/usr/bin/env bash
# Run the tests of the project in the working directory on one TensorFlow, with accum's constraints, by uv:
#     ENVIRONMENT=py39-tf2.10-cpu COMMAND="python -m pytest" bash path/to/accum/constraints/across_tensorflow.sh
set -euo pipefail
accum=$(cd "$(dirname "$0")/.." && pwd)
version=${ENVIRONMENT#*-tf}
version=${version%%-*}
minor=${ENVIRONMENT%%-*}
minor=${minor#py3}
case $ENVIRONMENT in
    *-cpu) packages=tensorflow-cpu ;;
    *-keras2) packages="tensorflow tf-keras" ;;
    *) packages=tensorflow ;;
esac
environment=.across/$ENVIRONMENT
constraints=$accum/constraints/tf$version.txt

uv venv --quiet --clear --python "3.$minor" "$environment"
python=$environment/bin/python
uv pip install --quiet --python "$python" -c "$constraints" $packages
# Your project with its dependencies and what its tests need, within the versions that this TensorFlow was tested with.
# TensorFlow is there, perhaps under another name than your project requires: a marker that never holds.
for package in tensorflow tensorflow-cpu tensorflow-gpu tensorflow-macos; do
    echo "$package ; python_version < '3'"
done > .across/overrides.txt
uv pip install --quiet --python "$python" -c "$constraints" --overrides .across/overrides.txt . ${REQUIREMENTS:-pytest}
PATH="$PWD/$environment/bin:$PATH" bash -c "${COMMAND:-python -m pytest}"
