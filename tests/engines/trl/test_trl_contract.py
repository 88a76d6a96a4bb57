"""The private names of TRL and transformers that `SpanGRPOTrainer` stands on."""

from contracts import Needed, check

TRAINER = "trl.trainer.grpo_trainer:GRPOTrainer"
SCORING = f"{TRAINER}._generate_and_score_completions"
ATTRIBUTES = (
    "reward_func_names", "reward_weights", "max_completion_length", "num_generations", "_metrics", "_pending_extra_logs",
    "_pending_metrics",
)  # fmt: skip
BATCH, LISTS = "prompts=prompts, completions=completions", "prompts, completions, completion_ids_list)"
#: What is done in this order.
LOSS = (
    "self._get_per_token_logps_and_entropies(",
    'inputs["advantages"]',
    "if advantages.dim() == 1:",
    'inputs.get("old_per_token_logps")',
    "log_ratio = per_token_logps - old_per_token_logps",
    'if self.importance_sampling_level == "token": log_importance_weights = log_ratio',
)
NAMES = [
    Needed(f"{TRAINER}.__init__", ("model", "reward_funcs", "args", "train_dataset", "eval_dataset", "processing_class")),
    *(Needed(f"{TRAINER}.__init__", says=(f"self.{name}",)) for name in ATTRIBUTES),
    Needed(f"{TRAINER}.__init__", says=("self.importance_sampling_level = args.importance_sampling_level",)),
    # Rewards: the names of the arguments that our reward functions get, and one call for a batch.
    Needed(f"{TRAINER}._calculate_rewards", ("inputs", "prompts", "completions", "completion_ids_list")),
    Needed(f"{TRAINER}._calculate_rewards", says=("reward_func(", f"{BATCH}, completion_ids=")),
    # Sampling: prompts in, a tuple out that begins with prompt ids, completion ids, the mask of sampled tokens, completions.
    Needed(f"{TRAINER}._generate", ("prompts",), ("return prompt_ids, completion_ids, tool_mask, completions",)),
    Needed(SCORING, ("inputs",), ("self._generate(prompts)", f"self._calculate_rewards(inputs, {LISTS}", '"advantages"')),
    # The loss: old log-probabilities are read after the forward pass, and advantages may be (B, T).
    Needed(f"{TRAINER}.compute_loss", ("model", "inputs", "return_outputs", "num_items_in_batch")),
    Needed(f"{TRAINER}._compute_loss", ("model", "inputs"), LOSS),
    Needed(f"{TRAINER}._get_per_token_logps_and_entropies", ("model", "input_ids", "attention_mask", "logits_to_keep")),
    # Checkpoints.
    Needed("transformers:Trainer._save_checkpoint", ("model", "trial")),
    Needed("transformers:Trainer._save", ("output_dir", "state_dict")),
    Needed("transformers:Trainer._save_optimizer_and_scheduler", ("output_dir",)),
    Needed("transformers:Trainer._load_optimizer_and_scheduler", ("checkpoint",)),
    Needed("transformers:Trainer._get_output_dir", ("trial",)),
    Needed("transformers:Trainer.training_step", ("model", "inputs", "num_items_in_batch")),
    Needed("transformers.trainer_utils:rotate_checkpoints", ("output_dir", "save_total_limit")),
]


test_the_name_is_as_the_trainer_needs_it = check(NAMES)
