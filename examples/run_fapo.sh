#!/usr/bin/env bash
# FAPO with the paper's values: the policy on TRAIN_GPUS devices of each of NNODES nodes, the judge on GENRM_GPUS others,
# a replica each. MODEL_PATH swaps the policy, GENRM_PATH the judge; SIZE=32b takes 8 GPUs for the policy at least.
# Composed and checked on a CPU, not yet run on GPUs.
set -euo pipefail

SIZE=${SIZE:-7b}
exec python -m verl.trainer.main_ppo +recipe=fapo +recipe/size="$SIZE" +recipe/device=gpu \
    actor_rollout_ref.model.path="${MODEL_PATH:?a policy checkpoint, e.g. /models/Qwen2.5-Math-7B}" \
    fapo.judge.model="${GENRM_PATH:?a GenRM checkpoint, e.g. /models/FAPO-GenRM-4B}" \
    fapo.genrm.replicas="${GENRM_GPUS:-4}" \
    data.train_files="${TRAIN_FILE:?a parquet file of problems}" \
    data.val_files="${TEST_FILE:?a parquet file of problems}" \
    trainer.nnodes="${NNODES:-1}" \
    trainer.n_gpus_per_node="${TRAIN_GPUS:-4}" \
    trainer.default_local_dir="${OUT:-$PWD/checkpoints/fapo-$SIZE}" \
    trainer.logger='[console]' \
    "$@"
