"""The reward `reward_model`: a `transformers` classifier scores a completion or its steps."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from functools import lru_cache
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from spanwise.errors import DataError, RecipeError, check_known, check_number, first_line, refuse, unknown
from spanwise.objective import is_number_table
from spanwise.registry import register
from spanwise.score.items import CallResult, completion_text, part_text, refuse_if_all_failed, reward_of, rows_of
from spanwise.score.judges.prompt import as_plain_text, prompt_of, question_of
from spanwise.score.reward import Columns, Pays, Reward, Scored, Texts
from spanwise.types import BlockText, PiecewiseText, Status, present

#: A reward model's cache is emptied once it holds more than this many results.
_REMEMBERED = 65_536


def _check(options: Mapping[str, Any]) -> None:
    marker, choices, sees = options["marker"], options["choices"], options["sees"]
    if not isinstance(options["model"], str) or not options["model"]:
        raise RecipeError(
            "The reward 'reward_model' has no model. Write options: {model: NAME}, with a folder or a hub model."
        )
    check_known("setting of the reward model's 'sees' called", sees, ("part", "prefix", "whole"))
    if marker is not None and (not isinstance(marker, str) or not marker):
        raise RecipeError(f"The reward model's marker is {marker!r}. Set it to the text that follows each step.")
    if marker is not None and sees != "part":
        raise RecipeError(
            "With the option 'marker', the reward model reads all steps at once, so 'sees' has no effect. Remove 'sees'."
        )
    if choices is not None and (marker is None or not is_number_table(choices)):
        raise RecipeError(
            f"The reward model's choices are {choices!r}. Write two or more tokens with their numbers, such as "
            "{'+': 1, '-': 0}. Set the option 'marker' to the text after which the model writes one of these tokens."
        )
    for name in ("batch_size", "max_length"):
        if name == "batch_size" or options[name] is not None:
            check_number(f"The reward model's option '{name}'", options[name], least=1.0, whole=True)


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
    """Reward a part of the completion with the score of a reward model of `transformers`.

    Rule: without a marker the model is a sequence classifier. With one label its number is the logit, with several it is the
    probability of `label`. With a marker it is a process reward model, which reads the prompt and all blocks of the completion with
    the marker behind each, in one pass. A block's number is read at the last token of its marker: the probability of `label` of a
    token classifier, or of a causal model the mean of `choices` under their probabilities. No paid block, or no `block`: ABSENT. A
    row that is too long for the model, or a number that is not finite: ERROR, with the reason as its note.

    Args:
        text, pays, columns, scored: see `spanwise.score.rewards`. The prompt is the column prompts, prompt or question.
        model: a folder, or a hub's name.
        sees: "part": prompt and paid part; "prefix": prompt and completion up to the part's end; "whole": prompt and completion.
        marker: the text behind each step, such as <extra_0>.
        choices: token -> number, for a causal model.
        label: the name or place of a label of a classifier that has several; None: the last one.
        inside: the model sees what the closed tags of a block hold, without the tags; all of a block that has none.
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
    reward_model = load_reader(model, device, dtype, trust_remote_code, marker, label, choice_items)
    max_tokens = min(reward_model.longest, max_length or reward_model.longest)
    row_and_index_by_completion: dict[int, tuple[_Row, int]] = {}
    for n, (blocks, cells) in enumerate(zip(text, rows_of(columns, len(text)), strict=True)):
        if block_names := present(blocks, pays) and present(blocks, [block] if block else pays):
            text_pieces, judged_index = _pieces(blocks, block_names, sees if marker is None else "steps", inside)
            row_and_index_by_completion[n] = reward_model.row(cells, text_pieces), judged_index
    reward_model.read([row for row, _ in row_and_index_by_completion.values() if len(row.ids) <= max_tokens], batch_size)
    result_by_index: dict[int, CallResult] = {}
    for n, (row, judged_index) in row_and_index_by_completion.items():
        fits_model = len(row.ids) <= max_tokens
        reward_number = reward_model.numbers[row][judged_index] if fits_model else math.nan
        failure_reason = f"the reward model's number is {reward_number}"
        if not fits_model:
            failure_reason = f"the prompt and the text have {len(row.ids)} tokens, but the reward model takes {max_tokens}"
        failed_result = CallResult(status=Status.ERROR, error=DataError(failure_reason))
        result_by_index[n] = CallResult(reward_number) if math.isfinite(reward_number) else failed_result
    refuse_if_all_failed(result_by_index, f"The reward model '{model}'")
    return reward_of(result_by_index, len(text))


