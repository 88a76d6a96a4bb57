"""Two gloo processes that share groups train as one process does."""

import json

import pyarrow.parquet as pq
import pytest
import torch

import trl_small as small
from critic_small import equal, state
from launch_two_ranks import ASKED, CASES, CRITIC, CRITICS, DPPO, GROUP, PROMPTS, STEPS, launched, train
from trl_critic_small import Watched, critic_lines, with_critic

pytestmark = [pytest.mark.long, pytest.mark.timeout(1000)]
BATCH = GROUP * PROMPTS
#: The weights are float64; the advantages and the norms inside the model are float32.
ROUNDING = 1e-7


@pytest.fixture(scope="module")
def two_ranks(tmp_path_factory):
    return launched(tmp_path_factory.mktemp("ranks"))


def test_every_rank_samples_as_much_as_the_neediest(two_ranks, tmp_path):
    two = torch.load(two_ranks / "sampling.pt")["useful"]
    run = small.trainer(tmp_path, extra={"train_dataset": ASKED})
    assert small.largest_difference(two["gradient"], small.step(run)) < small.EXACT
    assert (two["log"]["sampling/groups"], two["log"]["sampling/useless"]) == (2.0, 0.0)


def test_shares_that_two_processes_log_are_of_the_whole_batch(two_ranks, tmp_path):
    two = torch.load(two_ranks / "sampling.pt")
    assert two["useless"]["log"]["sampling/useless"] == 0.5
    run = small.trainer(tmp_path, **DPPO)
    run.train()
    assert run.state.log_history[1]["dppo/dropped"] > 0
    for line, expected in zip(two["dppo"][:2], run.state.log_history[:2], strict=True):
        for name in ("dppo/dropped", "policy_loss"):
            assert line[name] == pytest.approx(expected[name], abs=1e-6)


def test_two_processes_write_one_folder(two_ranks):
    folder = two_ranks / "run"
    files = [folder / "rollouts" / f"step_00000{step}.parquet" for step in (1, 2)]
    assert sorted((folder / "rollouts").iterdir()) == files
    lines = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    assert [line["step"] for line in lines] == [1, 2]
    assert lines[0]["rewards/correct/mean"] == pytest.approx(sum(completion.right for completion in small.SAID) / 8)
    rows = pq.read_table(files[0]).to_pylist()
    assert [row["group"] for row in rows] == [0, 0, 0, 0, 1, 1, 1, 1]
    by_hand = [solution for solution, _, _ in small.credit(small.SAID)]
    assert [row["credit/bae/solution"] for row in rows] == pytest.approx(by_hand, abs=1e-6)
    assert (folder / "report.html").is_file()


def joined(folder, name):
    """The completions of both processes in one list: step by step, those of the first process first; and both results."""
    ranks, half = [torch.load(folder / f"steps {name}.{rank}.pt") for rank in (0, 1)], BATCH // 2
    starts = range(0, STEPS * half, half)
    return [row for start in starts for rank in ranks for row in rank["seen"][start : start + half]], ranks


@pytest.mark.parametrize("name", CASES)
def test_three_steps_of_two_processes_are_those_of_one(two_ranks, tmp_path, name):
    alone, _ = train(tmp_path, name, rows=BATCH // 2)
    seen, (first, second) = joined(two_ranks, name)
    assert seen == alone["seen"]  # sampled from the same weights, and credited
    assert small.largest_difference(first["weights"], second["weights"]) == 0
    assert small.largest_difference(first["weights"], alone["weights"]) < ROUNDING
    assert len(alone["seen"]) == STEPS * BATCH
    assert len({len(ids) for ids, _ in alone["seen"]}) > 3  # ragged
    moved = [any(float(a) != 0 for a in advantages) for _, advantages in alone["seen"]]
    assert all(any(moved[place : place + GROUP]) for place in (GROUP, BATCH + GROUP, 2 * BATCH + GROUP))  # the split groups
    assert small.largest_difference(alone["weights"], alone["before"]) > 1e-3
    for two, expected in zip(first["logged"][:STEPS], alone["logged"][:STEPS], strict=True):
        assert two == pytest.approx(expected)
        assert "credit/malformed" in two


def test_the_processes_ask_each_other_once_per_step(two_ranks):
    _, ranks = joined(two_ranks, "dr_grpo")
    assert [rank["gathers"] for rank in ranks] == [STEPS, STEPS]


@pytest.mark.parametrize("name", CRITICS)
def test_two_processes_fit_the_critic_of_one(two_ranks, tmp_path, name):
    ranks = [{**torch.load(two_ranks / f"critic {name}.{r}.pt"), "rows": slice(4 * r, 4 * r + 4)} for r in (0, 1)]
    assert equal(ranks[0]["critic"], ranks[1]["critic"])
    assert equal(ranks[0]["policy"], ranks[1]["policy"])

    run = with_critic(tmp_path, **CRITIC, **CRITICS[name])
    start = state(run.critic.model)
    watched = Watched(run)
    run.train()
    # Sums in another order; single weights part by 3e-5 on some processors.
    torch.testing.assert_close(ranks[0]["critic"], state(run.critic.model), atol=1e-4, rtol=0)
    torch.testing.assert_close(ranks[0]["policy"], state(run.model), atol=1e-6, rtol=0)
    assert not equal(start, state(run.critic.model))
    for batch, (result, (_, streams)) in enumerate(zip(watched.estimates, watched.inputs, strict=True)):
        for rank in ranks:
            mine = rank["values"][batch]
            expected = result.value_nts[rank["rows"], : mine.shape[1]]
            # TRL pads each rank to its own longest completion; nothing behind an end belongs to a token.
            mask = streams.mask_snt[:, rank["rows"], : mine.shape[1]].permute(1, 2, 0)
            torch.testing.assert_close(mine[mask], expected[mask], atol=2e-5, rtol=0)
    for rank in ranks:
        mine, expected = rank["advantages_nt"], run.last_rollouts.advantages_nt[rank["rows"]]
        torch.testing.assert_close(mine, expected[:, : mine.shape[1]], atol=2e-5, rtol=0)
        assert mine.any()
    assert len(ranks[0]["lines"]) == 3
    for two, expected in zip(ranks[0]["lines"], critic_lines(run), strict=True):
        assert two == pytest.approx(expected, abs=2e-3, rel=2e-3)  # as far as log lines are rounded


def test_a_critic_that_diverges_in_one_process_stops_both(two_ranks):
    assert [torch.load(two_ranks / f"broken.{rank}.pt") for rank in (0, 1)] == [1, 1]
