"""Methods beside a recipe of the user's own: its rewards, its blocks; a recipe that cannot be built is an error."""

import json

import pytest

from helpers import assert_close, double
from judge_server import Server, verdict
from rollout_files import LAYOUT, WELL_FORMED, own_run, verl_file, write_lines, write_own
from spanwise.commands.credit.credit import credit_rollouts
from spanwise.errors import RecipeError

BLOCKS = {"plan": ["plan"], "code": ["code"], "confidence": ["confidence"]}
OBJECTIVES = [
    {"reward": "correct", "name": "runs", "pays": ["code"], "baseline": "group", "if_missing": 0.0},
    {"reward": "correct", "name": "plans", "pays": ["plan"], "baseline": "group", "weight": 0.5},
    {"reward": "brier", "pays": ["confidence"], "given": "runs", "baseline": "none", "if_missing": -1.0},
]


def spoken(code, q):
    return f"<plan>add</plan><code>{code}</code><confidence>{q}</confidence>"


@pytest.fixture
def file(tmp_path):
    outputs = [spoken("a", 0.9), spoken("b", 0.7), spoken("c", 0.8), spoken("d", 0.2)]
    return verl_file(tmp_path / "1.jsonl", outputs, runs=[1, 1, 0, 0], plans=[1, 0, 0, 1], score=[3, 2, 2, 1])


def recipe_in(folder, **fields):
    path = folder / "recipe.yaml"
    path.write_text(json.dumps({"layout": BLOCKS, "objectives": OBJECTIVES, **fields}))
    return path


def test_methods_by_block_pay_what_the_recipe_pays_and_others_compare_its_rewards(file, tmp_path):
    methods = ["bae", "recipe", "bae:group", "dr_grpo", "rlcr"]
    result = credit_rollouts(file, recipe=recipe_in(tmp_path), methods=methods)
    bae, by_recipe, group, *sums = (arm.credit.block_nk for arm in result.applied)
    # By hand: plans 1 0 0 1 have mean .5 and weight .5; runs 1 1 0 0 mean .5. Brier -.01 -.09 -.64 -.04, means by runs -.05, -.34.
    plan, code = [0.25, -0.25, -0.25, 0.25], [0.5, 0.5, -0.5, -0.5]
    brier, total = double([-0.01, -0.09, -0.64, -0.04]), double([1.49, 0.91, -0.64, 0.46])  # runs + plans / 2 + brier
    assert_close(bae.T, [plan, code, [0.04, -0.04, -0.3, 0.3]])
    assert_close(by_recipe.T, [plan, code, brier.tolist()])
    assert_close(group[:, 2], brier - brier.mean())
    for summed in sums:
        assert_close(summed, (total - total.mean())[:, None].expand(4, 3))
    with pytest.raises(RecipeError, match="so the baseline 'blended'"):  # no objective can use it
        credit_rollouts(file, recipe=recipe_in(tmp_path, objectives=OBJECTIVES[:2]), methods=["bae:blended"])


def test_the_longest_completion_of_a_file_is_its_own_or_the_recipes(tmp_path):
    """`dr_grpo` divides by the longest length that there may be; that of the embedded task is none of a file's business."""
    rows = [{"prompt": "p", "completion": " ".join("w" * length), "acc": acc} for length, acc in ((200, 1), (100, 0))]
    file = write_lines(tmp_path / "rows.jsonl", rows)
    for more, longest in (({}, 200), ({"max_completion_length": 400}, 400)):
        overrides = {"layout": {"all": []}, "objectives": [{"reward": "acc", "pays": ["all"]}], **more}
        result = credit_rollouts(file, methods=["dr_grpo"], overrides=overrides)
        assert result.applied[0].advantages(result.table, 0, 1).tolist() == pytest.approx([0.5 / longest] * 200)


def test_a_preset_that_is_written_out_is_the_preset(tmp_path):
    """A run's recipe has the objectives of its preset in it; beside `rlcr` stands the same `bae` as without them."""
    file = verl_file(tmp_path / "1.jsonl", WELL_FORMED, gts=["4"] * 4)
    blocks = ["solution", "confidence"]
    filled = [
        {"reward": "correct", "pays": blocks, "if_missing": 0.0},
        {"reward": "log_score", "pays": blocks[::-1], "given": "correct", "if_missing": -4.605170185988091},
        {"reward": "format", "pays": blocks, "weight": 0.25, "if_missing": 0.0, "options": {"empty": True}},
    ]
    for name in ("bae", "grpo", "rlcr", "bae:blended"):
        written_out, named = (
            credit_rollouts(file, methods=[name], overrides={"layout": LAYOUT, "method": "rlcr", **fields})
            for fields in ({"objectives": filled}, {"calibration": "log_score"})
        )
        assert written_out.arms.schemes == named.arms.schemes


