"""The reward `judge`: a model behind an HTTP endpoint reads one part of a completion and chooses a word, which has a number."""

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

from spanwise.errors import DataError, RecipeError, RewardError, check_known, unknown
from spanwise.layout import any_index
from spanwise.objective import is_number
from spanwise.registry import register
from spanwise.score.criteria import Criterion, criteria_of
from spanwise.score.event_loop import of_this_loop
from spanwise.score.items import (
    CallResult,
    completion_text,
    failure_of,
    first_if_all_failed,
    gathered,
    own_share,
    part_text,
    reward_of,
    rows_of,
    semaphore,
)
from spanwise.score.judges.cache import Cache, digest
from spanwise.score.judges.prompt import Prompt, fenced
from spanwise.score.judges.verdict import WHOLE, Judgement, asked_for, form_of, read_verdict
from spanwise.score.reward import Columns, Pays, Reward, Scored, Texts, present
from spanwise.types import BlockText, Status

CHOICES: Mapping[str, float] = {"no": 0.0, "yes": 1.0}
#: What a judge costs, one number per completion: requests that were sent, answers from the cache, failures, tokens, seconds.
MEASURES = ("calls", "cached", "failed", "tokens", "seconds")
#: Connections of one client: its pool looks at all of them for each request.
_CONNECTIONS = 8
#: The servers that have answered: one that falls silent later costs its questions, and not the run.
_answered: set[Any] = set()


def _check(options: Mapping[str, Any]) -> None:
    if not isinstance(options["model"], str) or not options["model"]:
        raise RecipeError(
            "The reward 'judge' asks no model; name it as the server does: options: {model: NAME, base_url: URL}."
        )
    choices = options["choices"]
    if not isinstance(choices, Mapping) or len(choices) < 2 or not all(map(is_number, choices.values())):
        raise RecipeError(
            f"The judge's choices are {choices!r}; write two or more words with their numbers: {{no: 0, yes: 1}}."
        )
    lowered = [str(name).lower() for name in choices]
    if not all(isinstance(name, str) and name.strip() for name in choices) or len(set(lowered)) < len(lowered):
        raise RecipeError(
            f"The judge's choices are {list(choices)}; write different words, in quotes where YAML reads no or yes."
        )
    if options["locate"] and options["constrain"] == "choice":
        raise RecipeError("The judge can locate a verdict only in a reply of several fields; leave constrain: choice out.")
    check_known("value of the judge's option 'constrain'", options["constrain"], ("schema", "choice", "none"))
    for name, least in (("max_concurrent", 1), ("retries", 0), ("max_tokens", 1)):
        if not isinstance(options[name], int) or isinstance(options[name], bool) or options[name] < least:
            raise RecipeError(f"The judge's option '{name}' is {options[name]!r}; write a whole number of at least {least}.")
    for name in ("timeout", "deadline"):
        if not is_number(options[name]) or options[name] <= 0:
            raise RecipeError(f"The judge's option '{name}' is {options[name]!r}; write a number of seconds above 0.")
    if find_spec("openai") is None:
        raise RecipeError("The reward 'judge' asks through the package openai: install 'spanwise[judge]'.")
    if options["base_url"] is None and not os.environ.get(options["key"]):
        raise RecipeError(
            f"The judge has no key: set the environment variable {options['key']}, or name another with key: NAME. A server of "
            f"your own needs none: set base_url."
        )
    Prompt.of(options["prompt"]).check()


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
    """The number of the choice that a model makes about a part of the completion.

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
    template = Prompt.of(prompt)
    template.check_columns(columns)
    sampling = {"model": model, "temperature": temperature, "max_tokens": max_tokens}
    ask = _RequestForm(template, criterion, locate, dict(choices), reasons, expected, constrain, **sampling)
    if criteria is not None and criteria not in columns:
        raise DataError(f"The judge's rubric: {unknown('column', criteria, columns)}")
    questions: dict[int, list[_Question]] = {}
    for n, (blocks, row) in enumerate(zip(text, rows_of(columns, len(text)), strict=True)):
        names = present(blocks, pays)
        if names:
            about = [Criterion(criterion)] if criteria is None else _criteria_for(block, row[criteria], blocks, n)
            questions[n] = [ask.question(blocks, row, names, block, one) for one in about]
    distinct = {one.name: one for of_completion in questions.values() for one in of_completion}
    kept = None if cache is None else opened(os.path.abspath(cache), cache, ask.digest)
    rows = {} if kept is None else kept.get(distinct)
    results = {name: CallResult(Judgement(*row)) for name, row in rows.items()}
    flights: dict[Any, asyncio.Future[CallResult]] = of_this_loop().setdefault(("questions", base_url), {})
    elsewhere = {name: flights[name] for name in distinct if name in flights and name not in rows}
    asked = [name for name in distinct if name not in rows and name not in elsewhere]
    limit, seconds = own_share(max_concurrent), dict[str, float]()
    clients = cycle(_clients_of(base_url, key, timeout, retries, -(-limit // _CONNECTIONS)))

    async def one(name: str) -> Judgement:
        started = time.monotonic()
        try:
            answer = await ask.judgement(next(clients), distinct[name], base_url)
        finally:
            seconds[name] = time.monotonic() - started
        if kept is not None:
            kept.put(name, answer.value, answer.reason, answer.tokens, answer.place)
        return answer

    free = semaphore((base_url, model), limit)
    flights |= {name: asyncio.get_running_loop().create_future() for name in asked}
    try:
        for name, result in zip(asked, await gathered([partial(one, name) for name in asked], free, deadline), strict=True):
            results[name] = result
            flights[name].set_result(result)
    finally:
        for name in asked:
            flights.pop(name).cancel()
    results |= {name: await _result_of(flight) for name, flight in elsewhere.items()}
    first = first_if_all_failed(results)
    if first is not None:
        raise RewardError(
            f"The judge failed for all {len(results)} questions. The first: {failure_of(first)}."
        ) from first.error
    about_block = {
        n: [one for one in about if not locate or _is_about(results[one.name], block)] for n, about in questions.items()
    }
    summed = {n: _summed(about, results) for n, about in about_block.items()}
    return reward_of(summed, len(text), measured=_costs(len(text), questions, results, rows, seconds))


async def _result_of(flight: asyncio.Future[CallResult]) -> CallResult:
    """Await the answer to a question that another objective has asked."""
    await asyncio.wait([flight])
    if flight.cancelled():
        return CallResult(status=Status.ERROR, error=RuntimeError("another objective asked, and was stopped"))
    return flight.result()


def _is_about(result: CallResult, block: str | None) -> bool:
    """Return whether a verdict is about a block, or about the whole if no block is named; a failure may be about any."""
    return result.error is not None or result.value.place == (block or WHOLE)


class _Question(NamedTuple):
    """A criterion, the request that asks about it, its name, and the parts that the verdict may be about."""

    criterion: Criterion
    name: str
    request: dict[str, Any]
    parts: Sequence[str]


def _criteria_for(block: str | None, cell: Any, blocks: BlockText, n: int) -> list[Criterion]:
    """Return the criteria of a prompt's rubric about a block, or all of them if no block is named."""
    where = f"of completion {n}"
    criteria = criteria_of(cell, where)
    for position, one in enumerate(criteria, start=1):
        if one.part is not None and one.part not in blocks:
            fault = unknown("block", one.part, blocks)
            raise DataError(f"Criterion {position} of the rubric {where} is about '{one.part}'. {fault}")
    return [one for one in criteria if block is None or one.part in (None, block)]


