"""The reward `judge`: a model behind an HTTP endpoint judges a completion."""

from __future__ import annotations

import asyncio
import os
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from importlib.util import find_spec
from itertools import cycle
from typing import Any, NamedTuple

import numpy as np

from spanwise.errors import DataError, RewardError, check_known, check_number, refuse, unknown
from spanwise.layout import any_index
from spanwise.objective import is_number_table
from spanwise.registry import register
from spanwise.score.criteria import Criterion, criteria_of
from spanwise.score.event_loop import once_per_loop
from spanwise.score.items import (
    CallResult,
    await_calls,
    completion_text,
    part_text,
    refuse_if_all_failed,
    requests_per_process,
    reward_of,
    rows_of,
)
from spanwise.score.judges.cache import Cache, digest
from spanwise.score.judges.prompt import NAMES, compiled, fenced, load_template, messages_for
from spanwise.score.judges.verdict import WHOLE, Judgement, read_verdict, reply_rules
from spanwise.score.reward import Columns, Pays, Reward, Scored, Texts
from spanwise.types import BlockText, Status, present

CHOICES: Mapping[str, float] = {"no": 0.0, "yes": 1.0}
#: The costs of a judge per completion: requests sent, answers from the cache, failures, tokens, seconds.
MEASURES = ("calls", "cached", "failed", "tokens", "seconds")
#: One HTTP client has at most this many connections, because each request searches through all of them.
_CONNECTIONS = 32
#: Judge servers that have answered at least once. If one of them fails later, the run goes on.
_answered: set[Any] = set()


def _check(options: Mapping[str, Any]) -> None:
    choices, constrain, key_name = options["choices"], options["constrain"], options["key"]
    check_known("setting of the judge's 'constrain' called", constrain, ("schema", "choice", "none"))
    for name, minimum in (("max_concurrent", 1.0), ("retries", 0.0), ("max_tokens", 1.0)):
        if name != "max_tokens" or options[name] is not None:
            check_number(f"The judge's option '{name}'", options[name], least=minimum, whole=True)
    for name in ("timeout", "deadline"):
        check_number(f"The judge's option '{name}' (seconds)", options[name], above=0.0)
    choice_list = list(choices) if is_number_table(choices) else []
    are_words = all(isinstance(word, str) and word.strip() for word in choice_list)
    has_distinct_words = len({str(word).lower() for word in choice_list}) == len(choice_list)
    refuse(
        {
            "The judge's 'key' must name an environment variable. Name one, or remove 'key'.": not isinstance(key_name, str),
            "The reward 'judge' has no model. Write options: {model: NAME, base_url: URL}, with the model's name on the server.": (
                not isinstance(options["model"], str) or not options["model"]
            ),
            f"The judge's choices are {choices!r}. Write two or more words with their numbers: {{no: 0, yes: 1}}.": not choice_list,
            f"The judge's choices are {choice_list}. Write words that differ from each other. Put yes and no in quotes, because "
            "YAML reads bare words like these as true and false.": not (are_words and has_distinct_words),
            "With 'constrain: choice', the judge can reply only with a choice, but 'locate' also asks the judge to name a block. "
            "Remove one of the two options.": (options["locate"] and constrain == "choice"),
        }
    )
    compiled(load_template(options["prompt"]))


def _check_ready(options: Mapping[str, Any]) -> None:
    """Refuse to ask a judge if its package or its API key is missing."""
    key_name = options["key"]
    lacks_key = not os.environ.get(key_name) and (options["base_url"] is None or key_name != "OPENAI_API_KEY")
    shown_key = key_name if key_name.isupper() else "that the option 'key' names"  # `key` may hold the secret itself
    key_fault = f"The judge has no key. Set the environment variable {shown_key}, or name another variable with key: NAME."
    key_fault += " A server of your own (base_url) needs no key."
    package_fault = "The reward 'judge' needs the package openai. Install 'spanwise[judge]'."
    refuse({package_fault: not find_spec("openai"), key_fault: lacks_key})


