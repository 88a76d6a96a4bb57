"""The reward manager, loaded and called as verl's reward workers do."""

import asyncio
import math
import sys
import time

import numpy as np
import pytest
from aiohttp import web
from verl.trainer.ppo.metric_utils import process_validation_metrics
from verl_small import RECIPE, TEXT, config_of, manager_of, outputs_of, scored, scoring

from judge_server import Server
from spanwise import DataError, Status
from spanwise.engines.verl import carry
from spanwise.engines.verl.reward import SpanRewardManager as RewardManager
from spanwise.engines.verl.settings import prepare


@pytest.fixture(scope="module")
def manager(tmp_path_factory):
    return prepared(tmp_path_factory.mktemp("verl"))


def prepared(*where, **options):
    config = config_of(*where, **options)
    prepare(config)
    return manager_of(config)


def read_alone(manager, text, **row):
    return scored(manager, outputs_of(manager.tokenizer, [text]), **row)[0]


OF_A_FILE = "layout: {{a: [answer]}}\nobjectives: [{{reward: '{}/mine.py:{}', pays: a}}]\n"
BY_TURN = "layout: {a: [answer]}\nobjectives: [{reward: correct, pays: [a], scope: turn}]\n"
RIGHT, WRONG, TOOL = "<answer>4</answer>", "<answer>5</answer>", "tool "


def filtered_by(metric):
    return "algorithm.filter_groups.enable=True", f"algorithm.filter_groups.metric={metric}"


def with_function(folder, body, **options):
    (folder / "mine.py").write_text(f"def score(data_source, solution_str, ground_truth, extra_info):\n    return {body}\n")
    function = "reward.custom_reward_function."
    return prepared(folder, f"{function}path={folder / 'mine.py'}", f"{function}name=score", **options)


def info_of(output):
    return output.extra_fields["reward_extra_info"]


def test_a_completion_is_scored(manager):
    output = read_alone(manager, TEXT.format(4, 0.9))
    info = info_of(output)
    assert info["correct"] == 1.0
    assert info["brier"] == pytest.approx(-0.01, rel=1e-12)  # in float32 it is -0.009999999776
    assert output.reward_score == pytest.approx(0.99)
    assert set(output.extra_fields) == {"reward_extra_info"}  # the mask for the reward worker is gone again
    assert carry.unpack([info[carry.KEY]], manager.scheme).masked_n.tolist() == [True]
    for text in (RIGHT, TEXT.format(4, "high")):  # absent, unreadable: the log shows the stand-in
        assert info_of(read_alone(manager, text))["brier"] == -1.0


def test_two_rollouts_share_a_mark_only_if_no_reward_differs(tmp_path, manager):
    assert "any_reward" not in info_of(read_alone(manager, TEXT.format(4, 0.9)))
    marking = prepared(tmp_path, *filtered_by("any_reward"))
    pairs = (4, 0.9), (4, 0.9), (4, 0.8), (5, 0.9), (4, "high")
    texts = [TEXT.format(*pair) + " " * (n == 1) for n, pair in enumerate(pairs)]
    infos = [info_of(read_alone(marking, text)) for text in texts]
    marks = [float(info["any_reward"]) for info in infos]  # as verl's filter reads it
    assert marks[0] == marks[1]
    assert len(set(marks)) == 4
    columns = {name: [info[name] for info in infos] for name in ("correct", "any_reward")}
    assert [*process_validation_metrics(["small"] * 5, ["u"] * 5, columns)["small"]] == ["correct"]  # a mark is no result


def read_turns(manager, *turns):
    """What verl is told of a conversation, with tool output between its turns."""
    ids, mask = [], []
    for text in [part for turn in turns for part in (TOOL, turn)][1:]:
        piece = manager.tokenizer(text)["input_ids"]
        ids, mask = ids + piece, mask + [int(text != TOOL)] * len(piece)
    states = [{"anchor": f"after {n} turns"} for n in range(len(turns))]
    return scored(manager, outputs_of(manager.tokenizer, [ids], [mask], turns=states))[0]


