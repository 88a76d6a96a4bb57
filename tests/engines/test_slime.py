"""slime's two hooks against its contract (`slime_contract.json`, read and not run) and a slow loop of its loss."""

import inspect
import json
import math
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml

import conformance
import opened_folder
from spanwise.engines import slime as door
from spanwise.engines.slime import HOOKS, check, post_process_rewards, set_advantages
from spanwise.errors import AlignmentError, RecipeError

CONTRACT = json.loads((Path(__file__).parent / "slime_contract.json").read_text())


class Strict:
    """Hold only the names of the contract, so that a name that slime does not have raises."""

    def __init__(self, names, **values):
        assert values.keys() <= names.keys() | {"spanwise_recipe"}, values.keys() - names.keys()
        vars(self).update({**names, **values})


class Sample(Strict):
    reward: Any

    def get_reward_value(self, args):
        return self.reward if not args.reward_key else self.reward[args.reward_key]


def arguments(folder, recipe, **changes):
    (folder / "recipe.yaml").write_text(recipe)
    usual = {**HOOKS, "hf_checkpoint": "unread", "label_key": "answer", "spanwise_recipe": str(folder / "recipe.yaml")}
    sizes = {"n_samples_per_prompt": 8, "global_batch_size": 1, "rollout_max_response_len": 64}
    return Strict(CONTRACT["arguments"], **{**usual, **sizes, **changes})


def sample(ids, group, *, mask=None, prompt=(20,), **more):
    fields = {"tokens": [*prompt, *ids], "response_length": len(ids), "group_index": group, "loss_mask": mask, **more}
    return Sample(CONTRACT["sample"], **fields)


def of_rows(rows):
    """Rows of `conformance.json` as slime's samples: what an environment paid and its state lie in the metadata."""
    groups = {row["group"]: g for g, row in enumerate(rows)}
    rollouts = {row["rollout"]: j for j, row in enumerate(rows) if "rollout" in row}
    samples = []
    for row in rows:
        metadata = {key: row[key] for key in ("paid", "anchor", "turns") if row.get(key) is not None}
        fields = {"mask": row["sampled"], "prompt": row["prompt"], "label": row["answer"], "metadata": metadata}
        samples.append(sample(row["ids"], groups[row["group"]], rollout_id=rollouts.get(row.get("rollout")), **fields))
    return samples


