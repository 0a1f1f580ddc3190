#!/usr/bin/env bash
# Builds the documentation into build/docs, in a virtual environment of its own, .venv-docs. Every
# warning is an error, such as a link to a page or heading that is not there.
#
#   bash launch/docs.sh
set -euo pipefail
cd -- "$(dirname -- "${BASH_SOURCE[0]}")/.."
source launch/environment.sh

prepare_environment .venv-docs '.[docs]'

.venv-docs/bin/python -m sphinx --fresh-env --fail-on-warning --keep-going --quiet docs build/docs
echo "build/docs/index.html"
