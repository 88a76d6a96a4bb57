"""NeMo-RL's estimator against its contract (`nemo_rl_contract.json`, read and not run) and a slow loop of its loss."""

import inspect
import json
import sys
from itertools import groupby
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from torch.nn.utils.rnn import pad_sequence

import conformance
import opened_folder
from spanwise.engines.nemo_rl import SpanEstimator, attach, check
from spanwise.errors import DataError, RecipeError

CONTRACT = json.loads((Path(__file__).parent / "nemo_rl_contract.json").read_text())


def config(folder, recipe, **changes):
    """The settings of the contract: the policy and the data plane are mappings, the rest objects."""
    (folder / "recipe.yaml").write_text(recipe)
    usual = {"grpo.adv_estimator.name": "spanwise", "grpo.adv_estimator.recipe": str(folder / "recipe.yaml")}
    usual |= {"policy.model_name": "unread", "policy.tokenizer.name": "unread"}
    sizes = {"policy.generation.max_new_tokens": 64, "policy.train_global_batch_size": 4}
    assert changes.keys() <= CONTRACT["settings"].keys()
    tree: dict = {}
    for path, value in {**CONTRACT["settings"], **usual, **sizes, **changes}.items():
        part = tree
        *parts, name = path.split(".")
        for step in parts:
            part = part.setdefault(step, {})
        part[name] = value
    tree["grpo"]["adv_estimator"] = SimpleNamespace(**tree["grpo"]["adv_estimator"])
    objects = {name: SimpleNamespace(**tree.pop(name)) for name in ("grpo", "loss_fn")}
    return SimpleNamespace(**tree, **objects)


@pytest.fixture(autouse=True)
def grpo(monkeypatch):
    """The module of NeMo-RL that the door changes; no NeMo-RL is installed."""
    path, takes = CONTRACT["factory"]["path"], CONTRACT["factory"]["takes"]
    values = {"_create_advantage_estimator": lambda master_config: "its own"}
    conformance.replace_trainer(monkeypatch, {path: takes}, values)
    return sys.modules["nemo_rl.algorithms.grpo"]


def rollout(ids, prompt=(7, 8), *, sampled=None, reward=0.0, weight=1.0, idx=0, **facts):
    return {"prompt": prompt, "ids": ids, "sampled": sampled or [1] * len(ids), "reward": reward, "weight": weight, "idx": idx,
            "facts": facts}  # fmt: skip


def of_rows(rows):
    """Rows of `conformance.json` as rollouts. Prompts of a group share a beginning; the earlier turns follow it."""
    groups = {row["group"]: n for n, row in enumerate(rows)}
    return [
        rollout(row["ids"], [groups[row["group"]]], sampled=row["sampled"], idx=groups[row["group"]],
                **{key: row[key] for key in ("answer", "paid", "anchor", "turns") if row.get(key) is not None})
        for row in rows
    ]  # fmt: skip


def messages(sample):
    """The prompt and each run of sampled or other tokens as a message, as NeMo-RL has them when it asks for advantages."""
    log = []
    flagged = [*((token, -1) for token in sample["prompt"]), *zip(sample["ids"], sample["sampled"], strict=True)]
    for flag, run in groupby(flagged, key=lambda pair: pair[1]):
        ids = torch.tensor([token for token, _ in run])
        role, mask = {-1: "user", 0: "environment", 1: "assistant"}[flag], torch.full(ids.shape, max(flag, 0))
        log.append({"role": role, "token_ids": ids, "token_loss_mask": mask, "generation_logprobs": torch.zeros(ids.shape)})
    assert all(message.keys() == set(CONTRACT["message"]) for message in log)
    return log