@pytest.fixture(autouse=True)
def slime(monkeypatch):
    """The functions of slime that the hooks call, by the contract's names, each one of our own; no slime is installed."""
    logged, parallel = [], {"size": 1, "rank": 0}

    def slice_log_prob_with_cp(log_prob, total_length, response_length):
        assert len(log_prob) == response_length
        size, rank = parallel["size"], parallel["rank"]
        chunk = -(-total_length // (2 * size))  # rank r has the chunks r and 2 size - 1 - r; a logit stands before its token
        places = [(total_length - response_length + t - 1) // chunk for t in range(response_length)]
        return log_prob if size == 1 else log_prob[[t for t, at in enumerate(places) if at in (rank, 2 * size - 1 - rank)]]

    functions = {
        "slice_log_prob_with_cp": slice_log_prob_with_cp,
        "log": lambda args, metrics, step_key: logged.append(metrics),
        "compute_rollout_step": lambda args, rollout_id: rollout_id,
        "_current_rollout_id": 7,
    }
    conformance.replace_trainer(monkeypatch, CONTRACT["calls"], functions)
    monkeypatch.setattr(door, "_RUNS", {})

    def rollout(number):
        vars(sys.modules["slime.rollout.sample_hooks"])["_current_rollout_id"] = number

    return Strict({"logged": logged, "parallel": parallel, "rollout": rollout})


def trained(args, samples, *, ranks=1, per_token=False):
    """A step of slime with a loss of -A: the loss of each of its steps, and the advantages of every sample's tokens.

    Written from the contract's sentence on the loss, in loops over samples and tokens.
    """
    raw, carried = post_process_rewards(args, samples)
    assert len(raw) == len(carried) == len(samples)
    masks = [[0] * s.response_length if s.remove_sample else s.loss_mask or [1] * s.response_length for s in samples]
    rollouts = [("none", n) if s.rollout_id is None else s.rollout_id for n, s in enumerate(samples)]
    order = list(dict.fromkeys(rollouts))
    advantages: list[list[float]] = [[] for _ in samples]
    for rank in range(ranks):  # rank r has the samples r, r + ranks, ...
        mine = [*range(rank, len(samples), ranks)]
        data = {
            "rewards": [carried[n] for n in mine],
            "local_raw_reward": [raw[n] for n in mine],
            "kl": [torch.zeros(samples[n].response_length) for n in mine],
            "total_lengths": [len(samples[n].tokens) for n in mine],
            "response_lengths": [samples[n].response_length for n in mine],
        }
        assert data.keys() == set(CONTRACT["rollout_data"])
        set_advantages(args, data)
        for n, adv_t in zip(mine, data["advantages"], strict=True):
            advantages[n] = adv_t.double().tolist()
        assert data["rewards"] == data["local_raw_reward"]
    size, losses = args.global_batch_size, []
    for start in range(0, len(order) - size + 1, size):
        members = [n for n in range(len(samples)) if rollouts[n] in order[start : start + size]]
        total = tokens = 0.0
        for n in members:
            inner = sum(advantage * flag for advantage, flag in zip(advantages[n], masks[n], strict=True))
            divisor = sum(sum(masks[j]) for j in members if rollouts[j] == rollouts[n])
            total += inner if per_token else inner / max(divisor, 1)
            tokens += max(sum(masks[n]), 1)
        losses.append(-total / tokens if per_token else -total / size)
    return losses, advantages


def unfolded(samples, advantages):
    """The advantages without the factor of slime's default loss: the trained tokens of a sample's rollout."""
    names = [("none", n) if s.rollout_id is None else s.rollout_id for n, s in enumerate(samples)]
    sizes = {name: sum(sum(s.loss_mask) for s, other in zip(samples, names, strict=True) if other == name) for name in names}
    return [[value / sizes[name] for value in row] for name, row in zip(names, advantages, strict=True)]


# Here leaving list elements out is free, and one turn is paid for a confidence that it does not state.
@pytest.mark.filterwarnings("ignore:.*leave out n:UserWarning", "ignore:.*spanwise ignores rewards of completions")
@pytest.mark.parametrize(("ranks", "whole"), [(1, False), (3, False), (1, True)])
@pytest.mark.parametrize("name", conformance.RECIPES)
def test_it_gives_every_token_the_advantage_of_the_file(tmp_path, name, ranks, whole):
    rows, expected = conformance.expected(name, whole=whole)
    samples = of_rows(rows)
    advantages = unfolded(samples, trained(arguments(tmp_path, conformance.RECIPES[name]), samples, ranks=ranks)[1])
    conformance.assert_rows(advantages, expected)


@pytest.mark.parametrize("name", ["blocks", "turns"])
@pytest.mark.filterwarnings("ignore:.*spanwise ignores rewards of completions")
def test_the_run_folder_holds_what_was_handed_over_and_slime_logs_the_metrics(tmp_path, slime, name):
    """Rollouts of one sample, and of one for each turn; slime counts from 0 and is at 7."""
    samples = of_rows(conformance.expected(name)[0])
    args = arguments(tmp_path, conformance.RECIPES[name] + f"output: {tmp_path / 'run'}\nkeep_rollouts: 4\n")
    advantages = unfolded(samples, trained(args, samples)[1])
    opened_folder.check(tmp_path / "run", advantages, [member.loss_mask for member in samples], step=8)
    recipe = yaml.safe_load((tmp_path / "run" / "recipe.yaml").read_text())
    assert (recipe["prompts"], recipe["group_size"]) == ((4, 2) if name == "blocks" else (3, 2))  # 10 and 7 rollouts
    (metrics,) = slime.logged
    assert metrics["rollout/step"] == 7
    assert name == "turns" or metrics["rollout/credit/malformed"] == 0.2  # two of ten state no confidence
    assert all(value == value for value in metrics.values())


def test_a_resumed_training_goes_on_in_its_folder(tmp_path, slime):
    """slime was at rollout 7 and resumes at 6: the files of 7 are removed."""
    args = arguments(tmp_path, conformance.WHOLE + f"output: {tmp_path / 'run'}\nkeep_rollouts: 2\n")
    samples = [sample([2, 11, 3], 0, reward=reward, mask=[1] * 3) for reward in (1.0, 0.0)]
    for rollout in (6, 7):
        slime.rollout(rollout)
        post_process_rewards(args, samples)
    door._RUNS.clear()
    slime.rollout(6)
    post_process_rewards(args, samples)
    lines = [json.loads(line) for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()]
    assert [line["step"] for line in lines] == [7]
    assert [*(tmp_path / "run" / "rollouts").iterdir()] == []


def test_the_order_of_samples_and_masked_tokens_change_nothing(tmp_path):
    args = arguments(tmp_path, conformance.RECIPES["blocks"])
    conformance.check_symmetries(lambda rows: trained(args, of_rows(rows))[1])


def ragged():
    """Two prompts; rollouts of one and of two samples, tool output, a sample left out of the loss and one without a token.

    RLOO: the first group has 1 (of the rollout's last sample) and 0, credited 1 and -1; what has no token has no reward. The second
    has 0, 2 and a 1.5 that is left out of the loss: -7/4, 5/4 and, instead of 1/2, nothing.
    """
    ids = [2, 11, 3, 1]
    return [
        sample(ids, 0, reward=0.25, rollout_id=4),
        sample(ids[:3], 0, reward=1.0, rollout_id=4),
        sample([*ids, 9, 9], 1, reward=0.0, rollout_id=9, mask=[1, 1, 1, 0, 0, 1]),
        sample(ids, 0, reward=0.0),
        sample([], 0, reward=0.0, rollout_id=0),
        sample(ids, 1, reward=2.0, rollout_id=8),
        sample(ids[:2], 1, reward=1.5, rollout_id=6, remove_sample=True),
    ]


@pytest.mark.filterwarnings(
    "ignore:.*spanwise ignores rewards of completions"
)  # a reward of a sample without tokens is none
@pytest.mark.parametrize("size", [1, 2, 3])
@pytest.mark.parametrize("per_token", [False, True])
def test_slimes_loss_is_the_mean_over_rollouts_of_the_sum_over_tokens(tmp_path, per_token, size):
    """`per: completion` makes the sum over a rollout's tokens its credit, worked out by hand in `ragged`."""
    args = arguments(tmp_path, conformance.RLOO, global_batch_size=size, calculate_per_token_loss=per_token)
    losses, advantages = trained(args, ragged(), per_token=per_token)
    assert advantages[-1] == [0.0, 0.0]
    # In the order of their first sample: 4 and 9, the one without an id, 0 (no token), 8, 6 (left out).
    credit = [1.0, -1.75, -1.0, 0.0, 1.25, 0.0]
    assert losses == pytest.approx([-sum(credit[s : s + size]) / size for s in range(0, 6, size)], abs=1e-6)


def test_a_slice_of_a_context_parallel_rank_has_its_own_tokens(tmp_path, slime):
    args = arguments(tmp_path, conformance.WHOLE)
    credit = torch.arange(1.0, 14.0)
    # 17 tokens in 4 chunks of 5; the four of the prompt come first, and token t is predicted at place t + 3.
    expected = {0: [1.0, 2.0, 13.0], 1: [float(t) for t in range(3, 13)]}
    for rank, mine in expected.items():
        slime.parallel.update(size=2, rank=rank)
        lengths = {"total_lengths": [17], "response_lengths": [13], "local_raw_reward": [1.0]}
        data = {"rewards": [credit], "kl": [torch.zeros(4)], **lengths}
        with pytest.raises(AlignmentError, match=rf"Sample 0 of this rank has {len(mine)} advantages but 4 log-prob"):
            set_advantages(args, data)
        data["kl"] = [torch.zeros(len(mine))]
        set_advantages(args, data)
        assert data["advantages"][0].tolist() == data["returns"][0].tolist() == mine


@pytest.mark.parametrize(
    ("column", "rewards", "log", "credit"),
    [
        # 1 and 0 are compared with each other; None is no reward, and its number in slime's log is NaN.
        ("", [{"score": 1.0}, None, {"score": 0.0}], [1.0, math.nan, 0.0], [1.0, 0.0, -1.0]),
        ("format", [{"score": 0.0, "format": 2.0}, {"score": 0.0, "format": 1.0}], [0.0, 0.0], [1.0, -1.0]),
    ],
)
def test_slimes_own_reward_and_each_value_of_a_reward_of_several_pay_a_block(tmp_path, column, rewards, log, credit):
    recipe = conformance.RLOO.replace("pays: all", f"pays: all, options: {{column: {column}}}" if column else "pays: all")
    samples = [sample([2, 11, 3], 0, reward=reward) for reward in rewards]
    raw, carried = post_process_rewards(arguments(tmp_path, recipe, reward_key="score"), samples)
    assert raw == pytest.approx(log, nan_ok=True)
    assert [row.tolist() for row in carried] == [[value] * 3 for value in credit]  # 1/3 of each times 3


def test_a_discount_that_the_recipe_has_otherwise_is_refused(tmp_path):
    recipe = conformance.WHOLE.replace("grpo", "reinforce++") + "options: {gamma: .5}\n"
    with pytest.raises(RecipeError, match=r"gamma is 0\.9, but the recipe has gamma: 0\.5"):
        check(arguments(tmp_path, recipe, gamma=0.9))


def test_settings_that_are_taken(tmp_path):
    with pytest.warns(UserWarning, match="steps"):
        assert check(arguments(tmp_path, conformance.WHOLE + "steps: 3\n", kl_coef=0.0)).scheme.method == "grpo"
    single = arguments(tmp_path, conformance.WHOLE, n_samples_per_prompt=1, grpo_std_normalization=False)
    assert check(single).scheme.method == "grpo"  # slime ignores the option for single samples


def test_a_sample_of_no_group_is_refused(tmp_path):
    with pytest.raises(AlignmentError, match="Sample 1"):
        post_process_rewards(arguments(tmp_path, conformance.WHOLE), [sample([2], g, reward=1.0) for g in (0, None)])


def test_the_hooks_take_what_slime_gives():
    functions = {**HOOKS, "custom_megatron_init_path": "spanwise.engines.slime.check"}
    for name, hook in CONTRACT["hooks"].items():
        function = getattr(door, functions[name].removeprefix("spanwise.engines.slime."))
        assert [*inspect.signature(function).parameters] == hook["takes"]