@register("judge", kind="reward", check=_check, ready=_check_ready, measures=MEASURES)
async def ask_judge(
    text: Texts,
    *,
    pays: Pays,
    columns: Columns,
    scored: Scored,
    model: str = "",
    base_url: str | None = None,
    prompt: str | None = None,
    criterion: str = "",
    criteria: str | None = None,
    locate: bool = False,
    choices: Mapping[str, float | int] = CHOICES,
    reasons: bool = True,
    expected: bool = False,
    constrain: str = "schema",
    block: str | None = None,
    max_concurrent: int = 64,
    timeout: float | int = 60.0,
    retries: int = 6,
    deadline: float | int = 600.0,
    temperature: float | int | None = 0.0,
    max_tokens: int | None = 512,
    cache: str | None = None,
    key: str = "OPENAI_API_KEY",
) -> Reward:
    """Reward a part of a completion by the word that a judge model chooses. Each word stands for a number.

    Rule: each completion with a paid block is one question, asked through the chat completions API; equal questions are asked once.
    No paid block, or no `block`: ABSENT. No criterion about a block that is there: UNSCORED. No answer before `deadline`:
    TIMEOUT. Any other failure, such as a reply without one of the choices: ERROR, with the reason as its note. A failure is
    never 0. The completion's text stands in a fence that it cannot close (`spanwise.score.judges.prompt`).

    Args:
        text, pays, columns, scored: see `spanwise.score.rewards`.
        model: as the server calls it.
        base_url: of an OpenAI-compatible server, such as http://127.0.0.1:8000/v1; None: OpenAI's own.
        prompt: a file with a Jinja template, or a template; it sees question, completion, part, name, criterion and the dataset's
            columns. None: `spanwise.score.judges.prompt.DEFAULT`.
        criterion: what is asked about the part.
        criteria: the column with the rubric of each prompt: a list of {text, weight, part}, or the same as JSON. The reward is the
            sum of weight times verdict; with a `block` it is that of the criteria about this block. `Objective.criteria` sets it.
        locate: the judge sees the parts one by one and says which of them its verdict is about (SRaR, arXiv 2605.17291). The reward
            of a `block` comes from the verdicts about it, and without a `block` from those about the whole; a block that no verdict
            is about is UNSCORED. The parts are the blocks of that name with any index; without a `block` all paid ones.
        choices: word -> number.
        reasons: ask for a sentence of evidence before the verdict; it stands beside the part in the token view.
        expected: the mean of the numbers under the probabilities of the choices, in place of the number of the word.
        constrain: "schema": the server writes JSON by a schema; "choice": one of the words and no reason (vLLM's structured
            outputs); "none": any text. Its JSON holds the verdict, or it begins with it, or the last line with a choice does.
        block: the block that is the part; None: all paid blocks. With `each` it is each block in turn.
        max_concurrent: requests in flight, shared by all processes of a training.
        timeout: seconds for one request; `retries` more follow with growing pauses, or when the server says (Retry-After).
        deadline: seconds for one question, with its retries.
        temperature, max_tokens: of the judge's sampling. None leaves them out of the request, as OpenAI's reasoning models need.
        cache: a file that keeps verdicts, shared by runs and processes.
        key: the environment variable that holds the server's key, which is written nowhere.

    Raises:
        RecipeError: options that cannot work.
        DataError: the template names a column that is not there.
        RewardError: the server refuses the key or the model, has never answered, or all questions of several completions fail.
    """
    prompt_template = load_template(prompt)
    unknown_names = sorted(compiled(prompt_template)[1] - columns.keys() - set(NAMES))
    if unknown_names:
        raise DataError(f"The judge's prompt: {unknown('column', unknown_names[0], [*NAMES, *columns])}")
    if criteria is not None and criteria not in columns:
        raise DataError(f"The judge's rubric: {unknown('column', criteria, columns)}")
    request_form = _RequestForm(
        prompt_template, criterion, locate, dict(choices), reasons, expected, constrain, model, temperature, max_tokens
    )
    questions_by_index: dict[int, list[_Question]] = {}
    for n, (blocks, row) in enumerate(zip(text, rows_of(columns, len(text)), strict=True)):
        if block_names := present(blocks, pays) and present(blocks, [block] if block else pays):
            rubric = [Criterion(criterion)] if criteria is None else criteria_of(row[criteria], f"of completion {n}", blocks)
            questions_by_index[n] = [
                request_form.question(blocks, row, block_names, block, entry)
                for entry in rubric
                if entry.part is None or (block in (None, entry.part) and blocks[entry.part] is not None)
            ]
    question_by_name = {question.name: question for questions in questions_by_index.values() for question in questions}
    verdict_cache = None
    if cache:
        cache_arguments = (os.path.abspath(cache), cache, digest(vars(request_form)))
        verdict_cache = once_per_loop(cache_arguments, lambda: Cache(*cache_arguments))
    cached_judgements = verdict_cache.get(question_by_name) if verdict_cache else {}
    result_by_name = {name: CallResult(judgement) for name, judgement in cached_judgements.items()}
    costs_by_name = {name: {"cached": 1.0} for name in cached_judgements}
    requests_at_once = requests_per_process(max_concurrent)
    client_settings = (base_url, key, timeout, retries, 1 + (requests_at_once - 1) // _CONNECTIONS)
    client_cycle = cycle(once_per_loop(client_settings, lambda: _clients(*client_settings)))

    async def ask(name: str) -> Judgement:
        question_costs = costs_by_name[name] = {"calls": 1.0, "failed": 1.0}
        start_time = time.monotonic()
        try:
            judgement = await request_form.ask(next(client_cycle), question_by_name[name], base_url)
        finally:
            question_costs["seconds"] = time.monotonic() - start_time
        question_costs |= {"failed": 0.0, "tokens": float(judgement.tokens)}
        if verdict_cache is not None:
            verdict_cache.put(name, judgement)
        return judgement

    tasks_in_flight: dict[str, asyncio.Future[dict[str, CallResult]]] = once_per_loop(("questions", base_url), dict)
    unanswered_names = [name for name in question_by_name if name not in result_by_name]
    running_tasks = {name: tasks_in_flight[name] for name in unanswered_names if name in tasks_in_flight}
    judge_calls = {name: partial(ask, name) for name in unanswered_names if name not in tasks_in_flight}
    answers_task = asyncio.ensure_future(await_calls(judge_calls, (base_url, model), requests_at_once, deadline))
    tasks_in_flight |= dict.fromkeys(judge_calls, answers_task)
    try:
        result_by_name |= await answers_task
    finally:
        for name in judge_calls:
            del tasks_in_flight[name]
    other_answers = await asyncio.gather(*map(asyncio.shield, running_tasks.values()), return_exceptions=True)
    for name, answer in zip(running_tasks, other_answers, strict=True):
        has_failed = isinstance(answer, BaseException)
        result_by_name[name] = CallResult(status=Status.ERROR, error=answer) if has_failed else answer[name]
    refuse_if_all_failed(result_by_name if len(questions_by_index) > 1 else {}, "The judge", noun="questions")
    result_by_index = dict[int, CallResult]()
    costs_nc = np.zeros((len(text), len(MEASURES)))
    for n, questions in questions_by_index.items():
        verdicts = [(question.criterion, result_by_name[question.name]) for question in questions]
        if locate:  # an unreadable reply is an error for every block
            judged_part = block or WHOLE
            verdicts = [(entry, result) for entry, result in verdicts if result.error or result.value.block == judged_part]
        result_by_index[n] = _sum(verdicts)
        for question in questions:  # a question that several completions share is charged once
            for measure_name, cost in costs_by_name.pop(question.name, {}).items():
                costs_nc[n, MEASURES.index(measure_name)] += cost
    return reward_of(result_by_index, len(text), measured=costs_nc.tolist())


class _Question(NamedTuple):
    """A request to the judge about one criterion. `name` is its digest, `parts` the blocks the verdict may name."""

    criterion: Criterion
    name: str
    request: dict[str, Any]
    parts: Sequence[str]


@dataclass(frozen=True)
class _RequestForm:
    """The settings that all requests of an objective to its judge share."""

    template: str
    criterion: str
    locate: bool
    choices: dict[str, float | int]
    reasons: bool
    expected: bool
    constrain: str
    model: str
    temperature: float | None
    max_tokens: int | None

    def question(
        self, blocks: BlockText, row: Mapping[str, Any], names: list[str], block: str | None, criterion: Criterion
    ) -> _Question:
        """Build the request to the judge about one block, or about all blocks in `names`."""
        part_names = names if self.locate else []
        if self.locate and block:
            part_names = [name for name in present(blocks, list(blocks)) if any_index(name) == any_index(block)]
        block = criterion.part or block
        part_name = block or ", ".join(names)
        part_content = part_text(blocks, [block] if block else names)
        if part_names:
            part_name = ", ".join(part_names)
            part_content = "\n".join(fenced(part_text(blocks, [name]), name) for name in part_names)
        template_values = {"part": part_content, "name": part_name, "criterion": criterion.text}
        instruction, reply_format = reply_rules(list(self.choices), self.constrain, reasons=self.reasons, parts=part_names)
        messages = messages_for(self.template, row, completion=completion_text(blocks), **template_values)
        messages[-1]["content"] += f"\n{instruction}"
        chat_request = {
            "model": self.model,
            "messages": messages,
            **{name: setting for name in ("temperature", "max_tokens") if (setting := getattr(self, name)) is not None},
            **({"logprobs": True, "top_logprobs": 20} if self.expected else {}),
            **reply_format,
        }
        # The cache stores verdicts as numbers, so its key includes `choices`, which map each verdict to a number.
        return _Question(criterion, digest({**chat_request, "choices": self.choices}), chat_request, part_names)

    async def ask(self, client: Any, question: _Question, base_url: str | None) -> Judgement:
        """Send one question to the judge and read the verdict. Raise RewardError if the server refuses or never answered."""
        import openai

        server_name = base_url or "OpenAI"
        try:
            # Plain JSON is faster than the client's own classes.
            server_reply = await client.post("/chat/completions", cast_to=object, body=question.request)
        except openai.APIStatusError as error:
            is_unsupported = error.param in ("temperature", "max_tokens") and f"{error.code}".startswith("unsupported")
            if error.status_code not in (401, 403, 404) and not is_unsupported:
                raise  # the server may refuse one question only, such as an overlong one
            advice = f"Set {error.param}: null to leave it out" if is_unsupported else "Check model, base_url and key"
            server_message = error.body.get("message") if isinstance(error.body, Mapping) else None
            error_text = f"{server_message or error.message}"[:300].rstrip(".")
            raise RewardError(f"The judge '{self.model}' at {server_name} refuses: {error_text}. {advice}.") from error
        except openai.APITimeoutError as error:
            raise TimeoutError from error
        except openai.APIConnectionError as error:
            if server_name not in _answered:
                raise RewardError(
                    f"The judge's server {server_name} does not answer ({error.__cause__ or error}). Start it, or correct base_url."
                ) from error
            raise
        _answered.add(server_name)
        return read_verdict(server_reply, self.choices, expected=self.expected, parts=question.parts)


def _sum(verdicts: Sequence[tuple[Criterion, CallResult]]) -> CallResult:
    """Add up the judge's verdicts on a completion, weighted by criterion. If one failed, return the first failure."""
    if not verdicts:
        return CallResult(status=Status.UNSCORED, note="no criterion is about this block")
    first_failure = next((result for _, result in verdicts if result.error is not None), None)
    if first_failure is not None:
        return first_failure
    weighted_sum = sum(criterion.weight * result.value.value for criterion, result in verdicts)
    if len(verdicts) == 1:
        return CallResult(weighted_sum, note=verdicts[0][1].value.reason)
    criterion_notes = (
        f"{criterion.weight * judgement.value:+g} {criterion.name or criterion.text}: {judgement.reason or judgement.value}"
        for criterion, judgement in ((criterion, result.value) for criterion, result in verdicts)
    )
    return CallResult(weighted_sum, note="\n".join(criterion_notes))


def _clients(base_url: str | None, key: str, timeout: float, retries: int, count: int) -> list[Any]:
    """Make HTTP clients for a judge's server."""
    import openai

    api_key = os.environ.get(key) or "none"  # openai's client wants a key even if the server needs none
    client_settings: dict[str, Any] = {"base_url": base_url, "api_key": api_key, "timeout": timeout, "max_retries": retries}
    return [openai.AsyncOpenAI(**client_settings) for _ in range(count)]