BROKEN = [*OBJECTIVES[1:2], {"reward": "train_of_nobody:code_correct", "pays": ["code"]}]


def test_a_recipe_that_cannot_be_built_is_an_error_though_another_method_is_asked_for(file, tmp_path):
    named = {"recipe": recipe_in(tmp_path, objectives=BROKEN)}
    for options in (named, {"overrides": {"layout": BLOCKS, "objectives": BROKEN}}):
        with pytest.raises(RecipeError, match="train_of_nobody"):
            credit_rollouts(file, **options, methods=["grpo"])


def test_a_run_of_ours_whose_reward_is_elsewhere_keeps_the_usual_methods(tmp_path):
    run = own_run(tmp_path, rewards=[1.0, 0.0, 1.0, 1.0], status=["ok"] * 4)
    objectives = [{**BROKEN[1], "pays": ["solution"]}]
    (run / "recipe.yaml").write_text(json.dumps({"layout": LAYOUT, "prompts": 2, "group_size": 2, "objectives": objectives}))
    result = credit_rollouts(run)
    assert [arm.name for arm in result.applied] == ["grpo", "rlcr", "bae"]
    assert "the recipe's own method is left out: Objective 1 needs the function" in result.note


def test_a_judge_sees_the_task(tmp_path):
    rows = [{"prompt": "2+2=", "completion": text} for text in ("4", "5")]
    with Server(lambda *_: verdict("yes")).serving() as server:
        objectives = [{"reward": "judge", "pays": ["all"], "options": {"base_url": server.url, "model": "judge"}}]
        overrides = {"layout": {"all": []}, "objectives": objectives}
        credit_rollouts(write_lines(tmp_path / "rows.jsonl", rows), methods=["recipe"], overrides=overrides)
    assert ["The task:\n2+2=" in request["messages"][-1]["content"] for request in server.requests] == [True, True]


def test_a_rule_that_no_row_of_the_file_fits_is_refused_before_a_judge_is_asked(file, tmp_path):
    with Server(lambda *_: verdict("yes")).serving() as server:
        judge = {"reward": "judge", "pays": ["code"], "scope": "turn", "options": {"base_url": server.url, "model": "m"}}
        with pytest.raises(RecipeError, match="are not split into turns"):
            credit_rollouts(file, recipe=recipe_in(tmp_path, objectives=[judge]))
    assert not server.requests


DIGIT = """
def text(prompts, completions, **_):
    return [float(completion) + len(prompt) for prompt, completion in zip(prompts, completions)]
def chat(prompts, completions, **columns):
    return text([question["content"] for question, in prompts], [reply["content"] for reply, in completions])
"""


@pytest.mark.parametrize("kind", ["own", "chat", "text"])
def test_a_reward_function_sees_no_end_token_and_messages_where_prompts_were_conversations(tmp_path, kind):
    chat, end = [{"role": "user", "content": "2+2="}], "<|im_end|>" if kind == "text" else ""
    if kind == "own":
        file = write_own(tmp_path / "rows.parquet", [[1], [1]], prompt=[json.dumps(chat)] * 2, text=["4", "5"])
    else:
        rows = [{"prompt": chat if kind == "chat" else "2+2=", "completion": digit + end} for digit in "45"]
        file = write_lines(tmp_path / "rows.jsonl", rows)
    (tmp_path / "digit.py").write_text(DIGIT)
    function = "text" if kind == "text" else "chat"
    objectives = [{"reward": f"{tmp_path / 'digit.py'}:{function}", "name": "digit", "pays": ["all"]}]
    result = credit_rollouts(file, methods=["bae"], overrides={"layout": {"all": []}, "objectives": objectives})
    assert result.scores.reward_nm[:, result.scores.names.index("digit")].tolist() == [4.0 + 4, 5.0 + 4]


@pytest.mark.parametrize("mark", ["json:items[0].price", "markdown:Step [1]"])
def test_a_part_that_no_completion_has_is_refused_whatever_finds_it_and_wherever_it_stands(mark, file):
    layout = {"plan": ["plan", "why"], "end": [mark]}  # `why` is in none either, but nothing reads it
    objectives = [{"reward": "correct", "name": "runs", "pays": ["end"], "baseline": "group", "if_missing": 0.0}]
    with pytest.raises(RecipeError, match="is in 0 of 4 completions"):
        credit_rollouts(file, methods=["recipe"], overrides={"layout": layout, "objectives": objectives})