def _pieces(blocks: BlockText, names: Sequence[str], sees: str, inside: bool) -> tuple[list[str], int]:
    """Split a completion into the pieces that a reward model reads. Also return the judged piece's index."""

    def block_text(name: str) -> str:
        inner_texts = [inner_text for tag, inner_text in (blocks[name] or {}).items() if tag and inner_text is not None]
        return "".join(inner_texts) if inside and inner_texts else part_text(blocks, [name])

    if sees == "part":
        return ["".join(map(block_text, names))], 0
    if sees == "whole" and not inside:
        return [completion_text(blocks)], 0
    if isinstance(blocks, PiecewiseText):
        raise DataError(
            "The options 'sees', 'inside' and 'marker' need each block in one piece, but a block of this completion lies "
            "in several pieces. Remove these options."
        )
    block_names = present(blocks, list(blocks))
    last_judged_index = max(map(block_names.index, names))
    if sees == "steps":
        return list(map(block_text, block_names)), last_judged_index
    return ["".join(map(block_text, block_names[: last_judged_index + 1] if sees == "prefix" else block_names))], 0


class _Row(NamedTuple):
    """The token ids of a prompt and completion: one input of the reward model."""

    ids: tuple[int, ...]
    types: tuple[int, ...]  # The type of each token; empty if the model takes no types.
    places: tuple[int, ...]  # The tokens whose logits are read; empty if the model returns one result per row.


class _RewardModel:
    """A loaded reward model with its tokenizer and a cache of its results."""

    def __init__(
        self, name: str, device: str, dtype: str, trust: bool, marker: str | None, label: str | int | None, choices: Any
    ) -> None:
        import transformers

        load_options = {"trust_remote_code": trust}
        try:
            model_config = transformers.AutoConfig.from_pretrained(name, **load_options)
            self.tokenizer = transformers.AutoTokenizer.from_pretrained(name, **load_options)
            class_name = (model_config.architectures or ["a model without a class"])[0]
            class_suffix = class_name[class_name.rfind("For") :]
            model_label = f"The reward model '{name}' ({class_name})"
            refuse(
                {
                    f"{model_label} gives each text one number. Remove 'marker'. To score each step with the text before it, "
                    f"set sees: prefix.": class_suffix == "ForSequenceClassification" and marker is not None,
                    f"{model_label} gives every token a number. Set 'marker' to the text that follows each step.": (
                        class_suffix == "ForTokenClassification" and marker is None
                    ),
                    f"{model_label} writes tokens, not numbers. Set 'marker' and 'choices', or use the reward 'judge'.": (
                        class_suffix == "ForCausalLM" and choices is None
                    ),
                    f"{model_label} has labels. Set the option 'label' to one of them, and remove 'choices'.": (
                        class_suffix != "ForCausalLM" and choices is not None
                    ),
                }
            )
            # AutoModel also loads models that bring a class of their own.
            auto_class = getattr(transformers, f"AutoModel{class_suffix}", transformers.AutoModel)
            self.model = auto_class.from_pretrained(name, dtype=dtype, **load_options).to(device).eval()
        except RecipeError:
            raise
        except (OSError, ValueError, ImportError) as error:
            raise RecipeError(
                f"The reward model '{name}' cannot be loaded: {first_line(error)}. Name a folder with a model."
            ) from error
        self.marker = marker
        self.outputs, self.worths = _outputs(name, model_config, self.tokenizer, label, choices)
        max_positions = getattr(self.model.config.get_text_config(), "max_position_embeddings", None)
        self.longest = int(min(max_positions or math.inf, self.tokenizer.model_max_length, 2**31))
        # Longer control tokens come first, because they may contain shorter ones.
        special_tokens = {token.content for token in self.tokenizer.added_tokens_decoder.values() if token.special}
        control_tokens = special_tokens | ({marker} & self.tokenizer.get_added_vocab().keys())
        self.control_tokens = sorted((token for token in control_tokens if len(token) > 1), key=len, reverse=True)
        self.rows: dict[Any, _Row] = {}  # maps a prompt and a completion's pieces to their tokens
        self.numbers: dict[_Row, list[float]] = {}

    def row(self, cells: Mapping[str, Any], text_pieces: Sequence[str]) -> _Row:
        """Encode a prompt and a completion's `text_pieces`, and keep the result for all objectives."""
        prompt_cell = prompt_of(cells)
        if prompt_cell is None:
            raise DataError(
                "A reward model reads the prompt, but there is no column prompts, prompt or question. Add one of these columns. "
                f"The dataset's columns are {', '.join(sorted(cells)) or 'none'}."
            )
        row_key = repr(prompt_cell), tuple(text_pieces)
        if row_key not in self.rows:
            self.rows[row_key] = self._write_row(prompt_cell, question_of(cells), text_pieces)
        return self.rows[row_key]

    def _write_row(self, prompt: Any, question: str, text_pieces: Sequence[str]) -> _Row:
        """Encode prompt and completion by the model's chat template. Control tokens in a completion become plain text."""
        tokenizer = self.tokenizer
        has_steps = self.marker is not None
        token_type_ids = ()
        for token in self.control_tokens:
            text_pieces = [piece.replace(token, as_plain_text(token)) for piece in text_pieces]
        if tokenizer.chat_template is not None:
            messages = [{"role": "user", "content": question}] if isinstance(prompt, str) else list(prompt)
            replies = [] if has_steps else [{"role": "assistant", "content": text_pieces[0]}]
            encoding = tokenizer.apply_chat_template(messages + replies, add_generation_prompt=has_steps, return_dict=True)
        elif tokenizer.sep_token is not None and not has_steps:
            encoding = tokenizer(question, text_pieces[0])
            token_type_ids = encoding.get("token_type_ids", ())
        else:
            encoding = tokenizer(question if has_steps else question + text_pieces[0])
        ids = list(encoding["input_ids"])
        marker_positions = []
        for piece in text_pieces if has_steps else ():
            # Encode each step apart from the marker (the text after each step), so that no token spans step and marker.
            ids += [id for part in (piece, self.marker) for id in tokenizer(part, add_special_tokens=False)["input_ids"]]
            marker_positions.append(len(ids) - 1)
        return _Row(tuple(ids), tuple(token_type_ids), tuple(marker_positions))

    def read(self, rows: Sequence[_Row], batch_size: int) -> None:
        """Run the reward model on inputs that it has not read yet. Remember their numbers."""
        if len(self.numbers) > _REMEMBERED:
            self.numbers.clear()
            self.rows.clear()
        unread_rows = sorted({row for row in rows if row not in self.numbers}, key=lambda row: len(row.ids))
        # Without a pad token a classifier would take padding for the row's end, so each row runs alone.
        rows_per_pass = batch_size if self.marker or self.model.config.pad_token_id is not None else 1
        for batch_start in range(0, len(unread_rows), rows_per_pass):
            row_batch = unread_rows[batch_start : batch_start + rows_per_pass]
            self.numbers.update(zip(row_batch, self._run(row_batch), strict=True))

    @torch.inference_mode()
    def _run(self, rows: Sequence[_Row]) -> Iterator[list[float]]:
        model_inputs: dict[str, Any] = {"input_ids": [row.ids for row in rows]}
        model_inputs["attention_mask"] = [[1] * len(ids) for ids in model_inputs["input_ids"]]
        if rows[0].types:
            model_inputs["token_type_ids"] = [row.types for row in rows]
        for name, column in model_inputs.items():
            padding_value = (self.model.config.pad_token_id or 0) if name == "input_ids" else 0
            padded_table = pad_sequence([torch.tensor(ids) for ids in column], batch_first=True, padding_value=padding_value)
            model_inputs[name] = padded_table.to(self.model.device)
        for row, logits in zip(rows, self.model(**model_inputs)[0], strict=True):
            logits_pc = (logits[list(row.places)] if row.places else logits[None])[:, self.outputs].double().cpu()
            yield logits_pc[:, 0].tolist() if self.worths is None else (logits_pc.softmax(dim=-1) @ self.worths).tolist()


