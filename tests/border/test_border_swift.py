"""Settings of ms-swift that would change the credit, or have no place for it."""

from border.case import case, check, write_recipe
from spanwise.engines.swift import check as check_settings

USUAL = {  # of `swift rlhf`, where nothing is set
    "loss_type": "dr_grpo", "beta": 0.0, "importance_sampling_level": "token", "teacher": False, "dynamic_num_samples": False,
    "kl_in_reward": False, "dynamic_sample": False, "off_policy_sequence_mask_delta": None, "advantage_reweight": None,
    "sdar_loss_coef": 0.0, "use_liger_kernel": False, "padding_free": False, "sequence_parallel_size": 1,
}  # fmt: skip


@case
def checked(folder, method="bae", more="", **changes):
    check_settings(write_recipe(folder, method, more), {**USUAL, **changes}, longest=64)


CASES = {
    "ms-swift with `--loss_type real`": checked(loss_type="real"),
    "ms-swift with `--importance_sampling_level sequence`": checked(importance_sampling_level="sequence"),
    "ms-swift with `--loss_type dr_grpo --beta 0.1`": checked(beta=0.1),
    "ms-swift with `--teacher_model`": checked(teacher=True),
    "ms-swift with a rollout server of several turns": checked(dynamic_num_samples=True),
    "ms-swift with `--kl_in_reward true`": checked(kl_in_reward=True),
    "ms-swift with `--dynamic_sample true`": checked(dynamic_sample=True),
    "ms-swift with `--off_policy_sequence_mask_delta 1`": checked(off_policy_sequence_mask_delta=1.0),
    "ms-swift with `--use_liger_kernel true`": checked(use_liger_kernel=True),
    "ms-swift with `--padding_free true`": checked(padding_free=True),
    "ms-swift with `--sequence_parallel_size 2`": checked(sequence_parallel_size=2),
    "ms-swift with `method: gae`": checked("gae"),
    "ms-swift with a `critic` in the recipe": checked(more="critic: {gae_lambda_value: 0.5}\n"),
    "ms-swift with an idle field in the recipe": checked(more="learning_rate: 0.1\n"),
}

test = check(__doc__, CASES)
