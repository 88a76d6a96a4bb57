"""The reward `reward_model`: a classifier of `transformers` reads prompt and part, or a process reward model every step."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property, lru_cache
from typing import Any, NamedTuple

import torch
from torch import Tensor

from spanwise.errors import DataError, RecipeError, check_known, unknown
from spanwise.objective import is_number
from spanwise.registry import register
from spanwise.score.items import CallResult, completion_text, part_text, refuse_if_all_failed, reward_of, rows_of
from spanwise.score.judges.prompt import prompt_of, question_of
from spanwise.score.reward import Columns, Pays, Reward, Scored, Texts, present
from spanwise.types import BlockText, PiecewiseText, Status

#: How the class of a model ends that `AutoModel...` of transformers loads; any other comes with its own code.
_ENDS = ("ForSequenceClassification", "ForTokenClassification", "ForCausalLM")
#: Rows whose numbers a model remembers: the objectives of a batch share its passes.
_REMEMBERED = 65_536


def _check(options: Mapping[str, Any]) -> None:
    if not isinstance(options["model"], str) or not options["model"]:
        raise RecipeError("The reward 'reward_model' has no model; name a folder or a hub's name: options: {model: NAME}.")
    check_known("value of the reward model's option 'sees'", options["sees"], ("part", "prefix", "whole"))
    marker, choices = options["marker"], options["choices"]
    if marker is not None and (not isinstance(marker, str) or not marker):
        raise RecipeError(f"The reward model's marker is {marker!r}; write the text that stands behind each step.")
    if marker is not None and options["sees"] != "part":
        raise RecipeError("A reward model with a marker reads all steps of a completion in one pass; leave sees out.")
    is_table = isinstance(choices, Mapping) and len(choices) > 1 and all(map(is_number, choices.values()))
    if choices is not None and (marker is None or not is_table):
        raise RecipeError(
            f"The reward model's choices are {choices!r}; write two or more tokens with their numbers, and the marker at which "
            f"the model writes one of them: {{'+': 1, '-': 0}}."
        )
    for name in ("batch_size", "max_length"):
        value = options[name] if name == "batch_size" or options[name] is not None else 1
        if type(value) is not int or value < 1:
            raise RecipeError(f"The reward model's option '{name}' is {value!r}; write a whole number of at least 1.")


@register("reward_model", kind="reward", check=_check, loads_model=True)
def score_by_model(
    text: Texts,
    *,
    pays: Pays,
    columns: Columns,
    scored: Scored,
    model: str = "",
    sees: str = "part",
    marker: str | None = None,
    choices: Mapping[str, float | int] | None = None,
    label: str | int | None = None,
    inside: bool = False,
    block: str | None = None,
    batch_size: int = 16,
    max_length: int | None = None,
    device: str | None = None,
    dtype: str = "auto",
    trust_remote_code: bool = False,
) -> Reward:
    """The number that a reward model of `transformers` gives a part of the completion.

    Rule: without a marker the model is a sequence classifier. With one label its number is the logit, with several it is the
    probability of `label`. With a marker it is a process reward model, which reads the prompt and all blocks of the completion with
    the marker behind each, in one pass. A block's number is read at the last token of its marker: the probability of `label` of a
    token classifier, or of a causal model the mean of `choices` under their probabilities. No paid block: ABSENT. A row that is too
    long for the model, and a number that is not finite: ERROR, with the reason as its note.

    Args:
        text, pays, columns, scored: see `spanwise.score.rewards`. The prompt is the column prompts, prompt or question.
        model: a folder, or a hub's name.
        sees: "part": prompt and paid part; "prefix": prompt and completion up to the part's end; "whole": prompt and completion.
        marker: the text behind each step, such as <extra_0>.
        choices: token -> number, for a causal model.
        label: the name or place of a label of a classifier that has several; None: the last one.
        inside: the model sees what the tags of a block hold, without the tags.
        block: the block that is the part; None: all paid blocks, of which a marker reads the last one. `each` sets it.
        batch_size: rows in one pass; 1 for a classifier whose configuration has no pad_token_id.
        max_length: tokens of a row; None: as many as the model has places for.
        device: as torch names it; None: the GPU of this process, or the CPU if there is none.
        dtype: of the weights, as torch names it; "auto": as they are stored.
        trust_remote_code: run the code that comes with the model.

    Raises:
        RecipeError: options that cannot work, or do not fit the model; the model cannot be loaded.
        DataError: no column holds the prompt; the blocks are found in pieces, so that none stands before another.
        RewardError: no row of several has a number.

    Source: Lightman et al., arXiv 2305.20050 (process reward models); rows as the chat templates of `transformers` write them.
    """
    device = device or (f"cuda:{torch.cuda.current_device()}" if torch.cuda.is_available() else "cpu")
    choice_items = None if choices is None else tuple(choices.items())
    reader = load_reader(model, device, dtype, trust_remote_code, marker, label, choice_items)
    most = min(reader.longest, max_length or reader.longest)
    rows: dict[int, tuple[_Row, int]] = {}
    for n, (blocks, cells) in enumerate(zip(text, rows_of(columns, len(text)), strict=True)):
        names = present(blocks, pays)
        if names:
            pieces, place = _pieces(blocks, [block] if block else names, sees if marker is None else "steps", inside)
            rows[n] = reader.row(cells, pieces), place
    reader.read([row for row, _ in rows.values() if len(row.ids) <= most], batch_size)
    results = {n: _result(reader, row, place, most) for n, (row, place) in rows.items()}
    refuse_if_all_failed(results, f"The reward model '{model}'")
    return reward_of(results, len(text))


def _pieces(blocks: BlockText, names: Sequence[str], sees: str, inside: bool) -> tuple[list[str], int]:
    """Return the pieces of a completion that the model sees, and the place of the one that is judged."""

    def shown(name: str) -> str:
        content = blocks[name] or {}
        return "".join(content[tag] or "" for tag in content if tag) if inside else part_text(blocks, [name], name)

    if sees == "part":
        return ["".join(map(shown, names))], 0
    if sees == "whole" and not inside:
        return [completion_text(blocks)], 0
    if isinstance(blocks, PiecewiseText):
        raise DataError(
            "A reward model cannot read blocks one after the other that are found in pieces; leave sees, inside and marker out."
        )
    in_order = present(blocks, list(blocks))
    place = max(map(in_order.index, names))
    if sees == "steps":
        return list(map(shown, in_order)), place
    return ["".join(map(shown, in_order[: place + 1] if sees == "prefix" else in_order))], 0


def _result(reader: _RewardModel, row: _Row, place: int, most: int) -> CallResult:
    """Return the number of one part, or why there is none."""
    if len(row.ids) > most:
        sentence = f"the prompt and the text have {len(row.ids)} tokens, and the reward model takes {most}"
        return CallResult(status=Status.ERROR, error=DataError(sentence))
    number = reader.known[row][place]
    if not math.isfinite(number):
        return CallResult(status=Status.ERROR, error=DataError(f"the reward model's number is {number}"))
    return CallResult(number)


class _Row(NamedTuple):
    """The tokens of one row."""

    ids: tuple[int, ...]
    types: tuple[int, ...]  # of each token, which of two texts it belongs to; empty if the model does not ask
    places: tuple[int, ...]  # at which tokens a number is read; empty: one number for the row


@dataclass(eq=False)
class _RewardModel:
    """A loaded model with its tokenizer, and the numbers of the rows that it has read."""

    model: Any
    tokenizer: Any
    marker: str | None
    columns: list[int]  # the outputs whose probabilities count
    worth: Tensor | None  # the number of each of them; None: the output itself is the number
    rows: dict[Any, _Row] = field(default_factory=dict)  # by prompt and pieces
    known: dict[_Row, list[float]] = field(default_factory=dict)

    @cached_property
    def longest(self) -> int:
        """The most tokens of a row."""
        places = getattr(self.model.config.get_text_config(), "max_position_embeddings", None)
        return int(min(places or math.inf, self.tokenizer.model_max_length, 2**31))

    @cached_property
    def _control(self) -> list[str]:
        """The tokens that mean something to the template, and the marker if it is a token of its own."""
        special = {token.content for token in self.tokenizer.added_tokens_decoder.values() if token.special}
        own = {self.marker} & self.tokenizer.get_added_vocab().keys()
        return sorted((token for token in special | own if len(token) > 1), key=len, reverse=True)

    def row(self, cells: Mapping[str, Any], pieces: Sequence[str]) -> _Row:
        """Return the row of a prompt and of pieces of a completion, which several objectives may ask about."""
        prompt = prompt_of(cells)
        if prompt is None:
            has = ", ".join(sorted(cells)) or "none"
            raise DataError(
                f"A reward model reads the prompt from a column prompts, prompt or question; the columns are {has}."
            )
        name = repr(prompt), tuple(pieces)
        if name not in self.rows:
            self.rows[name] = self._written(prompt, question_of(cells), pieces)
        return self.rows[name]

    def _written(self, prompt: Any, question: str, pieces: Sequence[str]) -> _Row:
        """Write a row as the model's chat template does; a completion cannot write the template's own tokens."""
        turns = [{"role": "user", "content": question}] if isinstance(prompt, str) else list(prompt)
        for token in self._control:  # a character of no width makes it plain text
            pieces = [piece.replace(token, f"{token[0]}\u200b{token[1:]}") for piece in pieces]
        has_template, types = self.tokenizer.chat_template is not None, ()
        if self.marker is not None:
            ids = (
                self._templated(turns, add_generation_prompt=True) if has_template else self.tokenizer(question)["input_ids"]
            )
            return _with_steps(ids, [self._encoded(piece) for piece in pieces], self._encoded(self.marker))
        if has_template:
            ids = self._templated([*turns, {"role": "assistant", "content": pieces[0]}])
        elif self.tokenizer.sep_token is not None:
            encoded = self.tokenizer(question, pieces[0])
            ids, types = encoded["input_ids"], tuple(encoded.get("token_type_ids", ()))
        else:
            ids = self.tokenizer(question + pieces[0])["input_ids"]
        return _Row(tuple(ids), types, ())

    def _templated(self, turns: Sequence[Any], **options: Any) -> list[int]:
        return list(self.tokenizer.apply_chat_template(turns, return_dict=True, **options)["input_ids"])

    def _encoded(self, text: str) -> list[int]:
        return self.tokenizer(text, add_special_tokens=False)["input_ids"]

    def read(self, rows: Sequence[_Row], batch_size: int) -> None:
        """Remember the numbers of rows; those that are known are not read again."""
        if len(self.known) > _REMEMBERED:
            self.known.clear()
            self.rows.clear()
        new = sorted({row for row in rows if row not in self.known}, key=lambda row: len(row.ids))
        # Without a pad_token_id a classifier reads the last place of a row, be it padding or not.
        size = batch_size if self.marker or self.model.config.pad_token_id is not None else 1
        for first in range(0, len(new), size):
            batch = new[first : first + size]
            self.known.update(zip(batch, self._numbers(batch), strict=True))

    @torch.inference_mode()
    def _numbers(self, rows: Sequence[_Row]) -> Iterator[list[float]]:
        width = max(len(row.ids) for row in rows)

        def padded(lists: Sequence[Sequence[int]], value: int) -> Tensor:
            return torch.tensor([[*one, *[value] * (width - len(one))] for one in lists], device=self.model.device)

        inputs = {
            "input_ids": padded([row.ids for row in rows], self.model.config.pad_token_id or 0),
            "attention_mask": padded([[1] * len(row.ids) for row in rows], 0),
        }
        if rows[0].types:
            inputs["token_type_ids"] = padded([row.types for row in rows], 0)
        for row, logits in zip(rows, self.model(**inputs)[0], strict=True):
            yield self._read_out(logits[list(row.places)] if row.places else logits[None])

    def _read_out(self, logits_pv: Tensor) -> list[float]:
        chosen_pc = logits_pv[:, self.columns].double().cpu()
        return chosen_pc[:, 0].tolist() if self.worth is None else (chosen_pc.softmax(dim=-1) @ self.worth).tolist()


def _with_steps(head: Sequence[int], steps: Sequence[Sequence[int]], marker: Sequence[int]) -> _Row:
    """Put a marker behind each step; they are encoded apart, so that no token belongs to a step and a marker."""
    ids, places = list(head), []
    for step in steps:
        ids += [*step, *marker]
        places.append(len(ids) - 1)
    return _Row(tuple(ids), (), tuple(places))


@lru_cache(maxsize=4)
def load_reader(
    name: str,
    device: str,
    dtype: str,
    trust: bool,
    marker: str | None,
    label: str | int | None,
    choices: tuple[tuple[str, float | int], ...] | None,
) -> _RewardModel:
    """Load a model once, and find the outputs that count."""
    import transformers

    faults, code = (OSError, ValueError, ImportError), {"trust_remote_code": trust}
    try:
        config = transformers.AutoConfig.from_pretrained(name, **code)
        tokenizer = transformers.AutoTokenizer.from_pretrained(name, **code)
    except faults as error:
        raise _not_loaded(name, error) from error
    sort = (config.architectures or ["a model without a class"])[0]
    _check_fits(name, sort, marker=marker, choices=choices)
    end = next((end for end in _ENDS if sort.endswith(end)), "")
    try:
        model = getattr(transformers, f"AutoModel{end}").from_pretrained(name, dtype=dtype, **code)
    except faults as error:
        raise _not_loaded(name, error) from error
    columns, worth = _outputs(name, config, tokenizer, label, choices)
    return _RewardModel(model.to(device).eval(), tokenizer, marker, columns, worth)


def _not_loaded(name: str, error: Exception) -> RecipeError:
    first = str(error).strip().splitlines()[0].rstrip(".")
    return RecipeError(f"The reward model '{name}' cannot be loaded: {first}. Name a folder that holds one.")


def _check_fits(name: str, sort: str, *, marker: str | None, choices: Any) -> None:
    """Refuse options that do not fit the class of a model."""
    who = f"The reward model '{name}' is {sort}"
    if sort.endswith("ForSequenceClassification") and marker is not None:
        raise RecipeError(
            f"{who}, which gives a row one number; leave marker out. sees: prefix shows a step and what is before."
        )
    if sort.endswith("ForTokenClassification") and marker is None:
        raise RecipeError(f"{who}, which gives every token a number; set marker, the text behind each step.")
    if sort.endswith("ForCausalLM") and choices is None:
        raise RecipeError(f"{who}, which writes tokens and no number; set marker and choices, or use the reward judge.")
    if choices is not None and not sort.endswith("ForCausalLM"):
        raise RecipeError(f"{who}, which has labels; name one with label, and leave choices out.")


def _outputs(
    name: str, config: Any, tokenizer: Any, label: str | int | None, choices: Any
) -> tuple[list[int], Tensor | None]:
    """Return the outputs whose probabilities count, and what each of them is worth."""
    if choices is not None:
        if label is not None:
            raise RecipeError(f"The reward model '{name}' has choices; leave label out.")
        ids = {word: tokenizer(word, add_special_tokens=False)["input_ids"] for word, _ in choices}
        several = next((word for word, tokens in ids.items() if len(tokens) != 1), None)
        if several is not None:
            raise RecipeError(
                f"The reward model's choice {several!r} is {len(ids[several])} tokens; write words of one token."
            )
        return [tokens[0] for tokens in ids.values()], torch.tensor([worth for _, worth in choices], dtype=torch.float64)
    names = [config.id2label[place] for place in range(config.num_labels)]
    if len(names) == 1 and label is None:
        return [0], None
    if len(names) == 1:
        raise RecipeError(f"The reward model '{name}' has one label, whose number is the reward; leave label out.")
    by_label: dict[Any, int] = {key: place for place, name in enumerate(names) for key in (name, place)}
    chosen = by_label.get(len(names) - 1 if label is None else label)
    if chosen is None:
        raise RecipeError(f"The reward model '{name}': {unknown('label', str(label), names)}")
    return list(range(len(names))), torch.nn.functional.one_hot(torch.tensor(chosen), len(names)).double()