#: Loads a reward model, or returns the one that is already loaded.
load_reader = lru_cache(maxsize=4)(_RewardModel)


def _outputs(
    name: str, config: Any, tokenizer: Any, label: str | int | None, choices: Any
) -> tuple[list[int], Tensor | None]:
    """Return which logits of a reward model make its reward, and their weights, or None for a single logit."""
    if choices is not None:
        ids_by_word = {word: tokenizer(word, add_special_tokens=False)["input_ids"] for word, _ in choices}
        refuse({f"The reward model '{name}' has choices, so it needs no label. Remove 'label'.": label is not None})
        for word, token_ids in ids_by_word.items():
            token_count = len(token_ids)
            if token_count != 1:
                raise RecipeError(f"The reward model's choice {word!r} has {token_count} tokens. Choose a single token.")
        return [id for (id,) in ids_by_word.values()], torch.tensor([worth for _, worth in choices], dtype=torch.float64)
    label_names = [config.id2label[index] for index in range(config.num_labels)]
    if len(label_names) == 1:
        refuse({f"The reward model '{name}' gives one number, so it needs no label. Remove 'label'.": label is not None})
        return [0], None
    index_by_label: dict[Any, int] = {key: index for index, name in enumerate(label_names) for key in (name, index)}
    label_index = len(label_names) - 1 if label is None else index_by_label.get(label)
    if label_index is None:
        raise RecipeError(f"The reward model '{name}': {unknown('label', str(label), label_names)}")
    return list(range(len(label_names))), torch.nn.functional.one_hot(torch.tensor(label_index), len(label_names)).double()
