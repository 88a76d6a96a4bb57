"""The private names of verl that the adapter wraps, calls or reads."""

from contracts import Needed, check

V1, V0 = "verl.trainer.ppo.v1:PPOTrainer", "verl.trainer.ppo.ray_trainer:RayPPOTrainer"
REWARDS = "verl.experimental.reward_loop.reward_manager.base:RewardManagerBase"
LOOP = "verl.experimental.agent_loop.agent_loop:AgentLoopWorker"
AVERAGES = '"token-mean"', '"seq-mean-token-sum"', '"seq-mean-token-mean"'
NAMES = [
    # What is wrapped: the trainers of V1 and V0, and the agent loop.
    *(Needed(f"{trainer}.__init__", ("config",)) for trainer in (V1, V0)),
    *(Needed(f"{trainer}.{name}") for trainer in (V1, V0) for name in ("fit", "_save_checkpoint", "_load_checkpoint")),
    Needed(f"{V1}._compute_advantage", ("batch", "metrics")),
    Needed(f"{V1}._compute_metrics", ("batch", "metrics")),
    Needed("verl.trainer.ppo.v1.trainer_base:MetricsAggregator._get_aggregation_type", ("metric_name",)),
    Needed(f"{V0}._update_actor"),
    Needed("verl.trainer.ppo.ray_trainer:compute_advantage", ("data", "adv_estimator")),
    Needed("verl.trainer.ppo.ray_trainer:compute_data_metrics"),
    Needed("verl.trainer.ppo.ray_trainer:reduce_metrics"),
    Needed(f"{LOOP}._compute_score", ("outputs",)),
    Needed(f"{LOOP}._compute_teacher_logprobs", ("output", "validate")),
    # What is registered.
    Needed("verl.trainer.ppo.core_algos:register_adv_est", ("name_or_enum",)),
    Needed("verl.trainer.ppo.core_algos:register_policy_loss", ("name",)),
    Needed("verl.trainer.ppo.v1.trainer_base:TRAINER_REGISTRY"),
    # What is called.
    Needed("verl.trainer.ppo.reward:load_reward_manager", ("config", "tokenizer")),
    Needed(f"{REWARDS}.__init__", ("config", "tokenizer", "compute_score")),
    Needed(f"{REWARDS}.run_single", ("data",)),
    Needed("verl.utils.config:omega_conf_to_dataclass", ("config",)),
    Needed("verl.utils.reward_score:default_compute_score", ("data_source", "solution_str", "ground_truth", "extra_info")),
    Needed("verl.trainer.ppo.v1.trainer_base:MetricsAggregator.add_step_metrics", ("metrics", "sample_count")),
    Needed("verl.trainer.ppo.v1.trainer_base:MetricsAggregator.get_aggregated_metrics"),
    Needed("transfer_queue:KVBatchMeta.select_keys", ("keys_to_select",)),
    Needed("transfer_queue:KVBatchMeta.concat", ("data",)),
    # What is read: the length of each output of a rollout, whose prompts verl pads with the responses.
    Needed(f"{LOOP}._compute_score", says=('"response_len"',)),
    # What is undone: how the loss averages.
    Needed("verl.trainer.ppo.core_algos:agg_loss", ("loss_mat", "loss_mask", "loss_agg_mode"), AVERAGES),
    # A group is dropped if a number of the reward manager is the same for all.
    Needed(
        "verl.trainer.ppo.v1.replay_buffer:ReplayBuffer._dapo_filtered_keys",
        says=('"reward_extra_info"', "reward_extra_info[self.filter_groups_metric]", "np.std(values)) == 0.0"),
    ),
]


test_the_name_is_as_the_adapter_needs_it = check(NAMES)