@dataclass(frozen=True)
class _RequestForm:
    """How a question is put: all that two runs must share for a verdict of one to be true in the other."""

    template: Prompt
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
        return digest({**vars(self), "template": self.template.source})

    def question(
        self, blocks: BlockText, row: Mapping[str, Any], names: list[str], block: str | None, criterion: Criterion
    ) -> _Question:
        """Return the question about one block of a completion, or about these blocks."""
        parts = _parts(blocks, names, block) if self.locate else []
        block = criterion.part or block
        part, name = part_text(blocks, names, block), block or ", ".join(names)
        if parts:
            part, name = "\n".join(fenced(part_text(blocks, [one], one), one) for one in parts), ", ".join(parts)
        completion = completion_text(blocks)
        messages = self.template.messages(row, completion=completion, part=part, name=name, criterion=criterion.text)
        messages[-1]["content"] += "\n" + asked_for(list(self.choices), self.constrain, reasons=self.reasons, parts=parts)
        logprobs = {"logprobs": True, "top_logprobs": 20} if self.expected else {}
        form = form_of(list(self.choices), self.constrain, reasons=self.reasons, parts=parts)
        sampling = {"temperature": self.temperature, "max_tokens": self.max_tokens}
        request = {"model": self.model, "messages": messages, **sampling, **logprobs, **form}
        return _Question(criterion, digest(request), request, parts)

    async def judgement(self, client: Any, question: _Question, base_url: str | None) -> Judgement:
        """Ask one question; end the run if the server can answer none."""
        import openai

        server = base_url or "OpenAI"
        try:
            # Plain JSON both ways: the client's own classes would cost more time than the rest of the request.
            reply = await client.post("/chat/completions", cast_to=object, body=question.request)
        except (openai.AuthenticationError, openai.PermissionDeniedError, openai.NotFoundError) as error:
            raise RewardError(
                f"The judge '{self.model}' at {server} refuses: {_message(error)}. Look at model, base_url and key."
            ) from error
        except openai.APITimeoutError as error:
            raise TimeoutError from error
        except openai.APIConnectionError as error:
            if server not in _answered:
                raise RewardError(
                    f"The judge's server {server} does not answer ({error.__cause__ or error}). Start it, or correct base_url."
                ) from error
            raise
        _answered.add(server)
        return read_verdict(reply, self.choices, expected=self.expected, parts=question.parts)


