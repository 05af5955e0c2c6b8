#!/usr/bin/env bash
# Run the tests of the project in the working directory on one TensorFlow, installed from a lock of accum, by uv:
#     LOCK=py39-tf2.10-cpu COMMAND="python -m pytest" bash path/to/accum/scripts/user/across_tensorflow.sh
set -euo pipefail
accum=$(cd "$(dirname "$0")/../.." && pwd)
name=${LOCK%-cpu}
name=${name%-keras2}
minor=${name%%-*}
minor=${minor#py3}
environment=.across/$LOCK

uv venv --quiet --clear --python "3.$minor" "$environment"
python=$environment/bin/python
"$python" "$accum/scripts/user/write_locks.py" .across/locks
uv pip install --quiet --python "$python" --no-deps --require-hashes -r ".across/locks/$LOCK.txt"
# Your project with its dependencies and what its tests need, within the versions that this TensorFlow was tested with.
# The lock has brought TensorFlow, perhaps under another name than your project requires: a marker that never holds.
for package in tensorflow tensorflow-cpu tensorflow-gpu tensorflow-macos; do
    echo "$package ; python_version < '3'"
done > .across/overrides.txt
uv pip install --quiet --python "$python" -c "$accum/constraints/tf${name#*-tf}.txt" \
    --overrides .across/overrides.txt . ${REQUIREMENTS:-pytest}
PATH="$PWD/$environment/bin:$PATH" bash -c "${COMMAND:-python -m pytest}"