def test_tool_output_is_in_completions_and_in_verls_own_reward_and_not_in_solution_str(tmp_path):
    """A function that scores one completion sees what the model wrote; verl's own manager decodes the whole response."""
    (tmp_path / "own.py").write_text(
        "def compute_score(data_source, solution_str, ground_truth, completions):\n"
        "    return {'own': 'tool' in solution_str, 'all': 'tool' in completions}\n"
    )
    own, whole = (f"{{reward: '{tmp_path}/own.py:compute_score', key: {key}, pays: [a]}}" for key in ("own", "all"))
    recipe = f"layout: {{a: [answer]}}\nobjectives: [{own}, {whole}, {{reward: environment, pays: [a]}}]\n"
    info = info_of(read_turns(with_function(tmp_path, "float('tool' in solution_str)", recipe=recipe), "So.", RIGHT))
    assert [info[name] for name in ("own", "all", "environment")] == [0.0, 1.0, 1.0]


def test_a_reward_of_turns_is_logged_as_their_mean(tmp_path):
    output = read_turns(prepared(tmp_path, recipe=BY_TURN), RIGHT, RIGHT, RIGHT, WRONG)
    assert output.reward_score == info_of(output)["correct"] == 0.75


@pytest.mark.parametrize("recipe", [BY_TURN, "method: gigpo\n" + BY_TURN.replace(", scope: turn", "")])
def test_a_group_is_dropped_only_if_no_turn_can_get_credit(tmp_path, recipe):
    """verl drops a group whose marks are equal numbers; a group with NaN stays."""
    manager = prepared(tmp_path, *filtered_by("any_reward"), recipe=recipe)
    talks = (WRONG, WRONG), (WRONG, WRONG, WRONG), (RIGHT, WRONG), (RIGHT, RIGHT)
    all_wrong, longer, mixed, right = (float(info_of(read_turns(manager, *talk))["any_reward"]) for talk in talks)
    assert all_wrong == longer != right
    assert math.isnan(mixed)  # two such rollouts: a right turn is above the mean, a wrong one below
    assert math.isnan(right) == ("gigpo" in recipe)  # its first turn has more reward to come than its second


def test_columns_have_the_names_that_rewards_ask_for(tmp_path, monkeypatch):
    (tmp_path / "mine.py").write_text(
        "def seen(blocks, answer, level, turn_scores, prompts, completions, data_source, completion_ids):\n"
        "    assert (answer, level, turn_scores, data_source) == (['4'], ['hard'], [[0.5]], ['small'])\n"
        "    assert completions == ['<answer>4</answer>']\n"
        "    assert type(prompts[0]) is list and prompts == [[{'role': 'user', 'content': '2+2'}]]\n"
        "    return [len(completion_ids[0])]\n"
    )
    manager = prepared(tmp_path, recipe=OF_A_FILE.format(tmp_path, "seen"))
    extra = {"level": "hard", "answer": "the whole solution"}
    outputs = outputs_of(manager.tokenizer, ["<answer>4</answer>"], turn_scores=[0.5])
    (output,) = scored(manager, outputs, extra_info=extra, raw_prompt=[{"role": "user", "content": "2+2"}])
    assert output.reward_score == len(output.response_ids)


def test_a_run_with_another_estimator_sends_no_mask(manager, tmp_path):
    """verl's own managers pass such fields to the user's reward function, in `extra_info`."""

    class Recorder:
        config, loop, sent = config_of(tmp_path, "algorithm.adv_estimator=grpo"), manager.loop, []

        async def run_single(self, data):
            self.sent += [dict(fields) for fields in data.non_tensor_batch["tool_extra_fields"]]
            return {"reward_score": 0.0, "reward_extra_info": {}}

    recorder = Recorder()
    scored(recorder, outputs_of(manager.tokenizer, ["4"], level="hard"))
    assert recorder.sent == [{"level": "hard"}]


def test_a_reward_function_is_called_with_one_rollout_at_a_time(tmp_path):
    """verl calls it for many rollouts at once, and a function that keeps a state need not be thread-safe."""
    (tmp_path / "mine.py").write_text(
        "import threading, time\nbusy = threading.Lock()\n\ndef alone(blocks):\n"
        "    free = busy.acquire(blocking=False)\n    time.sleep(0.1)\n    if free:\n        busy.release()\n"
        "    return [float(free)]\n"
    )
    manager, calls = prepared(tmp_path, recipe=OF_A_FILE.format(tmp_path, "alone")), []
    manager.run_single = lambda data: calls.append(data) or RewardManager.run_single(manager, data)
    read_alone(manager, "<answer>4</answer>")

    async def several():
        return await asyncio.gather(*(RewardManager.run_single(manager, calls[0]) for _ in range(4)))

    assert [result["reward_score"] for result in manager.loop.run_until_complete(several())] == [1.0] * 4


