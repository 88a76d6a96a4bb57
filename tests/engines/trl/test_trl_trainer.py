"""The trainer's parts around the loss: canary, metrics, rollouts, evaluation, refusals."""

import copy
import logging
import math
import re
from pathlib import Path

import pyarrow.parquet as pq
import pytest
import torch
from datasets import Dataset

import trl_small as small
from judge_server import Server, verdict
from spanwise.engines.trl import SpanGRPOConfig, SpanGRPOTrainer
from spanwise.engines.trl.config import check_prefilled, check_use
from spanwise.errors import DataError, RecipeError, SpanwiseError
from spanwise.layout import Layout
from spanwise.objective import Objective
from spanwise.rollouts.schema import score_columns
from spanwise.scheme import Scheme

COLLAPSES = {
    "first token": lambda advantages, mask: advantages[:, :1],
    "padded mean": lambda advantages, mask: advantages.mean(dim=1, keepdim=True),
    # On-policy this changes neither the value of the loss nor its derivative by A: only the mixed derivative sees it.
    "completion mean": lambda advantages, mask: (advantages * mask).sum(1, keepdim=True) / mask.sum(1, keepdim=True),
    "shifted": lambda advantages, mask: advantages.roll(1, dims=1),
    "ignored": lambda advantages, mask: advantages.detach(),
}


def collapsing(how="completion mean"):
    class Collapsing(SpanGRPOTrainer):
        def _compute_loss(self, model, inputs):
            mask = inputs["completion_mask"] * inputs.get("tool_mask", 1)
            return super()._compute_loss(model, {**inputs, "advantages": COLLAPSES[how](inputs["advantages"], mask)})

    return Collapsing


#: A loss with more terms than the policy's, and log-probabilities that are kept.
MORE = {"scripts": small.SAID_WITH_TOOLS, "tools": True, "beta": 0.1, "entropy_coef": 0.5}
MORE |= {"per_device_train_batch_size": 4, "steps_per_generation": 2}
OTHERS = [("completion mean", options) for options in (MORE, *({"loss_type": name} for name in ("grpo", "cispo", "sapo")))]


@pytest.mark.parametrize(("how", "options"), [*((how, {}) for how in COLLAPSES), *OTHERS])
def test_canary_sees_collapsed_advantages(tmp_path, how, options):
    extra = {"model": small.beside_a_reference(tmp_path)}
    run = small.trainer(tmp_path / "run", kind=collapsing(how), extra=extra, **options)
    with pytest.raises(SpanwiseError, match="advantage"):
        run.train()


def test_canary_can_be_switched_off(tmp_path):
    run = small.trainer(tmp_path, kind=collapsing(), canary=False)
    assert small.largest_difference(small.step(run), small.paper_gradient(small.policy())) > 0.01


@pytest.fixture(scope="module")
def ran(tmp_path_factory):
    """A run in four micro-batches, with tool output, that keeps TRL's table of completions in its folder."""
    micro_batches = {"per_device_train_batch_size": 2, "gradient_accumulation_steps": 4}
    folder = tmp_path_factory.mktemp("ran")
    run = small.trainer(folder, scripts=small.SAID_WITH_TOOLS, tools=True, log_completions=True, **micro_batches)
    run.train()
    return run


def test_metrics_are_those_of_the_whole_batch(ran):
    log = ran.state.log_history[0]
    rows = small.credit(small.SAID)  # right: 1 1 0 0 | 1 1 1 0; one report is missing
    present = [row for row, reply in zip(rows, small.SAID, strict=True) if reply.confidence is not None]
    want = {
        "credit/malformed": 1 / 8,
        "credit/brier/reward_absent": 1 / 8,
        "credit/correct/reward_absent": 0,
        "credit/brier/singletons": 1 / 8,  # the one wrong answer of the second prompt
        "credit/solution/mean_abs": (4 * 0.5 + 3 * 0.25 + 0.75) / 8,
        "credit/solution/zero_frac": 0,
        "credit/confidence/mean_abs": sum(abs(row[1]) for row in present) / 7,
        "credit/confidence/zero_frac": 1 / 7,
        "credit/stop/mean_abs": abs(rows[5][2]) / 8,
        "credit/no_signal": 0,
        "rewards/correct/mean": 5 / 8,
    }
    assert {name: log[name] for name in want} == pytest.approx(want)
    assert 0 < log["spanwise/seconds"] < 60


