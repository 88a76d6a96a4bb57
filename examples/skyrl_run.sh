#!/usr/bin/env bash
# SkyRL with credit by block, on the GPUs of one machine: bash skyrl_run.sh
# Needs SkyRL, spanwise[skyrl] and math-verify[antlr4_9_3] in one environment. Arguments that you add win: bash skyrl_run.sh trainer.epochs=1
set -euo pipefail
here=$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)

"${PYTHON:-python}" -m skyrl.train.entrypoints.main_base \
  trainer.override_entrypoint=spanwise.engines.skyrl.main \
  trainer.algorithm.spanwise.recipe="${RECIPE:-$here/recipe.yaml}" \
  trainer.algorithm.spanwise.folder=runs/skyrl \
  trainer.algorithm.spanwise.keep_rollouts=10 \
  data.train_data="['${TRAIN:-data/train.parquet}']" \
  data.val_data="['${EVAL:-data/eval.parquet}']" \
  trainer.policy.model.path="${MODEL:-Qwen/Qwen2.5-3B-Instruct}" \
  trainer.policy.optimizer_config.lr=1e-6 \
  trainer.train_batch_size=128 \
  trainer.policy_mini_batch_size=128 \
  trainer.micro_train_batch_size_per_gpu=4 \
  trainer.placement.policy_num_gpus_per_node="${GPUS:-8}" \
  trainer.algorithm.use_kl_loss=false \
  trainer.max_prompt_length=1024 \
  generator.sampling_params.max_generate_length=4096 \
  generator.n_samples_per_prompt=8 \
  generator.inference_engine.num_engines="${GPUS:-8}" \
  trainer.logger=console \
  trainer.epochs=3 \
  "$@"
