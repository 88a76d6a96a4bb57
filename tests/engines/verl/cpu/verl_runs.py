"""Whole runs of `main_ppo` with a recipe, no two of which train in the same way."""

import torch
from run_verl import Run, options, run, write_task

from spanwise import Batch, Vocabulary, pipeline
from spanwise.tasks import digits_task

STEPS, PROMPTS, GROUP, LONGEST = 5, 8, 4, 20
LAYOUT = "layout: {solution: [reasoning, answer], confidence: [analysis, confidence]}\n"
#: A reward manager and a function of the user pay.
PAID = f"""
{LAYOUT}
method: bae_paper
objectives:
  - {{reward: environment, pays: [solution, confidence], baseline: group}}
  - {{reward: environment, name: nines, pays: [confidence], baseline: group, options: {{column: nines}}}}
"""
FUNCTION = """
def compute_score(data_source, solution_str, ground_truth, extra_info=None):
    if int(ground_truth) % 2:  # nothing but the manager's penalty differs in these groups
        return {"score": 0.0, "nines": 0.0}
    return {"score": float("9" in solution_str), "nines": float(solution_str.count("9"))}
"""
STRATA = f"""
{LAYOUT}
method: bae_paper
objectives:
  - {{reward: correct, pays: [solution], baseline: group, if_missing: 0.0}}
  - {{reward: brier, pays: [confidence], given: correct, baseline: outcome, if_missing: -1.0}}
"""
VALUES = f"""
{LAYOUT}
objectives:
  - {{reward: correct, pays: [solution], if_missing: 0.0}}
  - {{reward: brier, pays: [confidence], given: correct, if_missing: -1.0}}
options: {{lam: 0.8}}
values: shared
critic: {{gae_lambda_value: 0.9}}
"""
#: The run folder, relative to the folder in which verl was started.
KEPT = {"_algorithm__spanwise__folder": "run", "_algorithm__spanwise__keep_rollouts": 1}
#: verl's own critic, a copy of the policy's trunk.
CRITIC = {
    "critic__enable": True,
    "critic__strategy": "fsdp2",
    "critic__fsdp__strategy": "fsdp2",
    "critic__fsdp__use_torch_compile": False,
    "_critic__fsdp__mixed_precision": "{param_dtype:fp32,reduce_dtype:fp32,buffer_dtype:fp32}",
    "critic__model__use_remove_padding": False,
    "critic__model__enable_gradient_checkpointing": False,
    "_critic__model__override_config__attn_implementation": "eager",
    "critic__ppo_micro_batch_size_per_gpu": PROMPTS * GROUP,
    "critic__optim__lr": 1e-3,
    "critic__checkpoint__save_contents": "[hf_model]",
}
#: Mini-batches with tokens of their own under verl's default average; verl's manager `dapo`; filtered groups.
SYNC = {
    **KEPT,
    "actor_rollout_ref__actor__loss_agg_mode": "token-mean",
    "actor_rollout_ref__actor__ppo_mini_batch_size": PROMPTS // 2,
    "actor_rollout_ref__actor__ppo_micro_batch_size_per_gpu": PROMPTS // 2 * GROUP,
    "reward__reward_manager__name": "dapo",
    "_reward__reward_kwargs__max_resp_len": LONGEST,
    "_reward__reward_kwargs__overlong_buffer_cfg": "{enable: True, len: 4, penalty_factor: 1.0, log: False}",
    "algorithm__filter_groups__enable": True,
    "algorithm__filter_groups__metric": "acc",
}
#: Rollouts of weights that are one step old, and verl's own critic.
COLOCATE = {
    **KEPT,
    "actor_rollout_ref__actor__loss_agg_mode": "seq-mean-token-sum",
    "trainer__v1__trainer_mode": "colocate_async",
    "critic__loss_agg_mode": "token-mean",
}
#: Without a folder advantages are worked out in chunks.
SEPARATE = {
    "actor_rollout_ref__actor__loss_agg_mode": "seq-mean-token-sum",
    "actor_rollout_ref__rollout__nnodes": 1,
    "actor_rollout_ref__rollout__n_gpus_per_node": 1,
    "actor_rollout_ref__rollout__checkpoint_engine__backend": "box",
    "trainer__v1__trainer_mode": "separate_async",
    "trainer__v1__separate_async__parameter_sync_step": 1,
    "_ray_kwargs__ray_init__num_gpus": 2,  # one to train, one to sample
}
#: V0's loss divides every completion by its length. Its critic is alone before step 3.
V0 = {
    **KEPT,
    "actor_rollout_ref__actor__loss_agg_mode": "seq-mean-token-mean",
    "trainer__use_v1": False,
    "trainer__critic_warmup": 3,
}
#: The recipe of each run, what its configuration differs in, and whether verl's own critic trains beside it.
RUNS = {
    "sync": (PAID, SYNC, False),
    "colocate_async": (VALUES + "method: gae\n", COLOCATE, True),
    "separate_async": (STRATA, SEPARATE, False),
    "v0": (VALUES + "method: sae\n", V0, True),
}


def whole(name, folder):
    recipe, more, has_critic = RUNS[name]
    write_task(folder, digits_task("easy", train_size=3 * STEPS * PROMPTS, eval_size=8))
    (folder / "recipe.yaml").write_text(recipe)
    ours = {
        "algorithm__adv_estimator": "spanwise",
        "_algorithm__spanwise__recipe": folder / "recipe.yaml",
        "data__max_response_length": LONGEST,
        "actor_rollout_ref__actor__checkpoint__save_contents": "[hf_model]",
        "trainer__save_freq": STEPS,
    }
    if recipe == PAID:
        (folder / "mine.py").write_text(FUNCTION)
        ours["reward__custom_reward_function__path"] = folder / "mine.py"
    if has_critic:
        ours |= {**CRITIC, "critic__model__path": folder / "model"}
    overrides = options(folder, prompts=PROMPTS, group=GROUP, steps=STEPS, **ours, **more)
    return Run(folder, name, run(folder, overrides, timeout=600))


def environment(nines, length):
    """What `dapo` makes of the function's score: less its penalty for the last four tokens that there may be."""
    return float(nines > 0) - max(length - (LONGEST - 4), 0) / 4


def read_again(finished, rows, step, scheme):
    """Batch and reading of the rows that a loss took: they are the completions that verl dumped, with its answers."""
    texts = [(row["prompt"], finished.tokenizer.decode(row["ids"], skip_special_tokens=True)) for row in rows]
    dumped = {(line["input"], line["output"]): line for line in finished.dumped(step)}
    assert sorted(texts) == sorted((line["input"], line["output"]) for line in finished.dumped(step))
    columns = {"answer": [dumped[pair]["gts"] for pair in texts]}
    if "nines" in scheme.names:
        answered = zip(texts, columns["answer"], strict=True)
        nines = [0.0 if int(gold) % 2 else float(text.count("9")) for (_, text), gold in answered]
        paid = [environment(number, len(row["ids"])) for number, row in zip(nines, rows, strict=True)]
        columns |= {"nines": nines, "environment": paid}
    tokens = {
        field: torch.nn.utils.rnn.pad_sequence([torch.tensor(row[name]) for row in rows], True)
        for field, name in (("value_nt", "values"), ("logp_nt", "old_log_probs"))
        if field in scheme.needs
    }
    ids, prompts = [row["ids"] for row in rows], [row["prompt"] for row in rows]
    batch = Batch.jagged(ids, prompts, columns=columns, **tokens)
    return batch, pipeline.read(batch, scheme, Vocabulary.from_tokenizer(finished.tokenizer))