def ask(cfg, rollouts, *, padding=3):
    """Ask as NeMo-RL does; returns advantages (rows, tokens), the tokens' mask, the rows' weights and the estimator."""
    logs = [messages(sample) for sample in rollouts]
    width = max(len(sample["prompt"]) + len(sample["ids"]) for sample in rollouts) + padding
    token_mask = torch.zeros(len(rollouts), width)
    for n, log in enumerate(logs):
        flags = torch.cat([message["token_loss_mask"] for message in log])
        token_mask[n, : len(flags)] = flags
    sample_mask = torch.tensor([sample["weight"] for sample in rollouts])
    prompts = pad_sequence([torch.tensor(sample["prompt"]) for sample in rollouts], batch_first=True)
    rewards = torch.tensor([sample["reward"] for sample in rollouts])
    batch = {
        "message_log": logs,
        "length": torch.tensor([len(sample["prompt"]) for sample in rollouts]),
        "idx": [sample["idx"] for sample in rollouts],
        "extra_env_info": [sample["facts"] for sample in rollouts],
        "loss_multiplier": sample_mask,
        "total_reward": torch.zeros(len(rollouts) + 1),  # after dynamic sampling it has those of dropped rollouts, too
    }
    assert sorted(batch) == CONTRACT["repeated_batch"]
    mask = token_mask * sample_mask[:, None]
    more = dict.fromkeys(CONTRACT["compute_advantage"]["more"])
    estimator = SpanEstimator(cfg)
    adv_nt = estimator.compute_advantage(prompt_ids=prompts, rewards=rewards, mask=mask, repeated_batch=batch, **more)
    assert adv_nt.shape == mask.shape
    assert adv_nt.dtype == torch.float32
    return adv_nt.double().tolist(), token_mask.tolist(), sample_mask.tolist(), estimator


def losses(adv_nt, token_mask, sample_mask, *, size, token_level):
    """NeMo-RL's loss of each mini-batch, where every token's surrogate is -A: the contract's sentence in loops."""
    by_batch = []
    for start in range(0, len(adv_nt), size):
        total = divisor = 0.0
        for n in range(start, start + size):
            length = sum(token_mask[n][1:])  # nothing predicts the first token
            inner = sum(advantage * flag for advantage, flag in zip(adv_nt[n][1:], token_mask[n][1:], strict=True))
            total += sample_mask[n] * (inner if token_level else inner / (length + 1e-8))
            divisor += sample_mask[n] * (length if token_level else 1.0)
        by_batch.append(-total / (divisor + 1e-8))
    return by_batch


def of_tokens(rollouts, adv_nt, token_mask, sample_mask):
    """The replies' advantages without the factor of a single mini-batch at token level: its tokens / its rows."""
    tokens = sum(weight * sum(row[1:]) for row, weight in zip(token_mask, sample_mask, strict=True))
    cut = [(len(sample["prompt"]), len(sample["ids"]), row) for sample, row in zip(rollouts, adv_nt, strict=True)]
    return [[value * len(rollouts) / tokens for value in row[first : first + length]] for first, length, row in cut]


def credited(folder, name, rows, *, padding=3):
    """The advantages of the tokens of rows of `conformance.json`, trained as one mini-batch."""
    rollouts = of_rows(rows)
    cfg = config(folder, conformance.RECIPES[name], **{"policy.train_global_batch_size": len(rows)})
    return of_tokens(rollouts, *ask(cfg, rollouts, padding=padding)[:3])


# Here leaving list elements out is free, and one turn is paid for a confidence that it does not state.
@pytest.mark.filterwarnings("ignore:.*leave out n:UserWarning", "ignore:.*spanwise ignores rewards of completions")
@pytest.mark.parametrize("name", conformance.RECIPES)
def test_it_gives_every_token_the_advantage_of_the_file(tmp_path, name):
    rows, expected = conformance.expected(name, whole=True)
    conformance.assert_rows(credited(tmp_path, name, rows), expected)


def test_the_run_folder_holds_what_was_handed_over_and_takes_no_second_run(tmp_path):
    """NeMo-RL does not tell the estimator which step it is at."""
    rollouts = of_rows(conformance.expected("blocks")[0])
    recipe = conformance.RECIPES["blocks"] + f"output: {tmp_path / 'run'}\n"
    cfg = config(tmp_path, recipe, **{"policy.train_global_batch_size": len(rollouts)})
    advantages = of_tokens(rollouts, *ask(cfg, rollouts)[:3])
    opened_folder.check(tmp_path / "run", advantages, [sample["sampled"] for sample in rollouts])
    with pytest.raises(DataError, match="already holds a run"):
        SpanEstimator(cfg)


def test_order_padding_and_masked_tokens_change_nothing(tmp_path):
    paddings = iter((3, 0, 3))
    conformance.check_symmetries(lambda rows: credited(tmp_path, "blocks", rows, padding=next(paddings)))


