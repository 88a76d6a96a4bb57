"""Whole runs of `main_ppo` with a recipe and a run folder: made once, and looked at by several tests."""

from run_verl import Run, options, run, write_task

from spanwise import Batch, Vocabulary, pipeline
from spanwise.tasks import digits_task

STEPS, PROMPTS, GROUP, LONGEST = 5, 8, 4, 20
RECIPE = """
method: bae_paper
layout: {solution: [reasoning, answer], confidence: [analysis, confidence]}
objectives:
  - {reward: correct, pays: [solution], baseline: group, if_missing: 0.0}
  - {reward: brier, pays: [confidence], given: correct, baseline: outcome, if_missing: -1.0}
"""
#: The run folder, relative to the folder in which verl was started.
KEPT = {"_algorithm__spanwise__folder": "run", "_algorithm__spanwise__keep_rollouts": 1}
#: What differs between the runs. The first has verl's default way of averaging, and two mini-batches with tokens of their own.
#: V0's loss divides every completion by its length, which the adapter has to undo.
RUNS = {
    "sync": {
        "actor_rollout_ref__actor__loss_agg_mode": "token-mean",
        "actor_rollout_ref__actor__ppo_mini_batch_size": PROMPTS // 2,
        "actor_rollout_ref__actor__ppo_micro_batch_size_per_gpu": PROMPTS // 2 * GROUP,
    },
    "colocate_async": {
        "actor_rollout_ref__actor__loss_agg_mode": "seq-mean-token-sum",
        "trainer__v1__trainer_mode": "colocate_async",
    },
    "separate_async": {
        "actor_rollout_ref__actor__loss_agg_mode": "seq-mean-token-sum",
        "actor_rollout_ref__rollout__nnodes": 1,
        "actor_rollout_ref__rollout__n_gpus_per_node": 1,
        "actor_rollout_ref__rollout__checkpoint_engine__backend": "box",
        "trainer__v1__trainer_mode": "separate_async",
        "trainer__v1__separate_async__parameter_sync_step": 1,
        "_ray_kwargs__ray_init__num_gpus": 2,  # one to train, one to sample
    },
    "v0": {"actor_rollout_ref__actor__loss_agg_mode": "seq-mean-token-mean", "trainer__use_v1": False},
}


#: With verl's own critic, which is alone for two steps under gae: verl counts from 1.
CRITIC_RUNS = {
    "gae": {"trainer__critic_warmup": 3, "critic__loss_agg_mode": "token-mean"},
    "sae": {"trainer__use_v1": False},
}
CRITIC_RECIPE = """
method: {}
layout: {{solution: [reasoning, answer], confidence: [analysis, confidence]}}
objectives:
  - {{reward: correct, pays: [solution], if_missing: 0.0}}
  - {{reward: brier, pays: [confidence], given: correct, if_missing: -1.0}}
options: {{lam: 0.8}}
values: shared
critic: {{gae_lambda_value: 0.9}}
"""


def with_critic(name, folder):
    """The run with a critic of this name, finished, in a folder."""
    switches = ("fsdp__use_torch_compile", "model__use_remove_padding", "model__enable_gradient_checkpointing")
    sizes = {"ppo_micro_batch_size_per_gpu": PROMPTS * GROUP, "optim__lr": 1e-3, "checkpoint__save_contents": "[hf_model]"}
    model = {"enable": True, "strategy": "fsdp2", "fsdp__strategy": "fsdp2", "model__path": folder / "model"}
    critic = {f"critic__{name}": value for name, value in {**dict.fromkeys(switches, False), **sizes, **model}.items()}
    critic["_critic__fsdp__mixed_precision"] = "{param_dtype:fp32,reduce_dtype:fp32,buffer_dtype:fp32}"
    critic["_critic__model__override_config__attn_implementation"] = "eager"
    critic["actor_rollout_ref__actor__loss_agg_mode"] = "seq-mean-token-mean"
    return whole(name, folder, recipe=CRITIC_RECIPE.format(name), **critic, **CRITIC_RUNS[name])


def read_again(finished, rows, step, scheme, **tokens):
    """Batch and reading of the rows that a loss took: they are the completions that verl dumped, with its answers."""
    texts = [(row["prompt"], finished.tokenizer.decode(row["ids"], skip_special_tokens=True)) for row in rows]
    dumped = finished.dumped(step)
    assert sorted(texts) == sorted((line["input"], line["output"]) for line in dumped)
    answer = {line["input"]: line["gts"] for line in dumped}
    prompts, ids = [row["prompt"] for row in rows], [row["ids"] for row in rows]
    batch = Batch.jagged(ids, prompts, columns={"answer": [answer[prompt] for prompt in prompts]}, **tokens)
    return batch, pipeline.read(batch, scheme, Vocabulary.from_tokenizer(finished.tokenizer))


def whole(name, folder, *, recipe=RECIPE, steps=STEPS, **more):
    """The run of this name, finished, in a folder."""
    write_task(folder, digits_task("easy", train_size=steps * PROMPTS, eval_size=8))
    (folder / "recipe.yaml").write_text(recipe)
    spanwise = {"_algorithm__spanwise__recipe": folder / "recipe.yaml", "data__max_response_length": LONGEST}
    saved = {"actor_rollout_ref__actor__checkpoint__save_contents": "[hf_model]", "trainer__save_freq": steps}
    ours = {"prompts": PROMPTS, "group": GROUP, "steps": steps, "algorithm__adv_estimator": "spanwise", **spanwise, **saved}
    overrides = options(folder, **ours, **(more or {**KEPT, **RUNS[name]}))
    return Run(folder, name, run(folder, overrides, timeout=600))
