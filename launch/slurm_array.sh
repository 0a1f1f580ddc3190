#!/usr/bin/env bash
#SBATCH --job-name=parallel-llama
#SBATCH --array=0-7
#SBATCH --nodes=1
#SBATCH --ntasks=1
#SBATCH --cpus-per-task=16
#SBATCH --requeue
# Completes a file of prompts in the parts of a job array, numbered from 0. Each part has ranks of
# its own on one node, and writes OUTPUT-I.jsonl. A task that is started again continues its part:
# sbatch --array=3,5 with the same arguments runs two of the parts again.
# On nodes with GPUs, ask for them (#SBATCH --gpus-per-node=8).
#
#   sbatch launch/slurm_array.sh answers 8 --model PATH --prompts prompts.jsonl --nproc 4
#   cat answers-*.jsonl > answers.jsonl
set -euo pipefail

output=${1:?"name the beginning of the output files, such as answers"}
n_parts=${2:-}
[[ $n_parts =~ ^[1-9][0-9]*$ ]] || {
    echo "launch/slurm_array.sh: '$n_parts' is not the number of parts; use answers 8 --model .." >&2
    exit 2
}
shift 2
: "${SLURM_ARRAY_TASK_ID:?"start this script with sbatch"}"
exec parallel-llama generate "$@" --part "$SLURM_ARRAY_TASK_ID/$n_parts" \
    --output "$output-$SLURM_ARRAY_TASK_ID.jsonl" --resume
