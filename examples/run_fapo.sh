#!/usr/bin/env bash
# FAPO on one node with 8 GPUs: the policy on TRAIN_GPUS of them, the judge on GENRM_GPUS others, a replica each.
# GENRM_PATH alone swaps the judge. Composed and checked on a CPU, not yet run on GPUs.
set -euo pipefail

MODEL_PATH=${MODEL_PATH:?a policy checkpoint with a context of 10240 tokens, e.g. /models/Qwen2.5-7B}
GENRM_PATH=${GENRM_PATH:?a GenRM checkpoint, e.g. /models/FAPO-GenRM-4B}
TRAIN_FILE=${TRAIN_FILE:?a parquet file of problems}
TEST_FILE=${TEST_FILE:?a parquet file of problems}

exec python -m verl.trainer.main_ppo +recipe=fapo \
    fapo.judge.model="$GENRM_PATH" \
    fapo.genrm.replicas="${GENRM_GPUS:-4}" \
    actor_rollout_ref.model.path="$MODEL_PATH" \
    actor_rollout_ref.rollout.name=vllm \
    actor_rollout_ref.rollout.n=8 \
    actor_rollout_ref.actor.use_dynamic_bsz=true \
    actor_rollout_ref.actor.ppo_mini_batch_size=32 \
    actor_rollout_ref.actor.optim.lr=1e-6 \
    data.train_files="$TRAIN_FILE" \
    data.val_files="$TEST_FILE" \
    data.train_batch_size=512 \
    data.max_prompt_length=2048 \
    data.max_response_length=8192 \
    trainer.n_gpus_per_node="${TRAIN_GPUS:-4}" \
    trainer.default_local_dir="${OUT:-$PWD/checkpoints}" \
    trainer.logger='[console]' \
    trainer.project_name=fapo \
    trainer.experiment_name=fapo \
    trainer.save_freq=20 \
    trainer.test_freq=10 \
    "$@"
