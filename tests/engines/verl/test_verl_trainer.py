"""V1's `_compute_advantage` on a real TransferQueue that verl's own agent loop worker filled."""

import warnings
from types import SimpleNamespace

import pytest
import torch
import transfer_queue as tq
from queue_small import advantages_of, fetch, filled, made, put, trainer_of
from verl.experimental.agent_loop.agent_loop import AgentLoopWorker
from verl.trainer.ppo.padding_utils import upsample_batch_to_divisible_size
from verl.trainer.ppo.v1 import get_trainer_cls
from verl.trainer.ppo.v1.agent_loop_tq import AgentLoopWorkerTQ
from verl.trainer.ppo.v1.trainer_sync import PPOTrainerSync
from verl.trainer.ppo.v1.utils import MetricsAggregator
from verl.utils.tensordict_utils import list_of_dict_to_tensordict
from verl_small import TEXT, WHOLE, config_of

import spanwise.engines.verl.trainer as trainer_module
from spanwise.errors import AlignmentError, RecipeError

pytestmark = pytest.mark.usefixtures("queue")
RIGHT, WRONG = ["<answer>4</answer>"], ["<answer>5</answer>"]
PROMPTS = [
    [[TEXT.format(4, 0.9)], [TEXT.format(5, 0.2)], ["<answer>4</answer>"], [TEXT.format(4, 0.3)]],
    [[TEXT.format(5, "high")], [TEXT.format(4, 0.7)]],
]


def test_neither_padding_nor_shares_change_advantages_and_metrics(tmp_path, monkeypatch):
    """verl tops batches up with copies of the first row whose mask is 0. Shares mix prompts, and verl pads each for itself."""
    (trainer, manager), plain, whole, by_share = made(tmp_path), {}, {}, {}
    batch = filled(manager, PROMPTS)
    trainer._compute_advantage(batch, plain)
    unpadded = advantages_of(batch)
    assert plain["credit/malformed"] == pytest.approx(1 / 6)
    batch = upsample_batch_to_divisible_size(batch, 4, manager.tokenizer.eos_token_id)
    logps = [torch.full((len(row),), -0.5 - n / 10) for n, row in enumerate(fetch(batch, "response_mask")[0])]
    put(batch, old_log_probs=logps, rollout_log_probs=[row + 0.25 for row in logps])  # what verl measures between them
    together = trainer._compute_advantage(batch, whole)
    before, calls = advantages_of(batch), []
    for row, expected in zip(before[:6], unpadded, strict=True):
        assert torch.allclose(row, expected * 8 / 6)  # verl divides by the padded number of rows
    assert [float(row.abs().sum()) for row in before[6:]] == [0.0, 0.0]
    assert plain.items() <= whole.items()
    monkeypatch.setattr(trainer_module, "CHUNK_TOKENS", 100)
    get = tq.kv_batch_get
    monkeypatch.setattr(tq, "kv_batch_get", lambda **query: (calls.append(query["keys"]), get(**query))[1])
    several = trainer._compute_advantage(batch, by_share)
    assert max(map(len, calls[1:])) < len(batch) == sum(map(len, calls[1:]))  # the first call fetches the readings
    assert all(torch.equal(row, expected) for row, expected in zip(advantages_of(batch), before, strict=True))
    assert (several.keys, several.tags, several.fields) == (together.keys, together.tags, together.fields)
    assert several.extra_info == together.extra_info == {}  # verl adds to it, so None would end the run
    assert by_share.keys() == whole.keys()
    for name in (name for name in whole if name.startswith("credit/")):
        assert by_share[name] == pytest.approx(whole[name], nan_ok=True), name
    assert by_share["rollout_corr/kl"] == pytest.approx(whole["rollout_corr/kl"]) == pytest.approx(0.25)


def test_a_rollout_of_several_outputs_has_one_vote(tmp_path):
    """Twelve rows of one rollout have one vote: the other rollouts get the same as if it were one row."""
    trainer, manager = made(tmp_path, recipe=WHOLE)
    many, single = (filled(manager, [[["So"] * more + RIGHT, RIGHT, WRONG]]) for more in (11, 0))
    for batch in (many, single):
        trainer._compute_advantage(batch, {})
    factor = 14 / 3  # rows per rollout: verl divides by rows
    advantages, expected = advantages_of(many), advantages_of(single)
    for row, want in zip(advantages[-2:], expected[-2:], strict=True):
        assert torch.allclose(row, want * factor)
    turns = advantages[:12]
    assert all(float(row.abs().min()) > 0 for row in turns)  # every turn's own tokens are paid
    assert float(sum(row.sum() for row in turns)) == pytest.approx(float(expected[0].sum()) * factor, rel=1e-5)


def test_an_agent_loop_that_scores_itself_is_refused(tmp_path):
    trainer, manager = made(tmp_path)
    batch = filled(manager, [[RIGHT]])
    tq.kv_batch_put(keys=batch.keys, partition_id="train", fields=list_of_dict_to_tensordict([{"extra_fields": {}}]))
    with pytest.raises(RecipeError, match="The agent loop scored row 0 itself"):
        trainer._compute_advantage(batch, {})