def test_a_rollout_in_which_the_model_said_nothing(tmp_path):
    """It has no turn to read: its reward is absent, and other rollouts are compared without it."""
    manager = prepared(tmp_path, recipe=BY_TURN)
    empty, right = (read_alone(manager, text) for text in ("", RIGHT))
    assert info_of(empty)["correct"] is None
    assert empty.reward_score == 0.0
    unpacked = carry.unpack([info_of(output)[carry.KEY] for output in (empty, right)], manager.scheme)
    assert unpacked.reading.scores.reward_nm.tolist() == [[1.0]]
    assert unpacked.row_s.tolist() == [1]


def test_a_missing_column_says_so(manager):
    with pytest.raises(DataError, match=r"answer"):
        read_alone(manager, RIGHT, reward_model={})


def test_validation_shows_the_objectives(manager):
    """verl's own summary of a validation takes the numbers and leaves out the packed text."""
    infos = [info_of(read_alone(manager, TEXT.format(answer, 0.9))) for answer in (4, 5)]
    summary = process_validation_metrics(["small"] * 2, ["u", "u"], {key: [info[key] for info in infos] for key in infos[0]})
    assert set(summary["small"]) == {"correct", "brier"}
    assert summary["small"]["correct"]["mean@2"] == 0.5


def test_an_absent_reward_joins_no_mean_of_the_validation(tmp_path):
    """Without `if_missing` there is no number for it; NaN would be the mean of the whole data source."""
    recipe = RECIPE.replace(", if_missing: -1.0", "")
    manager = prepared(tmp_path, recipe=recipe)
    infos = [info_of(read_alone(manager, text)) for text in (TEXT.format(4, 0.5), RIGHT)]
    summary = process_validation_metrics(["small"] * 2, ["u", "v"], {"brier": [info["brier"] for info in infos]})
    assert summary["small"]["brier"]["mean@1"] == -0.25
    with pytest.warns(UserWarning, match="metric=brier drops .* verl keeps a group in which a completion lacks 'brier'"):
        filtering = prepared(tmp_path, *filtered_by("brier"), recipe=recipe)
    briers = [info_of(read_alone(filtering, text))["brier"] for text in (RIGHT, RIGHT)]
    assert np.std(briers) != 0.0  # verl drops a group if this is 0


def test_an_outcome_at_an_output_without_the_block_is_the_rollouts(tmp_path):
    """The last output says goodbye; the block that is paid stands in the one before."""
    objective = "{reward: environment, pays: [rest], options: {column: won}}"
    recipe = f"layout: {{solution: [answer], rest: [note]}}\nobjectives: [{objective}]\n"
    manager = prepared(tmp_path, recipe=recipe)
    outputs = outputs_of(manager.tokenizer, ["<answer>4</answer><note>x</note>", "<answer>bye</answer>"])
    outputs[0].extra_fields, outputs[1].extra_fields = {"won": None}, {"won": 1.0}
    scored(manager, outputs)
    packed = info_of(outputs[-1])[carry.KEY]
    reading = carry.unpack([packed, packed], manager.scheme, [0, 1]).reading
    assert reading.scores.status_nm[:, 0].tolist() == [Status.ABSENT, Status.OK]
    assert reading.scores.reward_nm[1, 0] == 1.0


@pytest.mark.parametrize("method", ["", "method: gigpo\n"])  # an output is one turn, so the function's number pays the last
def test_outputs_whose_prompts_differ_in_length_are_read_whole(tmp_path, method):
    """verl pads prompt and response as one, so its mask is right only for outputs with the longest prompt."""
    recipe = f"{method}layout: {{a: [answer]}}\nobjectives: [{{reward: environment, pays: [a]}}]\n"
    manager = with_function(tmp_path, "len(solution_str)", recipe=recipe)
    outputs = outputs_of(manager.tokenizer, ["So it is.", RIGHT, WRONG], anchor="start")
    outputs[0].prompt_ids = [1, 2, 3, 4, 5, 6, 7]
    outputs[1].prompt_ids = [1, 2, 3, 4]
    scored(manager, outputs)
    assert outputs[-1].reward_score == len(WRONG)
    packed = info_of(outputs[-1])[carry.KEY]
    lengths = carry.unpack([packed] * 3, manager.scheme, [0, 1, 2]).length_n
    assert lengths == [len(output.response_ids) for output in outputs]