def table_of_completions(run):
    (file,) = Path(run.args.output_dir, "completions").glob("*.parquet")
    return pq.read_table(file).to_pylist()


def test_trls_table_of_completions_holds_the_credit(ran):
    """The sixth completion has no confidence: TRL's scalar praised it with +1.03."""
    table = table_of_completions(ran)
    assert [row["completion"] for row in table] == ran.last_rollouts.completions
    for row, (solution, confidence, stop), reply in zip(table, small.credit(small.SAID), small.SAID, strict=True):
        recorded = (row["credit/solution"], row["credit/confidence"], row["credit/stop"])
        assert recorded == pytest.approx((solution, None if reply.confidence is None else confidence, stop))
        assert row["advantage"] == pytest.approx(solution + confidence + stop)
        assert row["brier"] == pytest.approx(-1.0 if reply.confidence is None else -((reply.confidence - reply.right) ** 2))
    assert (table[5]["credit/confidence"], table[5]["advantage"] < 0) == (None, True)
    log = ran.state.log_history[0]
    assert log["rewards/brier/mean"] == pytest.approx(sum(row["brier"] for row in table) / 8)
    assert log["reward"] == pytest.approx(sum(row["correct"] + row["brier"] for row in table) / 8)


def test_a_completion_without_any_reward_is_no_noise(tmp_path, caplog, monkeypatch):
    """TRL prints the whole prompt and "All reward functions returned None" for it."""

    def sure(completions, **columns):
        return [float(text.count("a")) if "<confidence>" in text else None for text in completions]

    monkeypatch.setattr(logging.getLogger("trl"), "propagate", True)
    run = small.trainer(tmp_path, extra={"objectives": [Objective(sure, pays="confidence")]}, log_completions=True)
    with caplog.at_level(logging.WARNING), pytest.warns(UserWarning, match="leave out"):
        run.train()
    assert "returned None" not in caplog.text
    assert [row["sure"] for row in table_of_completions(run)] == [3, 2, 4, 2, 3, None, 2, 4]
    assert run.state.log_history[0]["rewards/sure/mean"] == pytest.approx(20 / 7)


@pytest.mark.parametrize(
    ("method", "title", "paper"),
    [("bae", "Blockwise Advantage Estimation", "2602.10231"), ("grpo", "DeepSeekMath", "2402.03300")],
)
def test_the_model_card_cites_the_method(tmp_path, method, title, paper):
    small.trainer(tmp_path, extra={"scheme": Scheme.preset(method, small.LAYOUT)}).create_model_card("tuned")
    card = (tmp_path / "README.md").read_text()
    cites = f"[{title}](https://huggingface.co/papers/{paper})"
    assert f"trained with spanwise's method '{method}', a method introduced in {cites}." in card
    assert ("DeepSeekMath" in card) == (method == "grpo")
    assert "shao2024" not in card


def test_rollouts_are_kept(ran):
    rollouts = ran.last_rollouts
    assert (rollouts.mode, rollouts.step, rollouts.method) == ("train", 0, "bae")
    assert rollouts.prompts == ["2+2="] * 4 + ["1+2="] * 4
    assert rollouts.batch.group_n.tolist() == [0] * 4 + [1] * 4
    assert rollouts.batch.columns == {"answer": ["4"] * 4 + ["3"] * 4}
    assert rollouts.completions[1] == "<answer>4</answer><confidence>0.6</confidence>"
    assert rollouts.reading.text[0]["confidence"]["confidence"] == "0.9"
    assert rollouts.reading.text[5]["confidence"] is None
    blocks = [said.blocks + [-1] * (15 - len(said.blocks)) for said in small.SAID_WITH_TOOLS]  # the longest has 15 tokens
    assert rollouts.spans.block_nt.tolist() == blocks
    for n, row in enumerate(small.token_advantages(small.SAID_WITH_TOOLS)):
        assert rollouts.advantages_nt[n, : len(row)].tolist() == pytest.approx(row, abs=1e-6)
    assert math.isnan(rollouts.reading.scores.reward_nm[5, 1])