def ragged():
    """Rollouts of four tokens, of six with tool output, of two, left out of the loss, without a reply; two prompts.

    RLOO: 1 and 0 and 1/2 of the first prompt get 3/4, -3/4 and 0; 0, 2 and a 1.5 left out of the second -7/4, 5/4, nothing.
    What has no reply has no reward.
    """
    ids = [2, 11, 3, 1]
    return [
        rollout(ids, reward=1.0),
        rollout([*ids, 9, 9], reward=0.0, sampled=[1, 1, 1, 0, 0, 1]),
        rollout(ids[:2], (9,), reward=0.0),
        rollout(ids, (9,), reward=2.0),
        rollout(ids[:3], reward=0.5),
        rollout([], reward=0.0),
        rollout(ids, (9,), reward=1.5, weight=0.0),
        rollout(ids, (9, 9), reward=1.0),  # alone with its prompt
    ]


@pytest.mark.filterwarnings("ignore:.*spanwise ignores rewards of completions")  # a rollout without a reply has no reward
@pytest.mark.parametrize("size", [1, 2, 4, 8])
@pytest.mark.parametrize("token_level", [True, False])
def test_nemo_rls_loss_is_the_mean_over_rollouts_of_the_sum_over_tokens(tmp_path, token_level, size):
    changes = {"policy.train_global_batch_size": size, "loss_fn.token_level_loss": token_level}
    adv_nt, token_mask, sample_mask, _ = ask(config(tmp_path, conformance.RLOO, **changes), ragged())
    credit = [0.75, -0.75, -1.75, 1.25, 0.0, 0.0, 0.0, 0.0]
    expected = [-sum(credit[s : s + size]) / size for s in range(0, 8, size)]
    assert losses(adv_nt, token_mask, sample_mask, size=size, token_level=token_level) == pytest.approx(expected, abs=1e-6)
    assert set(adv_nt[6]) == set(adv_nt[7]) == {0.0}
    assert not (torch.tensor(adv_nt) * (1 - torch.tensor(token_mask))).any()


def test_prompts_of_the_same_words_and_other_images_are_two_groups(tmp_path):
    cfg = config(tmp_path, conformance.RLOO)
    pairs = [rollout([2, 11, 3], reward=reward, idx=idx) for idx, reward in ((0, 1.0), (1, 5.0), (0, 0.0), (1, 5.0))]
    assert [sum(row) for row in of_tokens(pairs, *ask(cfg, pairs)[:3])] == pytest.approx([1.0, 0.0, -1.0, 0.0])


def test_facts_of_the_environment_and_values_of_the_batch_are_columns(tmp_path):
    recipe = conformance.RLOO.replace("{reward: environment, pays: all}", "{reward: 'test_nemo_rl:seen', pays: all}")
    pair = [rollout([2, 11, 3], facts={"gold": gold}) for gold in ("4", "5")]
    assert ask(config(tmp_path, recipe), pair)[3].last_metrics["credit/malformed"] == 0.0


def seen(prompts, completions, completion_ids, **columns):
    assert (prompts, completions, completion_ids) == (["01"] * 2, ["<answer>4</answer>"] * 2, [[2, 11, 3]] * 2)
    assert columns["facts.gold"] == ["4", "5"]
    assert (columns["environment"], columns["loss_multiplier"]) == ([0.0, 0.0], [1.0, 1.0])
    assert not any(name.startswith(("total_reward", "extra_env_info")) for name in columns)
    return [1.0, 0.0]


@pytest.mark.parametrize("name", ["advantage_clip_low", "malformed_thinking_advantage"])
def test_settings_of_which_the_border_has_the_others_are_refused(tmp_path, name):
    with pytest.raises(RecipeError, match=name):
        check(config(tmp_path, conformance.WHOLE, **{f"grpo.{name}": -5.0}))


def test_attach_gives_the_name_to_nemo_rl_and_leaves_others_alone(tmp_path, grpo):
    attach()
    create = grpo._create_advantage_estimator
    assert [*inspect.signature(create).parameters] == CONTRACT["factory"]["takes"]
    assert isinstance(create(config(tmp_path, conformance.WHOLE)), SpanEstimator)
    assert create(SimpleNamespace(grpo=SimpleNamespace(adv_estimator=SimpleNamespace(name="gdpo")))) == "its own"
    parameters = [*inspect.signature(SpanEstimator.compute_advantage).parameters]
    assert parameters[1:5] == CONTRACT["compute_advantage"]["takes"]
