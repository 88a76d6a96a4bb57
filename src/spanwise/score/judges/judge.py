"""The reward `judge`: a model behind an HTTP endpoint reads a part of a completion and chooses a word that stands for a number."""

from __future__ import annotations

import asyncio
import os
import ssl
import time
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache, partial
from importlib.util import find_spec
from itertools import cycle
from typing import Any, NamedTuple

from spanwise.errors import DataError, RewardError, check_known, check_number, refuse, unknown
from spanwise.layout import any_index
from spanwise.registry import register
from spanwise.score.criteria import Criterion, criteria_of
from spanwise.score.event_loop import objects_of_loop
from spanwise.score.items import (
    CallResult,
    await_calls,
    completion_text,
    part_text,
    refuse_if_all_failed,
    requests_here,
    reward_of,
    rows_of,
    semaphore,
)
from spanwise.score.judges.cache import Cache, digest
from spanwise.score.judges.prompt import check_columns, check_template, fenced, load_template, messages_for
from spanwise.score.judges.verdict import WHOLE, Judgement, read_verdict, reply_format, reply_instruction
from spanwise.score.reward import Columns, Pays, Reward, Scored, Texts, is_number_table, present
from spanwise.types import BlockText, Status

CHOICES: Mapping[str, float] = {"no": 0.0, "yes": 1.0}
#: The costs of a judge for each completion: requests sent, answers from the cache, failures, tokens, seconds.
MEASURES = ("calls", "cached", "failed", "tokens", "seconds")
#: The connections of one HTTP client: few, because its pool looks at all of them for each request.
_CONNECTIONS = 8
#: The judges' servers that have answered once. If such a server falls silent, its questions fail, but the run goes on.
_answered: set[Any] = set()
#: Opens a file of cached verdicts once in each process for each set of the judge's options.
_open_cache = lru_cache(maxsize=64)(Cache)
if hasattr(os, "register_at_fork"):  # a forked child must not use its parent's connection to SQLite
    os.register_at_fork(after_in_child=_open_cache.cache_clear)


def _check(options: Mapping[str, Any]) -> None:
    choices, key, constrain = options["choices"], options["key"], options["constrain"]
    choice_list = list(choices) if is_number_table(choices) else []
    are_words = all(isinstance(word, str) and word.strip() for word in choice_list)
    options_example = "options: {model: NAME, base_url: URL}"
    refuse(
        {
            f"The reward 'judge' has no model. Set it to the name that the server uses: {options_example}.": (
                not isinstance(options["model"], str) or not options["model"]
            ),
            f"The judge's choices are {choices!r}. Write two or more words with their numbers: {{no: 0, yes: 1}}.": not choice_list,
            f"The judge's choices are {choice_list}. Write different words, and put yes and no in quotes: YAML reads them as true "
            f"and false.": not are_words or len({str(word).lower() for word in choice_list}) < len(choice_list),
            "The judge can locate a verdict only in a reply with several fields. Leave constrain: choice out.": (
                options["locate"] and constrain == "choice"
            ),
        }
    )
    check_known("value of the judge's option 'constrain'", constrain, ("schema", "choice", "none"))
    for name, least in (("max_concurrent", 1.0), ("retries", 0.0), ("max_tokens", 1.0)):
        check_number(f"The judge's option '{name}'", options[name], least=least, whole=True)
    for name in ("timeout", "deadline"):
        check_number(f"The judge's option '{name}' (seconds)", options[name], above=0.0)
    refuse(
        {
            "The reward 'judge' needs the package openai. Install 'spanwise[judge]'.": (find_spec("openai") is None),
            f"The judge has no key. Set the environment variable {key}, or name another variable with key: NAME. For a server of "
            f"your own set base_url; it needs no key.": options["base_url"] is None and not os.environ.get(key),
        }
    )
    check_template(load_template(options["prompt"]))


