"""The private names of SkyRL that `SpanRayPPOTrainer` stands on."""

from contracts import Needed, check

TRAINER = "skyrl.train.trainer:RayPPOTrainer"
LOSSES = "skyrl.backends.skyrl_train.utils.ppo_utils"
NAMES = [
    Needed(f"{TRAINER}.__init__", ("cfg",)),
    Needed(f"{TRAINER}.train"),
    Needed(f"{TRAINER}.postprocess_generator_output", ("generator_output", "uids")),
    Needed(f"{TRAINER}.handle_dynamic_sampling", ("generator_output", "uids")),
    Needed(f"{TRAINER}._execute_forward_pass", ("mini_batch_boundaries",)),
    Needed(f"{TRAINER}._execute_training_step", ("model", "data")),
    Needed(f"{TRAINER}.train_critic_and_policy", ("data",)),
    Needed(f"{TRAINER}.compute_advantages_and_returns", ("data",)),
    # This flag asks for the filter on the environment's reward, before rows become tensors.
    Needed(
        f"{TRAINER}.postprocess_generator_output", says=("self.cfg.trainer.algorithm.zero_variance_filter", "loss_masks")
    ),
    Needed("skyrl.train.fully_async_trainer:FullyAsyncRayPPOTrainer._should_keep_group", ("group",)),
    # What is registered.
    Needed(f"{LOSSES}:AdvantageEstimatorRegistry._functions"),
    Needed(f"{LOSSES}:PolicyLossRegistry._functions"),
    Needed(f"{LOSSES}:AdvantageEstimator"),
    # What is undone: how the loss averages.
    Needed(
        f"{LOSSES}:apply_loss_reduction_to_advantages_minibatch",
        ("advantages", "loss_mask", "loss_reduction", "micro_batch_size", "max_seq_len"),
        (
            *('"token_mean"', "loss_mask.sum().clamp(min=1)", '"token_mean_legacy"', "batch_size // micro_batch_size"),
            *('"sequence_mean"', '"seq_mean_token_sum_norm"', "batch_size * max_seq_len", '"prompt_mean"'),
        ),
    ),
    # A group counts if its rewards differ.
    Needed(
        "skyrl.train.utils.trainer_utils:handle_filter_sampling", says=('generator_output["rewards"]', "np.std(", "std > 0")
    ),
    Needed("skyrl.train.generators.utils:slice_generator_output", ("generator_output", "indices"), since="0.4"),
    Needed("skyrl.train.config:make_config", ("algorithm_cls",)),
    Needed("skyrl.train.entrypoints.main_base:BasePPOExp.get_trainer"),
    Needed("skyrl.train.utils:validate_cfg"),
    Needed("skyrl.train.utils.utils:initialize_ray", ("cfg",)),
]


test_the_name_is_as_the_trainer_needs_it = check(NAMES)