def _parts(blocks: BlockText, names: list[str], block: str | None) -> list[str]:
    """Return the present blocks that a verdict may be about: the paid ones, or all that share the block's name with any index."""
    if block is None:
        return names
    return [name for name in present(blocks, list(blocks)) if any_index(name) == any_index(block)]


def _summed(questions: Sequence[_Question], results: Mapping[str, CallResult]) -> CallResult:
    """Add up the weighted verdicts about one completion; a failure of one of them is a failure."""
    if not questions:
        return CallResult(status=Status.UNSCORED, note="no criterion is about it")
    failure = next((results[one.name] for one in questions if results[one.name].error is not None), None)
    if failure is not None:
        return failure
    verdicts = [(one.criterion, results[one.name].value) for one in questions]
    return CallResult(sum(criterion.weight * answer.value for criterion, answer in verdicts), note=_note(verdicts))


def _costs(
    size: int,
    questions: Mapping[int, Sequence[_Question]],
    results: Mapping[str, CallResult],
    known: Collection[str],
    seconds: Mapping[str, float],
) -> list[list[float]]:
    """Count what each completion cost; equal questions cost what one costs, and one that another objective asked costs nothing."""
    table = [[0.0] * len(MEASURES) for _ in range(size)]
    first_of = {one.name: n for n in reversed(list(questions)) for one in questions[n]}
    for name, n in first_of.items():
        is_new, failed = name in seconds, results[name].error is not None
        tokens = results[name].value.tokens if is_new and not failed else 0
        costs = (is_new, name in known, is_new and failed, tokens, seconds.get(name, 0.0))
        table[n] = [total + float(cost) for total, cost in zip(table[n], costs, strict=True)]
    return table


def _note(verdicts: Sequence[tuple[Criterion, Judgement]]) -> str | None:
    """Return the judge's reason, or of several criteria each with what its verdict adds."""
    if len(verdicts) == 1:
        return verdicts[0][1].reason
    lines = (
        f"{criterion.weight * answer.value:+g} {criterion.name or criterion.text}: {answer.reason or answer.value}"
        for criterion, answer in verdicts
    )
    return "\n".join(lines)


@lru_cache(maxsize=64)
def opened(path: str, name: str, prompt: str) -> Cache:
    """Return the open cache of a file, one for each process and way of asking; `name` is what the user calls the file."""
    return Cache(path, name, prompt)


if hasattr(os, "register_at_fork"):  # a connection of SQLite must not be used by a child
    os.register_at_fork(after_in_child=opened.cache_clear)


def _clients_of(base_url: str | None, key: str, timeout: float, retries: int, count: int) -> list[Any]:
    """Return the clients of this loop for a server."""
    import certifi
    import openai

    of_loop, name = of_this_loop(), (base_url, key, timeout, retries, count)
    if name not in of_loop:
        secret = os.environ.get(key) or "none"  # a server of one's own asks for none
        settings: dict[str, Any] = {"base_url": base_url, "api_key": secret, "timeout": timeout, "max_retries": retries}
        # One context for all: each would read the certificates anew.
        context = ssl.create_default_context(cafile=os.environ.get("SSL_CERT_FILE") or certifi.where())
        transports = (openai.DefaultAsyncHttpxClient(verify=context) for _ in range(count))
        of_loop[name] = [openai.AsyncOpenAI(http_client=client, **settings) for client in transports]
    return of_loop[name]


def _message(error: Any) -> str:
    """Return what the server says, without the rest of its reply."""
    body = getattr(error, "body", None)
    message = body.get("message") if isinstance(body, Mapping) else None
    return str(message or getattr(error, "message", None) or error)[:300].rstrip(".")