def test_rewards_that_wait_share_the_loop_and_not_the_thread(tmp_path, monkeypatch):
    """More requests are in flight than reward workers have threads; each worker has its share of `max_concurrent`."""
    (tmp_path / "waiting.py").write_text(
        "import asyncio\nnow = most = 0\n\n"
        "async def compute_score(data_source, solution_str, ground_truth, extra_info=None):\n"
        "    global now, most\n    now += 1\n    most = max(most, now)\n    await asyncio.sleep(0.2)\n    now -= 1\n"
        "    return float('<answer>4<' in solution_str)\n"
    )
    monkeypatch.chdir(tmp_path)
    recipe = (
        "layout: {all: [answer]}\nmethod: rloo\nper: completion\n"
        "objectives: [{reward: waiting.py:compute_score, pays: [all], options: {max_concurrent: 48}}]\n"
    )
    manager = prepared(tmp_path, recipe=recipe)
    rollouts = [outputs_of(manager.tokenizer, [TEXT.format(4 if n % 2 else 5, 0.9)]) for n in range(30)]
    started = time.monotonic()

    async def all_at_once():
        await asyncio.gather(*[scoring(manager, outputs) for outputs in rollouts])

    manager.loop.run_until_complete(all_at_once())
    assert [info_of(output)["compute_score"] for (output,) in rollouts] == [float(n % 2) for n in range(30)]
    assert sys.modules["waiting.py"].most == 6  # 48 requests of 8 workers
    assert time.monotonic() - started < 0.2 * 30 / 2


def test_a_failure_of_one_rollout_alone_is_an_error_and_not_the_end(tmp_path, monkeypatch):
    """All questions about a rollout that is too long for the judge fail, and a function fails for all its outputs."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "mine.py").write_text(
        "def compute_score(data_source, solution_str, ground_truth):\n    raise ValueError('too long')\n"
    )
    rubric = [{"text": "Is it right?"}, {"text": "Is it short?"}]
    with Server(lambda *_: web.json_response({"error": {"message": "too long"}}, status=400)).serving() as server:
        options = f"{{criteria: rubric, model: m, base_url: '{server.url}', retries: 0}}"
        recipe = (
            "layout: {a: [answer]}\nobjectives:\n"
            f"  - {{reward: judge, pays: [a], options: {options}}}\n  - {{reward: mine.py:compute_score, pays: [a]}}\n"
        )
        manager = prepared(tmp_path, recipe=recipe)
        outputs = outputs_of(manager.tokenizer, [RIGHT, WRONG])
        scored(manager, outputs, extra_info={"rubric": rubric})
    reading = carry.unpack([info_of(outputs[-1])[carry.KEY]] * 2, manager.scheme, [0, 1]).reading
    assert reading.scores.status_nm.tolist() == [[Status.ERROR] * 2] * 2
    assert len(server.requests) == 4


def test_an_answer_that_a_reward_function_returns_is_not_the_gold_answer(tmp_path):
    """The function says what it read; `correct` compares with the dataset. A value that an objective pays is the function's."""
    recipe = """
    layout: {solution: [answer], confidence: [confidence]}
    objectives:
      - {reward: correct, pays: [solution]}
      - {reward: environment, pays: [confidence]}
      - {reward: environment, name: level, pays: [confidence], options: {column: level}}
    """
    manager = with_function(tmp_path, "{'score': 0.5, 'answer': '5', 'completions': 'x', 'level': 0.25}", recipe=recipe)
    for said, right in ((4, 1.0), (5, 0.0)):
        info = info_of(read_alone(manager, TEXT.format(said, 1), extra_info={"level": 3}))
        assert (info["correct"], info["environment"], info["level"]) == (right, 0.5, 0.25)
    # A number called `environment` in the agent loop's extra fields replaces the function's score, and nothing else of it.
    outputs = outputs_of(manager.tokenizer, [TEXT.format(4, 1)], environment=0.75)
    (output,) = scored(manager, outputs, extra_info={"level": 3})
    assert (info_of(output)["environment"], info_of(output)["level"]) == (0.75, 0.25)