def test_evaluation_groups_by_its_own_number_of_generations(tmp_path):
    shape = {"num_generations_eval": 2, "per_device_eval_batch_size": 8}
    run = small.trainer(tmp_path, extra={"eval_dataset": small.prompts(4)}, **shape)
    log, rollouts = run.evaluate(), run.last_rollouts
    # Answers 4 4 3 5 3 3 3 7 to 2+2= 2+2= 1+2= 1+2= 2+2= 2+2= 1+2= 1+2=: right 1 1 | 1 0 | 0 0 | 1 0.
    assert (rollouts.mode, rollouts.prompts) == ("eval", ["2+2=", "2+2=", "1+2=", "1+2="] * 2)
    assert rollouts.batch.group_n.tolist() == [0, 0, 1, 1, 2, 2, 3, 3]
    assert rollouts.credit.block_nk[:, 0].tolist() == [0, 0, 0.5, -0.5, 0, 0, 0.5, -0.5]
    assert log["eval_credit/solution/zero_frac"] == pytest.approx(0.5)
    assert not any(name.startswith("credit/") for name in log)
    assert run._canary_due


def asked(*prompts):
    return Dataset.from_dict({"prompt": prompts, "answer": ["4"] * len(prompts)})


@pytest.mark.parametrize(
    ("error", "extra"),
    [
        (DataError, {"train_dataset": small.prompts(1)}),  # and a generation batch takes two
        (RecipeError, {"objectives": [Objective(torch.nn.Linear(1, 1), pays=("solution",), name="judge")]}),
        (RecipeError, {"train_dataset": asked(*["2+2=<answer>"] * 2)}),  # and no layout expects it
        (RecipeError, {"layout": Layout(dict(small.LAYOUT.blocks), prefilled="answer")}),
    ],
)
def test_data_and_objectives_that_cannot_be_trained_on_are_refused(tmp_path, error, extra):
    with pytest.raises(error):
        small.trainer(tmp_path, extra=extra).train()


def test_versions_of_trl(tmp_path):
    plain, liger = (small.config(tmp_path, use_liger_kernel=x) for x in (False, True))
    check_use(liger, trl_version="1.14.0")
    for version in ("1.10.0", "1.14.2", "1.16.0", "1.17.0.dev0"):
        check_use(plain, trl_version=version)
    for args, version in ((plain, "1.9.2"), (plain, "1.15.0"), (liger, "1.13.0")):
        with pytest.raises(SpanwiseError, match=re.escape(f"trl {version}")):
            check_use(args, trl_version=version)


def test_white_space_after_a_prefilled_tag_and_a_prompt_that_only_mentions_one():
    for ending in ("<answer>", "<answer>\n", "<answer> "):
        check_prefilled("Say:" + ending, Layout({"all": ["answer"]}, prefilled="answer"))
    check_prefilled("Put it in <answer> and </answer>.", Layout({"all": ["answer"]}))


def test_a_rollout_function_may_return_the_answers_that_the_dataset_lacks(tmp_path):
    def rollout(batch, trainer):
        answers = [str(sum(map(int, prompt[:3].split("+")))) for prompt in batch]
        return {**small.scripted()(batch, trainer), "answer": answers}

    run = small.trainer(tmp_path, extra={"rollout_func": rollout, "train_dataset": small.prompts().remove_columns("answer")})
    run.train()
    assert run.last_rollouts.reading.scores.reward_nm[:, 0].tolist() == [said.right for said in small.SAID]


def test_a_prompt_of_a_later_batch_that_opens_a_tag_is_warned_of_once(tmp_path):
    run = small.trainer(tmp_path, max_steps=3, extra={"train_dataset": asked(*["2+2="] * 2, *["2+2=<answer>"] * 4)})
    with pytest.warns(UserWarning, match="A prompt of a later batch") as caught:
        run.train()
    (sentence,) = (str(warning.message) for warning in caught if "A prompt of a later batch" in str(warning.message))
    assert "<answer>" in sentence