@register("judge", kind="reward", check=_check, measures=MEASURES)
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
    temperature: float | int = 0.0,
    max_tokens: int = 512,
    cache: str | None = None,
    key: str = "OPENAI_API_KEY",
) -> Reward:
    """Reward a part of the completion with the number of the word that a judge model chooses for it.

    Rule: each completion with a paid block is one question, asked through the chat completions API; equal questions are asked once.
    No paid block: ABSENT. A rubric without a criterion about the block: UNSCORED. No answer before `deadline`: TIMEOUT. Any other
    failure, a reply without one of the choices among them: ERROR, with the reason as its note. A failure is never 0. What the
    completion says stands in a fence that it cannot close (`spanwise.score.judges.prompt`).

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
            outputs); "none": it writes what it likes, and the verdict is looked for.
        block: the block that is the part; None: all paid blocks. With `each` it is each block in turn.
        max_concurrent: requests in flight, shared by all processes of a training.
        timeout: seconds for one request; `retries` more follow with growing pauses, or when the server says (Retry-After).
        deadline: seconds for one question, with its retries.
        temperature, max_tokens: of the judge's sampling.
        cache: a file that keeps verdicts, shared by runs and processes.
        key: the environment variable that holds the server's key, which is written nowhere.

    Raises:
        RecipeError: options that cannot work.
        DataError: the template names a column that is not there.
        RewardError: the server refuses the key or the model, has never answered, or all of several questions failed.

    Source: chat completions as OpenAI and vLLM serve them.
    """
    prompt_template = load_template(prompt)
    check_columns(prompt_template, columns)
    if criteria is not None and criteria not in columns:
        raise DataError(f"The judge's rubric: {unknown('column', criteria, columns)}")
    request_form = _RequestForm(
        prompt_template, criterion, locate, dict(choices), reasons, expected, constrain, model, temperature, max_tokens
    )
    questions: dict[int, list[_Question]] = {}
    for n, (blocks, row) in enumerate(zip(text, rows_of(columns, len(text)), strict=True)):
        present_blocks = present(blocks, pays)
        if present_blocks:
            rubric_criteria = [Criterion(criterion)] if criteria is None else _criteria_for(block, row[criteria], blocks, n)
            questions[n] = [request_form.question(blocks, row, present_blocks, block, entry) for entry in rubric_criteria]
    question_by_name = {question.name: question for group in questions.values() for question in group}
    verdicts_file = None if cache is None else _open_cache(os.path.abspath(cache), cache, request_form.digest)
    from_cache = {} if verdicts_file is None else verdicts_file.get(question_by_name)
    verdict_results = {name: CallResult(judgement) for name, judgement in from_cache.items()}
    in_flight: dict[str, asyncio.Future[dict[str, CallResult]]] = objects_of_loop().setdefault(("questions", base_url), {})
    asked_elsewhere = {name: in_flight[name] for name in question_by_name if name in in_flight and name not in from_cache}
    unasked_names = [name for name in question_by_name if name not in from_cache and name not in asked_elsewhere]
    request_limit, seconds_by_name = requests_here(max_concurrent), dict[str, float]()
    client_cycle = cycle(_clients_of(base_url, key, timeout, retries, -(-request_limit // _CONNECTIONS)))

    async def ask(name: str) -> Judgement:
        start_time = time.monotonic()
        try:
            judgement = await request_form.ask(next(client_cycle), question_by_name[name], base_url)
        finally:
            seconds_by_name[name] = time.monotonic() - start_time
        if verdicts_file is not None:
            verdicts_file.put(name, judgement)
        return judgement

    call_by_name = {name: partial(ask, name) for name in unasked_names}
    results_future = asyncio.ensure_future(await_calls(call_by_name, semaphore((base_url, model), request_limit), deadline))
    in_flight |= dict.fromkeys(unasked_names, results_future)
    try:
        verdict_results |= await results_future
    finally:
        for name in unasked_names:
            del in_flight[name]
    for name, results_future in asked_elsewhere.items():
        verdict_results[name] = await _result_of(name, results_future)
    refuse_if_all_failed(verdict_results, "The judge", noun="questions")
    sums = {
        n: _sum([one for one in group if not locate or _is_about(verdict_results[one.name], block)], verdict_results)
        for n, group in questions.items()
    }
    return reward_of(sums, len(text), measured=_costs(len(text), questions, verdict_results, from_cache, seconds_by_name))


async def _result_of(name: str, asking: asyncio.Future[dict[str, CallResult]]) -> CallResult:
    """Await the judge's verdict on a question that another objective has asked."""
    await asyncio.wait([asking])
    if asking.cancelled() or asking.exception() is not None:
        return CallResult(status=Status.ERROR, error=RuntimeError("another objective asked this question, and was stopped"))
    return asking.result()[name]


def _is_about(result: CallResult, block: str | None) -> bool:
    """Return whether a judge's verdict is about a block (None: about the whole answer); true also if the judge gave no verdict."""
    return result.error is not None or result.value.block == (block or WHOLE)


class _Question(NamedTuple):
    """A request to the judge about one criterion; `name` is its digest, `parts` the blocks that the verdict may be about."""

    criterion: Criterion
    name: str
    request: dict[str, Any]
    parts: Sequence[str]


def _criteria_for(block: str | None, cell: Any, blocks: BlockText, n: int) -> list[Criterion]:
    """Return the criteria about a block in a prompt's rubric, or all criteria if no block is named."""
    rubric_label = f"of completion {n}"
    rubric_criteria = criteria_of(cell, rubric_label)
    for position, criterion in enumerate(rubric_criteria, start=1):
        if criterion.part is not None and criterion.part not in blocks:
            raise DataError(
                f"Criterion {position} of the rubric {rubric_label} is about '{criterion.part}'. "
                f"{unknown('block', criterion.part, blocks)}"
            )
    return [criterion for criterion in rubric_criteria if block is None or criterion.part in (None, block)]


@dataclass(frozen=True)
class _RequestForm:
    """The template, choices, model and options that all requests of one objective to its judge have in common."""

    template: str
    criterion: str
    locate: bool
    choices: dict[str, float | int]
    reasons: bool
    expected: bool
    constrain: str
    model: str
    temperature: float
    max_tokens: int

    @property
    def digest(self) -> str:
        return digest(vars(self))

    def question(
        self, blocks: BlockText, row: Mapping[str, Any], names: list[str], block: str | None, criterion: Criterion
    ) -> _Question:
        """Build the request to the judge about one block of a completion, or about the blocks `names` if no block is named."""
        parts = _possible_parts(blocks, names, block) if self.locate else []
        block = criterion.part or block
        if parts:
            part_content = "\n".join(fenced(part_text(blocks, [name], name), name) for name in parts)
        else:
            part_content = part_text(blocks, names, block)
        part_name = ", ".join(parts) or block or ", ".join(names)
        whole_answer = completion_text(blocks)
        messages = messages_for(
            self.template, row, completion=whole_answer, part=part_content, name=part_name, criterion=criterion.text
        )
        choice_words = list(self.choices)
        messages[-1]["content"] += "\n" + reply_instruction(choice_words, self.constrain, reasons=self.reasons, parts=parts)
        chat_request = {
            "model": self.model,
            "messages": messages,
            "temperature": self.temperature,
            "max_tokens": self.max_tokens,
            **({"logprobs": True, "top_logprobs": 20} if self.expected else {}),
            **reply_format(choice_words, self.constrain, reasons=self.reasons, parts=parts),
        }
        # The digest covers the choices' numbers too, because a cached verdict is a number and the request holds only the words.
        return _Question(criterion, digest({**chat_request, "choices": self.choices}), chat_request, parts)

    async def ask(self, client: Any, question: _Question, base_url: str | None) -> Judgement:
        """Send one question to the judge and read the verdict; raise RewardError if the server can answer no question at all."""
        import openai

        server_name = base_url or "OpenAI"
        try:
            # Request and reply are plain JSON: building the client's own classes takes longer than the rest of the request.
            server_reply = await client.post("/chat/completions", cast_to=object, body=question.request)
        except (openai.AuthenticationError, openai.PermissionDeniedError, openai.NotFoundError) as error:
            raise RewardError(
                f"The judge '{self.model}' at {server_name} refuses: {_server_message(error)}. Check model, base_url and key."
            ) from error
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


def _possible_parts(blocks: BlockText, names: list[str], block: str | None) -> list[str]:
    """Return the blocks that a verdict may be about: all of the same name as `block`, with any index, or those in `names`."""
    if block is None:
        return names
    return [name for name in present(blocks, list(blocks)) if any_index(name) == any_index(block)]


def _sum(questions: Sequence[_Question], results: Mapping[str, CallResult]) -> CallResult:
    """Add up the judge's verdicts on one completion, weighted by criterion; return the first failure instead if there is one."""
    if not questions:
        return CallResult(status=Status.UNSCORED, note="no criterion is about this block")
    failure = next((results[question.name] for question in questions if results[question.name].error is not None), None)
    if failure is not None:
        return failure
    criterion_judgements = [(question.criterion, results[question.name].value) for question in questions]
    weighted_sum = sum(criterion.weight * judgement.value for criterion, judgement in criterion_judgements)
    if len(criterion_judgements) == 1:
        return CallResult(weighted_sum, note=criterion_judgements[0][1].reason)
    criterion_notes = (
        f"{criterion.weight * judgement.value:+g} {criterion.name or criterion.text}: {judgement.reason or judgement.value}"
        for criterion, judgement in criterion_judgements
    )
    return CallResult(weighted_sum, note="\n".join(criterion_notes))


def _costs(
    size: int,
    questions: Mapping[int, Sequence[_Question]],
    results: Mapping[str, CallResult],
    cached: Collection[str],
    seconds: Mapping[str, float],
) -> list[list[float]]:
    """Count what the judge cost for each completion; equal questions count once, and those of another objective never."""
    costs_nc = [[0.0] * len(MEASURES) for _ in range(size)]
    first_completion = {question.name: n for n in reversed(list(questions)) for question in questions[n]}
    for name, n in first_completion.items():
        is_new, has_failed = name in seconds, results[name].error is not None
        token_count = results[name].value.tokens if is_new and not has_failed else 0
        question_costs = (is_new, name in cached, is_new and has_failed, token_count, seconds.get(name, 0.0))
        costs_nc[n] = [total + float(cost) for total, cost in zip(costs_nc[n], question_costs, strict=True)]
    return costs_nc


def _clients_of(base_url: str | None, key: str, timeout: float, retries: int, count: int) -> list[Any]:
    """Return this event loop's HTTP clients for a judge's server, made on first use."""
    import certifi
    import openai

    loop_objects, client_key = objects_of_loop(), (base_url, key, timeout, retries, count)
    if client_key not in loop_objects:
        api_key = os.environ.get(key) or "none"  # openai's client wants a key even if the server needs none
        settings: dict[str, Any] = {"base_url": base_url, "api_key": api_key, "timeout": timeout, "max_retries": retries}
        # The clients share one SSL context, because each context reads all certificates from disk.
        ssl_context = ssl.create_default_context(cafile=os.environ.get("SSL_CERT_FILE") or certifi.where())
        http_clients = (openai.DefaultAsyncHttpxClient(verify=ssl_context) for _ in range(count))
        loop_objects[client_key] = [openai.AsyncOpenAI(http_client=transport, **settings) for transport in http_clients]
    return loop_objects[client_key]


def _server_message(error: Any) -> str:
    """Return the judge server's own message from an exception of the HTTP client."""
    error_body = getattr(error, "body", None)
    body_message = error_body.get("message") if isinstance(error_body, Mapping) else None
    return str(body_message or getattr(error, "message", None) or error)[:300].rstrip(".")
