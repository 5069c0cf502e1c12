#!/usr/bin/env bash
# The baseline of run_fapo.sh, on TRAIN_GPUS devices of each of NNODES nodes: the same training without a judge.
# MODEL_PATH swaps the policy; SIZE=32b takes 8 GPUs at least. Composed and checked on a CPU, not yet run on GPUs.
set -euo pipefail

SIZE=${SIZE:-7b}
exec python -m verl.trainer.main_ppo +recipe=baseline +recipe/size="$SIZE" +recipe/device=gpu \
    actor_rollout_ref.model.path="${MODEL_PATH:?a policy checkpoint, e.g. /models/Qwen2.5-Math-7B}" \
    data.train_files="${TRAIN_FILE:?a parquet file of problems}" \
    data.val_files="${TEST_FILE:?a parquet file of problems}" \
    trainer.nnodes="${NNODES:-1}" \
    trainer.n_gpus_per_node="${TRAIN_GPUS:-8}" \
    trainer.default_local_dir="${OUT:-$PWD/checkpoints/baseline-$SIZE}" \
    trainer.logger='[console]' \
    "$@"