def test_config_reads_yaml(tmp_path):
    from trl import TrlParser

    (tmp_path / "run.yaml").write_text(f"output_dir: {tmp_path}\nuse_cpu: true\nbf16: false\ncanary: false\n")
    words = ["--config", str(tmp_path / "run.yaml"), "--num_generations", "4", "--epsilon", "0.3"]
    (args,) = TrlParser((SpanGRPOConfig,)).parse_args_and_config(words)
    assert (args.canary, args.num_generations, args.epsilon) == (False, 4, 0.3)
    assert (args.loss_type, args.beta) == ("dr_grpo", 0.0)


def test_the_logged_reward_is_the_weighted_sum(tmp_path):
    """Weights .7 and 0 on means 5/8 and 36: TRL logged 36.6, but training used .4375."""
    large = Objective(lambda blocks: [36.0 for _ in blocks], pays="solution", weight=0.0, name="large")
    run = small.trainer(tmp_path, extra={"objectives": [Objective("correct", pays="solution", weight=0.7), large]})
    run.train()
    logged = run.state.log_history[0]
    assert logged["reward"] == pytest.approx(0.7 * 5 / 8)
    assert logged["reward_std"] < 1


def test_completions_sampled_beside_the_training_are_credited_and_forgotten(tmp_path):
    """The row that the caller gave stays, too, and the training still gives its warnings."""
    scripts = [small.cut(reply) for reply in small.SAID]

    def numbered(batch, trainer):
        return {**small.scripted(scripts)(batch, trainer), "number": list(range(len(batch)))}

    run = small.trainer(tmp_path, extra={"rollout_func": numbered}, mask_truncated_completions=True, max_steps=2)

    def remembered():
        state = (run.last_rollouts, run.last_metrics, run.step, run.zero_batches, run.model.training)
        return *state, copy.deepcopy(run._metrics), copy.deepcopy(run._logs)

    def sample_beside():
        row, before = dict(small.prompts()[0]), remembered()
        sample = run.sample_rollouts([row])
        assert (sample.mode, list(sample.prompts)) == ("eval", ["2+2="] * 4)
        assert sample.credit.block_nk[:, 0].tolist() == [0.5, 0.5, -0.5, -0.5]  # right minus the mean of the group
        assert sample.batch.columns["number"] == [0, 1, 2, 3]
        assert row == small.prompts()[0]
        assert remembered() == before

    sample_beside()
    with pytest.warns(UserWarning, match="were cut off at max_completion_length"):
        run.train()
    sample_beside()


def test_arguments_that_a_failed_trainer_got_keep_their_ratio_level(tmp_path):
    """In a notebook the second try gets the same object; at level "token" it would train another loss."""
    args = small.config(tmp_path, importance_sampling_level="sequence")
    with pytest.raises(ValueError, match="tool"):
        small.trainer(tmp_path, extra={"args": args, "tools": [len]})
    assert args.importance_sampling_level == "sequence"


def test_a_judge_and_its_cache_train_with_the_same_advantages(tmp_path):
    def answer(part, request, times):  # the stand-in's verdict on whether a completion is sure of itself
        return verdict("yes" if re.search(r">0\.[6-9]", part) else "no", f"I read {part}")

    options = {"model": "m", "cache": str(tmp_path / "judge.sqlite"), "criterion": "Is it sure?"}
    with Server(answer).serving() as server:
        judge = Objective("judge", pays="confidence", if_missing=-1.0, options={**options, "base_url": server.url})
        extra = {"objectives": [small.OBJECTIVES[0], judge]}
        first, second = (small.trainer(tmp_path / name, extra=extra) for name in "ab")
        first.train()
        requests = len(server.requests)
        second.train()
        assert len(server.requests) == requests
    assert first.last_rollouts.advantages_nt.any()
    assert torch.equal(first.last_rollouts.advantages_nt, second.last_rollouts.advantages_nt)
    logs = [run.state.log_history[0] for run in (first, second)]
    assert [(log["cost/judge/calls"], log["cost/judge/cached"]) for log in logs] == [(requests, 0), (0, requests)]
    reading = first.last_rollouts.reading
    parts = [block["confidence"] and block["confidence"][""].removesuffix("<eos>") for block in reading.text]
    assert score_columns(reading.scores)["note/judge"] == [part and f"I read {part}" for part in parts]
