"""TRL's trainer samples with a vLLM in its own process: credit is as defined, and the sampler's error is a metric."""

import json
import os

os.environ.update(VLLM_ENABLE_V1_MULTIPROCESSING="0", VLLM_CPU_KVCACHE_SPACE="1")

import pytest
import torch
from datasets import Dataset
from peft import LoraConfig
from transformers import AutoTokenizer
from trl.generation import vllm_generation

import conformance
import trl_small
from served_small import write_model
from spanwise import CriticConfig, Laser, Layout, Objective, Scheme
from trl_conformance_small import CASES, Watched, assert_defined, replayed, trained

pytestmark = pytest.mark.timeout(600)
VLLM = {"use_vllm": True, "vllm_mode": "colocate", "vllm_gpu_memory_utilization": 0.1, "vllm_max_model_length": 256}


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    """The folder of a model with the vocabulary of the file."""
    folder = tmp_path_factory.mktemp("model")
    write_model(folder, conformance.tokenizer())
    return folder


@pytest.fixture(scope="module")
def one_engine():
    """A vLLM that all trainings share: it takes the weights of each."""
    build, engines = vllm_generation.LLM, []

    def built_once(*args, **options):
        if not engines:
            engines.append(build(*args, **options))
        return engines[0]

    return built_once


@pytest.mark.usefixtures("kept_weights")
@pytest.mark.filterwarnings("ignore:.*spanwise ignores rewards of completions:UserWarning")
@pytest.mark.parametrize(("recipe", "group"), CASES, ids=[f"{recipe}-{group[0][0]['group']}" for recipe, group in CASES])
def test_the_advantages_are_those_of_the_definitions(tmp_path, monkeypatch, model, one_engine, recipe, group):
    monkeypatch.setattr(vllm_generation, "LLM", one_engine)
    rows = [row for row, _ in group]
    # The sampler's log-probabilities are far off, which shows in a metric and not in the credit.
    sampler = {"model": str(model), "rollout_func": replayed(rows, logps=-9.0)}
    run = trained(tmp_path, recipe, rows, extra=sampler, learning_rate=1e-3, **VLLM)
    assert_defined(run, group)
    assert run.state.log_history[0]["sampling/sampling_logp_difference/mean"] > 1


STEPS = 3
ADAM = {"optim": "adamw_torch", "learning_rate": 1e-3, "max_grad_norm": 1.0, "max_steps": STEPS}
GAP = "sampling/sampling_logp_difference/max"
LAYOUT = Layout({"all": []})
#: Completions that are JSON objects of two digits, and completions of three digits that end.
OBJECTS, DIGITS = r'\{"a": [0-9], "b": [0-9]\}', "[0-9]{3}"


def ascii_signs(completions, **columns):
    """A reward that a random model earns."""
    return [float(sum(sign.isascii() for sign in text)) for text in completions]


def digit_of(name):
    """A reward that is the digit of a field."""

    def digit(completions, **columns):
        return [float(json.loads(text)[name]) for text in completions]

    digit.__name__ = name
    return digit


def even(completions, **columns):
    """1 if the last digit is even."""
    return [float(int(text[-1]) % 2 == 0) for text in completions]


def in_two_turns(prompts, trainer):
    """A rollout function: the policy writes through vLLM, the environment answers, the policy writes again."""
    answer = trainer.processing_class.encode(" no; ")
    prompt_ids = [trainer.processing_class.encode(prompt) for prompt in prompts]
    first, first_logps = trainer._generate_single_turn(prompt_ids, None, {}, trl_small.GROUP)
    contexts = [[*prompt, *reply, *answer] for prompt, reply in zip(prompt_ids, first, strict=True)]
    second, second_logps = trainer._generate_single_turn(contexts, None, {}, 1)
    pairs = list(zip(first, second, strict=True))
    logps = zip(first_logps, second_logps, strict=True)
    return {
        "prompt_ids": prompt_ids,
        "completion_ids": [[*before, *answer, *after] for before, after in pairs],
        "logprobs": [[*before, *[0.0] * len(answer), *after] for before, after in logps],
        "env_mask": [[1] * len(before) + [0] * len(answer) + [1] * len(after) for before, after in pairs],
        "turns": [[{"text": trainer.processing_class.decode(part)} for part in pair] for pair in pairs],
    }


def signs_of_turn(text, **columns):
    """A reward of each turn."""
    return ascii_signs(text)


BY_FIELD = [Objective(digit_of(name), pays=name, baseline="group") for name in ("a", "b")]
BY_TURN = [Objective(signs_of_turn, pays="all", scope="turn", baseline="group")]
VERDICT = [Objective(even, pays="all", baseline="group")]
SCORE = Laser("<score>", verdict="even", beta=1.0, mix=0.5, self_rewarding_warmup=1, threshold=0.0, scale="none")
#: What differs between the runs: more of the configuration, of the scheme, and of the trainer.
RUNS = {
    "plain": ({}, {}, {}),
    "without the sampler's ratio": ({"vllm_importance_sampling_correction": False}, {}, {}),
    "two updates of a batch": ({"num_iterations": 2}, {}, {}),
    "a ratio for each block": ({"num_iterations": 2, "importance_sampling_level": "block"}, {}, {}),
    "groups sampled anew": ({"dynamic_sampling": "credit"}, {}, {}),
    "an adapter": ({}, {}, {"peft_config": LoraConfig(r=4, target_modules=["q_proj", "v_proj"])}),
    "a critic": ({}, {"method": "gae"}, {"critic": CriticConfig(policy_training_start_step=0)}),
    "fields": (
        {"vllm_structured_outputs_regex": OBJECTS, "max_completion_length": 24},
        {"layout": Layout({"form": [], "a": ["a"], "b": ["b"]}, segmenter="json"), "objectives": BY_FIELD},
        {},
    ),
    "a self-rewarding score": ({"vllm_structured_outputs_regex": DIGITS}, {"objectives": VERDICT, "laser": SCORE}, {}),
    "turns": ({}, {"objectives": BY_TURN}, {"rollout_func": in_two_turns}),
}


