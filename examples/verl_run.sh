#!/usr/bin/env bash
# verl with credit by block, on the GPUs of one machine: bash verl_run.sh
# Needs verl, spanwise[verl] and math-verify[antlr4_9_3] in one environment. Arguments that you add win: bash verl_run.sh trainer.total_epochs=1
set -euo pipefail
here=$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)

"${PYTHON:-python}" -m verl.trainer.main_ppo \
  algorithm.adv_estimator=spanwise \
  +algorithm.spanwise.recipe="${RECIPE:-$here/recipe.yaml}" \
  +algorithm.spanwise.folder=runs/verl \
  +algorithm.spanwise.keep_rollouts=10 \
  data.train_files="${TRAIN:-data/train.parquet}" \
  data.val_files="${EVAL:-data/eval.parquet}" \
  data.train_batch_size=128 \
  data.max_prompt_length=1024 \
  data.max_response_length=4096 \
  actor_rollout_ref.model.path="${MODEL:-Qwen/Qwen2.5-3B-Instruct}" \
  actor_rollout_ref.actor.optim.lr=1e-6 \
  actor_rollout_ref.actor.ppo_mini_batch_size=128 \
  actor_rollout_ref.actor.ppo_micro_batch_size_per_gpu=4 \
  actor_rollout_ref.actor.loss_agg_mode=seq-mean-token-mean \
  actor_rollout_ref.rollout.name=vllm \
  actor_rollout_ref.rollout.n=8 \
  actor_rollout_ref.rollout.tensor_model_parallel_size=1 \
  actor_rollout_ref.rollout.log_prob_micro_batch_size_per_gpu=8 \
  trainer.n_gpus_per_node="${GPUS:-8}" \
  trainer.project_name=spanwise \
  trainer.experiment_name=confidence \
  trainer.total_epochs=3 \
  trainer.save_freq=50 \
  trainer.test_freq=50 \
  trainer.logger='["console"]' \
  "$@"
