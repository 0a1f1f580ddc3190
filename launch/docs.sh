#!/usr/bin/env bash
# Builds the documentation into build/docs, in a virtual environment of its own, .venv-docs. Every
# warning is an error, for example about a link to a missing page or heading.
#
#   bash launch/docs.sh
set -euo pipefail
cd -- "$(dirname -- "${BASH_SOURCE[0]}")/.."
source launch/environment.sh

prepare_environment .venv-docs '.[docs]'

.venv-docs/bin/python -m sphinx --fresh-env --fail-on-warning --keep-going --quiet docs build/docs
echo "build/docs/index.html"