@pytest.mark.usefixtures("kept_weights")
@pytest.mark.parametrize("name", RUNS)
def test_it_trains_by_what_vllm_wrote(tmp_path, tiny_model, name):
    config, rule, more = RUNS[name]
    run = trainer(tmp_path, tiny_model, {**ADAM, **config}, rule, more)
    before = trl_small.weights(run.model)
    run.train()
    logs, rollouts = run.state.log_history[:STEPS], run.last_rollouts
    assert any(not torch.equal(weight, before[key]) for key, weight in trl_small.weights(run.model).items())
    # The sampler's log-probabilities are those of the trained policy, also after updates; TRL logs it if it corrects.
    gaps = [log[GAP] for log in logs if GAP in log]
    assert bool(gaps) == run.args.vllm_importance_sampling_correction
    # Under a grammar vLLM samples from other probabilities than the policy's, and says so; the credit stays as it is.
    assert all((0 < gap < 0.02) == ("vllm_structured_outputs_regex" not in config) for gap in gaps)
    adv_nt, block_nt = rollouts.advantages_nt.double(), rollouts.spans.block_nt
    if not rule:
        assert_credit(adv_nt.sum(dim=1), ascii_signs(rollouts.completions))
    if name == "fields":
        for number, field in ((1, "a"), (2, "b")):
            of_field_n = torch.where(block_nt == number, adv_nt, 0.0).sum(dim=1)
            assert_credit(of_field_n, digit_of(field)(rollouts.completions))
        assert not adv_nt[block_nt == 0].any()
    if name == "turns":  # a row of the rollouts is a turn
        assert (len(adv_nt), bool(adv_nt.any())) == (16, True)
    if name == "a self-rewarding score":
        assert all(log["laser/loss"] > 0 for log in logs)
        assert not bool(rollouts.batch.score_n.isnan().any())


def trainer(folder, model, config, rule, more, **kind):
    """The trainer of a run."""
    settings = {"method": "bae", "layout": LAYOUT, **rule}
    baseline = {"baseline": "group"} if settings["method"] == "bae" else {}
    settings.setdefault("objectives", [Objective(ascii_signs, pays="all", **baseline)])
    scheme = Scheme.preset(settings.pop("method"), settings.pop("layout"), **settings)
    dataset = Dataset.from_list([{"prompt": f"{n}+2="} for n in range(8)])
    usual = {"scheme": scheme, "train_dataset": dataset, "processing_class": AutoTokenizer.from_pretrained(model)}
    extra = {"model": str(model), "rollout_func": None, **usual, **more}
    return trl_small.trainer(folder, extra=extra, **kind, **VLLM, **config)


def assert_credit(summed_n, rewards):
    """The tokens of a block get its reward minus the group's mean."""
    reward_n = torch.tensor(rewards).double()
    mean_n = reward_n.view(-1, trl_small.GROUP).mean(dim=1).repeat_interleave(trl_small.GROUP)
    torch.testing.assert_close(summed_n, reward_n - mean_n, atol=1e-4, rtol=1e-4)


@pytest.mark.usefixtures("kept_weights")
def test_the_gradient_has_the_samplers_ratio_in_it(tmp_path, tiny_model):
    """One plain step against the loss written out, token by token, where the sampler is another policy than the one trained."""
    corrected = {"vllm_importance_sampling_mode": "token_truncate", "vllm_importance_sampling_clip_max": 1.05}
    run = trainer(tmp_path, tiny_model, corrected, {}, {}, kind=Watched)
    torch.manual_seed(1)
    with torch.no_grad():  # after vLLM took its weights
        for weight in run.model.parameters():
            weight.mul_(1 + 0.2 * torch.randn_like(weight))
    run._last_loaded_step = 0  # vLLM keeps the old ones
    before = trl_small.weights(run.model)
    moved = trl_small.step(run)
    output = run.seen
    model = run.accelerator.unwrap_model(run.model)
    model.load_state_dict(before, strict=False)
    ids = torch.cat([output["prompt_ids"], output["completion_ids"]], dim=1)
    mask = torch.cat([output["prompt_mask"], output["completion_mask"]], dim=1)
    width = output["completion_ids"].shape[1]
    position = (mask.cumsum(dim=1) - 1).clamp(min=0)
    logits = model(input_ids=ids, attention_mask=mask, position_ids=position).logits[:, -width - 1 : -1]
    logp_nt = logits.log_softmax(dim=-1).gather(2, output["completion_ids"][:, :, None])[:, :, 0]
    ratio_nt = (logp_nt.detach() - output["sampling_per_token_logps"]).exp().clamp(max=1.05)
    assert 0.1 < float((ratio_nt < 1.05).double().mean()) < 0.9
    loss = -(ratio_nt * output["advantages"] * logp_nt * output["completion_mask"]).sum() / len(ids)
    assert trl_small.largest_difference(moved, trl_small.gradient_of(model, loss)) < 1e-3
