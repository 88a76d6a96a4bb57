"""Whole runs of `python -m verl.trainer.main_ppo` on CPU with a recipe: the advantages in verl's loss are those of the files.

All but the plug-in of `cpu/verl_on_cpu.py` is verl's own, and spanwise is the installed wheel: nothing here imports the
adapter, its entry point registers it. What each token was trained with is recorded where the loss takes it and compared with
credit computed from the rollouts that verl dumped.
"""

from __future__ import annotations

import pytest
import torch
from safetensors.torch import load_file
from verl_runs import GROUP, KEPT, LONGEST, PROMPTS, RUNS, STEPS, read_again, whole

import spanwise
from spanwise import pipeline
from spanwise.layout import Layout
from spanwise.objective import Objective
from spanwise.rollouts import read_rollouts
from spanwise.scheme import Scheme

pytestmark = pytest.mark.timeout(900)

#: The modes whose rollouts come from weights one step old; their loss sums over tokens.
LATE = ("colocate_async", "separate_async")
#: The same rule, written out without the recipe.
SCHEME = Scheme(
    "bae_paper",
    Layout({"solution": ["reasoning", "answer"], "confidence": ["analysis", "confidence"]}),
    (
        Objective("correct", pays=("solution",), baseline="group", if_missing=0.0),
        Objective("brier", pays=("confidence",), given="correct", baseline="outcome", if_missing=-1.0),
    ),
)


@pytest.fixture(scope="module", params=list(RUNS))
def finished(request, whole_run):
    return whole_run(request.param)


def test_what_runs_is_the_installed_wheel():
    assert "site-packages" in spanwise.__file__, "not an editable install; run `make test-verl`"


def test_every_token_was_trained_with_what_the_dumped_rollouts_say(finished):
    seen_blocks = torch.zeros(2)
    for step in range(1, STEPS + 1):
        rows = finished.trained(step)
        batch, reading = read_again(finished, rows, step, SCHEME)
        credit = pipeline.credit_batch(reading, batch, SCHEME)
        expected_nt = pipeline.advantages(credit, reading.spans, SCHEME)
        for row, expected_t in zip(rows, expected_nt, strict=True):
            undone = 1 if finished.name in LATE else len(row["ids"])  # of a loss that averages over its tokens
            expected = expected_t[: len(row["ids"])] * undone
            torch.testing.assert_close(torch.tensor(row["advantages"]), expected, atol=1e-6, rtol=1e-6)

        logged, metrics = finished.metrics[step - 1], pipeline.metrics(credit, reading, SCHEME)
        assert {name: logged[name] for name in metrics} == pytest.approx(metrics, abs=1e-9)
        seen_blocks += (credit.block_nk.abs() > 1e-6).float().sum(dim=0)
    assert (seen_blocks > 0).all(), "both blocks were paid at least once, or this test has compared zeros"


def test_the_weights_moved_and_the_next_rollouts_came_from_them(finished):
    start = load_file(finished.folder / "model" / "model.safetensors")
    end = load_file(finished.folder / f"checkpoints/global_step_{STEPS}/actor/huggingface/model.safetensors")
    moved = [name for name, weight in start.items() if not torch.equal(weight, end[name].to(weight.dtype))]
    assert set(moved) == set(start)
    assert len(finished.metrics) == STEPS
    # Sampled with other weights than those that are trained, probabilities differ by far more than rounding.
    late = [line.get("training/off_policy/trajectory_staleness/max", 0) for line in finished.metrics]
    # How many steps late, verl's own scheduling decides: on a busy machine a trajectory may wait for two, or for none.
    assert (late[0] == 0 and any(late)) if finished.name in LATE else late == [0] * STEPS
    gaps = [line["training/rollout_probs_diff_max"] for line in finished.metrics]
    assert all((gap > 1e-3) if steps else (gap < 1e-4) for gap, steps in zip(gaps, late, strict=True))


def test_the_console_and_the_dump_carry_the_blocks(finished):
    for name in ("credit/solution/mean_abs", "credit/confidence/mean_abs", "credit/malformed"):
        assert f"{name}:" in finished.log
    groups = read_rollouts(finished.folder / "rollouts", tokenizer=finished.folder / "model").group_n
    assert groups.bincount().tolist() == [GROUP] * (STEPS * PROMPTS)
    weighted = [line["score"] for step in range(1, STEPS + 1) for line in finished.dumped(step)]
    assert min(weighted) < 0 < max(weighted)  # correctness minus a Brier score, not the answer alone


def test_a_run_is_paid_by_the_reward_manager_and_the_function_of_its_configuration(tmp_path):
    """Manager `dapo`, whose penalty on length is worked out here; a second number of the function pays the other block."""
    (tmp_path / "mine.py").write_text(
        "def compute_score(data_source, solution_str, ground_truth, extra_info=None):\n"
        "    if int(ground_truth) % 2:\n"  # nothing but the penalty differs in these groups
        '        return {"score": 0.0, "nines": 0.0}\n'
        '    return {"score": float("9" in solution_str), "nines": float(solution_str.count("9"))}\n'
    )
    recipe = (
        "method: bae_paper\nlayout: {solution: [reasoning, answer], confidence: [analysis, confidence]}\nobjectives:\n"
        "  - {reward: environment, pays: [solution, confidence], baseline: group}\n"
        "  - {reward: environment, name: nines, pays: [confidence], baseline: group, options: {column: nines}}\n"
    )
    finished = whole(
        "dapo", tmp_path, recipe=recipe, steps=1, **KEPT, reward__reward_manager__name="dapo",
        reward__custom_reward_function__path=tmp_path / "mine.py", _reward__reward_kwargs__max_resp_len=LONGEST,
        _reward__reward_kwargs__overlong_buffer_cfg="{enable: True, len: 4, penalty_factor: 1.0, log: False}",
        algorithm__filter_groups__enable=True, algorithm__filter_groups__metric="acc",
    )  # fmt: skip
    table = read_rollouts(tmp_path / "run", tokenizer=tmp_path / "model")
    rewards = {name: reward.value_n.tolist() for name, reward in table.rewards.items()}
    penalty_n = [min(-(length - (LONGEST - 4)) / 4, 0.0) for length in table.tokens.lengths.tolist()]
    assert min(penalty_n) < 0
    expected = [float(nines > 0) + penalty for nines, penalty in zip(rewards["nines"], penalty_n, strict=True)]
    assert rewards["environment"] == pytest.approx(expected)
    assert {0.0, 1.0} <= {*rewards["nines"]}
    # verl sampled other prompts for the groups in which neither number differs.
    pairs_by_group: dict[object, set[tuple[float, float]]] = {}
    for group, environment, nines in zip(table.group_n.tolist(), rewards["environment"], rewards["nines"], strict=True):
        pairs_by_group.setdefault(group, set()).add((environment, nines))
    assert len(pairs_by_group) == PROMPTS
    assert all(len(pairs) > 1 for pairs in pairs_by_group.values())
    assert "filter_groups/evicted_samples" in finished.log
