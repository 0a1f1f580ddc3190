#!/usr/bin/env bash
#SBATCH --job-name=parallel-llama
#SBATCH --nodes=2
#SBATCH --ntasks-per-node=1
#SBATCH --cpus-per-task=16
# Runs a command on a Slurm cluster; every task of the job is one rank. The nodes share this folder
# and the home folder, where the secret of the run is until the job ends. On nodes with GPUs, ask for
# one GPU per task (#SBATCH --gpus-per-task=1).
#
#   sbatch launch/slurm.sh generate --model PATH --prompt "Once upon a time" --json
set -euo pipefail

read -r MASTER_ADDR < <(scontrol show hostnames "$SLURM_JOB_NODELIST") # the first node
MASTER_PORT=$((20000 + SLURM_JOB_ID % 10000))
OMP_NUM_THREADS=${SLURM_CPUS_PER_TASK:-1}
SRUN_CPUS_PER_TASK=$OMP_NUM_THREADS # srun does not take over --cpus-per-task of sbatch
export MASTER_ADDR MASTER_PORT OMP_NUM_THREADS SRUN_CPUS_PER_TASK

secret=$(mktemp "$HOME/.parallel-llama-secret-XXXXXX") # only this user can read it
trap 'rm -f -- "$secret"' EXIT
od -A n -N 32 -t x1 /dev/urandom | tr -d ' \n' >"$secret"
# Not --secret-file: a single task does not count as a rank, and the command refuses the flag there.
export PARALLEL_LLAMA_SECRET_FILE=$secret

srun --kill-on-bad-exit=1 parallel-llama "$@"
