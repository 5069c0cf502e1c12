#!/usr/bin/env bash
# Train a judge, on TRAIN_GPUS devices of each of NNODES nodes; run_fapo.sh takes OUT/global_step_N/actor/huggingface.
# MODEL_PATH swaps the model that becomes it. Composed and checked on a CPU, not yet run on GPUs.
set -euo pipefail

SIZE=${SIZE:-genrm_4b}
exec python -m verl.trainer.main_ppo +recipe=fapo_genrm +recipe/size="$SIZE" +recipe/device=gpu \
    actor_rollout_ref.model.path="${MODEL_PATH:?a checkpoint, e.g. /models/Qwen3-4B-Instruct-2507}" \
    data.train_files="${TRAIN_FILE:?a parquet file of solutions to judge}" \
    data.val_files="${TEST_FILE:?a parquet file of solutions to judge}" \
    trainer.nnodes="${NNODES:-1}" \
    trainer.n_gpus_per_node="${TRAIN_GPUS:-8}" \
    trainer.default_local_dir="${OUT:-$PWD/checkpoints/genrm-$SIZE}" \
    trainer.logger='[console]' \
    "$@"
