#!/usr/bin/env bash
# Fail unless the tests on four TensorFlows together reach every line and branch of the engine. Needs tox and coverage.
set -euo pipefail
cd "$(dirname "$0")/.."
rm -rf .tox/coverage
mkdir -p .tox/coverage
tox run -m cov
export COVERAGE_FILE=.tox/coverage/together
coverage combine --keep .tox/coverage/py*
coverage report