def test_a_reader_that_did_not_know_the_mask_is_caught(tmp_path, monkeypatch):
    """Without the mask tool output would count as the model's, so training is refused."""
    actor = AgentLoopWorkerTQ.__ray_metadata__.modified_class
    monkeypatch.setattr(actor, "_compute_score", AgentLoopWorker._compute_score.__wrapped__)
    trainer, manager = made(tmp_path, recipe=WHOLE)
    batch = filled(manager, [[(["So <answer>4</answer>"], [[0] * 2 + [1] * 5])], [RIGHT]])
    with pytest.raises(AlignmentError, match=r"Row 0: .* 5 tokens.* 7"):
        trainer._compute_advantage(batch, {})


def test_verls_own_estimators_run_as_before(tmp_path):
    """A run that does not name spanwise is trained by verl alone."""
    trainer = trainer_of(config_of(tmp_path, name="rloo"))
    assert type(trainer) is PPOTrainerSync
    _, manager = made(tmp_path)
    batch = filled(manager, [[RIGHT, WRONG]])
    trainer._compute_advantage(batch, {})
    # correct + brier if the confidence is left out: 1 - 1 and 0 - 1
    assert [row.unique().tolist() for row in advantages_of(batch)] == [[1.0], [-1.0]]


@pytest.mark.parametrize("mode", ["sync", "colocate_async", "separate_async"])
def test_every_mode_is_made_ours_by_the_name_of_the_estimator(tmp_path, mode):
    rollout = "actor_rollout_ref.rollout."
    apart = [f"{rollout}nnodes=1", f"{rollout}n_gpus_per_node=1", f"{rollout}checkpoint_engine.backend=nccl"]
    more = [*apart, "data.train_batch_size=8"] if mode == "separate_async" else []
    for name in (mode, f"spanwise_{mode}"):
        config = config_of(tmp_path, f"trainer.v1.trainer_mode={name}", *more)
        trainer = trainer_of(config, name)
        assert trainer.spanwise.scheme.method == "bae"
        assert trainer.trainer_mode == mode  # verl reads it, and samples asynchronously under any other name
        assert type(trainer) is get_trainer_cls(mode)
        assert config.reward.reward_manager.name == "SpanRewardManager"


def test_another_estimator_is_refused_under_our_mode_and_with_a_recipe(tmp_path):
    named = config_of(tmp_path, "trainer.v1.trainer_mode=spanwise_sync", name="grpo")
    with pytest.raises(RecipeError, match="trainer_mode=sync"):
        trainer_of(named, "spanwise_sync")
    with pytest.raises(RecipeError, match="'grpo'"):
        trainer_of(config_of(tmp_path, f"+algorithm.spanwise.recipe={tmp_path / 'recipe.yaml'}", name="grpo"), "sync")


def test_rollouts_that_verl_went_on_without_are_counted(tmp_path):
    """verl logs the error of a reward or an agent loop in a worker, and trains on the others: here 2 prompts x 4."""
    group = [RIGHT, WRONG, WRONG, ["So", *WRONG]]
    for prompts, expected in (([group, group], []), ([group, group[1:]], ["1 of 8"]), ([group], ["4 of 8"])):
        trainer, manager = made(tmp_path, recipe=WHOLE)
        batch = filled(manager, prompts)
        with warnings.catch_warnings(record=True, action="always") as caught:
            trainer._compute_advantage(batch, {})
            trainer._compute_advantage(batch, {})  # said once
        said = [str(warning.message) for warning in caught if "Error in _run_prompt" in str(warning.message)]
        assert [sentence.split(" completions")[0].split("lacks ")[1] for sentence in said] == expected


def test_prompts_that_verl_replaced_are_counted(tmp_path):
    """Some are replaced before the step's first batch is sampled, so that no batch's own metrics count them."""
    trainer, manager = made(tmp_path, recipe=WHOLE)
    trainer.resource_pool_manager = SimpleNamespace(get_n_gpus=lambda: 1)
    batch = filled(manager, [[RIGHT, WRONG] * 2] * 2)
    trainer._compute_advantage(batch, {})

    def log():
        metrics = {"training/rollout_failure/evicted_samples": 3}
        trainer._compute_metrics(batch, metrics, timing_raw={"step": 1.0}, global_steps=1, epoch=0)

    with pytest.warns(UserWarning, match="verl replaced 3 prompts"):
        log()
    log()  # said once


def test_verl_joins_metrics_of_blocks_by_their_mean_whatever_they_are_called():
    """verl takes sums, minima and maxima of names that hold these words: of `summary`, `terminal` and `maximal`, too."""
    joined, blocks = MetricsAggregator(), ("summary", "terminal", "maximal", "answer")
    for value, count in ((1.0, 1), (3.0, 3)):
        joined.add_step_metrics({f"credit/{block}/mean_abs": value for block in blocks} | {"loss/sum": value}, count)
    expected = {f"credit/{block}/mean_abs": 2.5 for block in blocks}  # (1 x 1 + 3 x 3) / 4 rows
    assert joined.get_aggregated_metrics() == expected | {"loss/sum": 4.0}


def test_what_the_owner_must_be_told_is_said_once(tmp_path, capsys):
    trainer, manager = made(tmp_path)
    batch = filled(manager, [[["So"], ["So"]]])
    with pytest.warns(UserWarning, match=r"Objective 'brier' has no reward for any of 2 completions"):
        trainer._compute_advantage(batch, {})
    assert "[spanwise] Objective 'brier'" in capsys.readouterr().err
    trainer._compute_advantage(batch, {})  # warnings are errors here
    assert "[spanwise]" not in capsys.readouterr().err
