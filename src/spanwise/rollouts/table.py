"""`RolloutTable`: the completions of a rollout file in any format, with tokens stored end to end."""

from __future__ import annotations

import json
import math
import re
from array import array
from collections.abc import Collection, Hashable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from itertools import islice
from pathlib import Path
from types import MappingProxyType
from typing import Any, NamedTuple

import numpy as np
import torch
from jaxtyping import Bool, Float, Int, Shaped
from torch import Tensor

from spanwise.credit import group_index
from spanwise.errors import DataError, first_line
from spanwise.rollouts.cells import NOTHING, Parts, is_number_text
from spanwise.rollouts.token_rows import DiskArray
from spanwise.score import Reward
from spanwise.segment import Vocabulary
from spanwise.types import Status

#: Matches the next piece of a text: a tag, a word or white space.
_PIECE = re.compile(r"</?[\w.-]+>|\s?[^\s<]+|\s+|<[^\s<]*")
#: Matches the start of a JSON object, and places where a value begins.
_OBJECT, _VALUE_START = re.compile(r'\{\s*"'), re.compile(r'(?:(?<=[\s"]:)|(?<=[\[,]))(?=\S)')

#: Column names for the total reward that a trainer used, best first.
COMPARED = ("score", "reward", "scores", "rewards")

AT_ONCE = 256  # how many texts the tokenizer encodes in one call

#: Names of columns that may hold verdicts (1 right, 0 wrong). The first name that the file has is used.
VERDICTS = ("acc", "accuracy", "accuracy_reward", "is_correct", "score", "reward")


@dataclass(frozen=True)
class Ragged:
    """Rows of different lengths, stored end to end."""

    values: Shaped[np.ndarray, " v"]
    offsets: Int[np.ndarray, " o"]  # row n is values[offsets[n]:offsets[n + 1]]

    def __len__(self) -> int:
        return len(self.offsets) - 1

    @property
    def lengths(self) -> Int[np.ndarray, " n"]:
        """Return the length of each row."""
        return np.diff(self.offsets)

    def with_values(self, values: Shaped[np.ndarray, " v"]) -> Ragged:
        """Return the new `values`, cut into rows of the same lengths."""
        return Ragged(values, self.offsets)

    def slice(self, first: int, last: int) -> Shaped[np.ndarray, " s"]:
        """Return the values of the rows from `first` to `last - 1`, end to end."""
        return self.values[self.offsets[first] : self.offsets[last]]

    def places(self, rows: Any) -> Int[np.ndarray, "m t"]:
        """Return the positions in `values` of the entries of `rows`, padded with -1."""
        row_start_r1 = self.offsets[:-1][rows][:, None]
        row_length_r1 = self.lengths[rows][:, None]
        offset_t = np.arange(row_length_r1.max(initial=0))
        return np.where(offset_t < row_length_r1, row_start_r1 + offset_t, -1)


def fitting_runs(lengths: Int[np.ndarray, " n"], size: int) -> Iterator[tuple[int, int]]:
    """Yield (start, end) of each chunk of rows. Padded to equal length, a chunk has at most `size` entries, or one row."""
    chunk_start = longest_length = 0
    for n, length in enumerate(lengths.tolist()):
        longest_length = max(longest_length, length)
        if n > chunk_start and longest_length * (n + 1 - chunk_start) > size:
            yield chunk_start, n
            chunk_start = n
            longest_length = length
    if len(lengths):
        yield chunk_start, len(lengths)


def gather(places: Int[np.ndarray, "m t"], values: Shaped[np.ndarray, " v"], nowhere: Any) -> Shaped[Tensor, "m t"]:
    """Return the values at the positions `places`. A position of -1 gets the value `nowhere`."""
    return torch.from_numpy(np.where(places >= 0, values[places], np.asarray(nowhere, dtype=values.dtype)))


class TokenizedTexts(NamedTuple):
    """The tokens of all completions, and a note on how the texts were split."""

    ids: Ragged
    trainable: np.ndarray
    vocabulary: Vocabulary
    note: str


class AsRecorded(NamedTuple):
    """The advantages or rewards that a trainer used. NaN means that there is none."""

    says: str  # A text for the user that says what `value` holds.
    value: Float[np.ndarray, " v"]  # One number per completion, or per token if `by_token`.
    shares: bool = False  # True if the credit is already divided among the tokens.
    #: The credit that the file records for each block. The entry `stop` is the credit for ending without a rewarded block.
    by_block: Mapping[str, Float[Tensor, " n"]] = MappingProxyType({})
    by_token: bool = False


@dataclass(frozen=True)
class RolloutTable:
    """The completions of a rollout file, or of a folder of them.

    Attributes:
        source: who wrote it, such as "spanwise", "TRL", "verl", "verifiers" or "slime".
        path: as the user gave it.
        note: sentences the user should know: where tokens come from, what was left out. May be empty.
        prompts: N prompts as text; a conversation as JSON.
        group_n: the group of each completion: rows of one prompt and step, or of one key where the file has keys.
        step_n: the step of each completion; 0 where the file has none.
        tokens: N rows of token ids, of `vocabulary`.
        trainable: one flag per token of `tokens`: the model sampled it.
        vocabulary: the bytes of every id.
        tokenizer: the folder of the tokenizer that the ids are of, if they are the file's own.
        columns: further columns (answers, ...), N values each.
        rewards: the rewards the file records, by name.
        token_values: what else the file holds per token, flat as `tokens.values`, by the columns of `rollouts.schema`: `values`
            (one of several: `values/<stream>`), `logprobs`.
        keyed: the file itself says which rows are a group, so that a prompt drawn twice in one step is two of them.
        learned_n: False at completions that the trainer left out of the loss.
        folder: the run folder the file lies in, if it is one of spanwise's own.
        as_recorded: the advantages or rewards that its trainer went by, if it says any.
        rollout_n: the rollout of each completion, where some are parts of one (branches, turns) that has one vote.
        score_n: the score of each completion, NaN where it has none; None: the file has no scores.
        trained: the recorded rewards whose sum the trainer compared; empty where the file does not say it.
        after_values: a critic's value after the last token of each completion, NaN where unknown, by column: `value_after` (one of
            several: `value_after/<stream>`).

    Example:
        >>> import json, tempfile
        >>> from spanwise.rollouts import read_rollouts
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     _ = (Path(folder) / "1.jsonl").write_text(json.dumps({"input": "2 + 2?", "output": "4", "score": 1.0, "step": 1}))
        ...     table = read_rollouts(folder)
        >>> table.source, list(table.prompts), table.step_n.tolist()
        ('verl', ['2 + 2?'], [1])
    """

    source: str
    path: Path
    note: str
    prompts: Sequence[str]
    group_n: Int[Tensor, " n"]
    step_n: Int[Tensor, " n"]
    tokens: Ragged
    trainable: Bool[np.ndarray, " v"]
    vocabulary: Vocabulary
    tokenizer: Path | None = None
    columns: Mapping[str, Sequence[Any]] = field(default_factory=dict)
    rewards: Mapping[str, Reward] = field(default_factory=dict)
    token_values: Mapping[str, np.ndarray] = field(default_factory=dict)
    keyed: bool = False
    learned_n: Bool[Tensor, " n"] | None = None
    folder: Path | None = None
    as_recorded: AsRecorded | None = None
    rollout_n: Int[Tensor, " n"] | None = None
    score_n: Float[Tensor, " n"] | None = None
    trained: tuple[str, ...] = ()
    after_values: Mapping[str, Float[Tensor, " n"]] = field(default_factory=dict)

    def __len__(self) -> int:
        return len(self.tokens)

    @property
    def has_ids(self) -> bool:
        """Return whether the token ids come from the file. Otherwise the texts were split into words or encoded again."""
        return self.tokenizer is not None

    @property
    def has_split_rollouts(self) -> bool:
        """Return whether some rollout has several rows."""
        return self.rollout_n is not None and len(self.rollout_n.unique()) < len(self)

    @property
    def has_fixed_columns(self) -> bool:
        """Return whether the file's format fixes all column names. If so, the option `--columns` is refused."""
        return self.source in ("spanwise", "verifiers", "slime", "Inspect", "lm-eval")

    @property
    def verdict(self) -> str | None:
        """The name of a recorded reward that is 1 for right and 0 for wrong answers, or None without such a reward."""
        for verdict_name in VERDICTS:
            verdict_n = self.rewards[verdict_name].value_n if verdict_name in self.rewards else None
            if verdict_n is not None and bool((verdict_n.isnan() | (verdict_n == 0) | (verdict_n == 1)).all()):
                return verdict_name
        return None

    @staticmethod
    def of(
        source: str,
        path: Path,
        tokens: TokenizedTexts,
        *,
        prompts: Sequence[str],
        steps: Sequence[int],
        keys: Sequence[Hashable] | None = None,
        columns: Mapping[str, Sequence[Any]],
        rewards: Mapping[str, Sequence[Any]],
        rollouts: Sequence[Hashable] | None = None,
        trained: Collection[str] = (),
        notes: Sequence[str] = (),
    ) -> RolloutTable:
        """Build a table from columns.

        Completions of one step with equal `keys` form a group; if `keys` is None, those with equal prompts. Those of a group with
        equal `rollouts` are parts of one rollout; if `keys` is None, those of a step, because turns have prompts of their own. The
        reward that a trainer compared is the column `score` or `reward` (`scores`, `rewards`), else the sum of those `trained`.
        """
        group_n = group_index(list(zip(prompts if keys is None else keys, steps, strict=True)))
        rollout_n = None
        if rollouts is not None:  # rollout numbers may restart in every step or group
            step_or_group_n = steps if keys is None else group_n.tolist()
            rollout_n = group_index(list(zip(step_or_group_n, rollouts, strict=True)))
        reward_columns = parse_rewards({name: values for name, values in rewards.items() if not is_computed(name)})
        compared_reward_names = [name for name in COMPARED if name in reward_columns][:1]
        # Columns that should hold rewards. `unread_note` tells the user which of the columns hold no numbers.
        expected_names = [name for name in rewards if name in COMPARED or name not in columns]
        unread_columns = {name: rewards[name] for name in expected_names if name not in reward_columns}
        all_notes = (tokens.note, *notes, unread_note(unread_columns), missing_note(reward_columns))
        step_n = torch.tensor(steps, dtype=torch.long)
        return RolloutTable(
            source,
            path,
            " ".join(filter(None, all_notes)),
            prompts,
            group_n,
            step_n,
            tokens.ids,
            tokens.trainable,
            tokens.vocabulary,
            columns={name: values for name, values in columns.items() if not is_computed(name)},
            rewards=reward_columns,
            keyed=keys is not None,
            as_recorded=training_record(reward_columns, columns),
            rollout_n=rollout_n,
            trained=tuple(name for name in compared_reward_names or trained if name in reward_columns),
        )


def finite(value: Any) -> float | None:
    """Convert a finite number to a float, and anything else to None."""
    try:
        return float(value) if math.isfinite(value) else None
    except (TypeError, OverflowError):  # `value` is no number, or an integer too large for a float
        return None


def parse_rewards(columns: Mapping[str, Sequence[Any]]) -> dict[str, Reward]:
    """Read as rewards each column that holds numbers, at least one of them finite, and otherwise only missing values."""
    rewards: dict[str, Reward] = {}
    for name, values in columns.items():
        reward_floats = [finite(value) for value in values]
        are_numbers = all(_is_number_or_none(value) or is_number_text(value) for value in values)
        if are_numbers and any(value is not None for value in reward_floats):
            # A file does not say whether the block of a missing reward was absent.
            rewards[name] = Reward.of(reward_floats, status=[Status.UNSCORED] * len(reward_floats))
    return rewards


def _is_number_or_none(value: Any) -> bool:
    return value is None or isinstance(value, (bool, int, float))


def unread_note(columns: Mapping[str, Sequence[Any]]) -> str:
    """Tell the user which columns hold texts or lists in place of rewards."""
    example_by_column = {
        name: next((v for v in values if not (_is_number_or_none(v) or (isinstance(v, str) and v.strip() in NOTHING))), None)
        for name, values in columns.items()
    }
    column_phrases = [f"'{name}' (such as {cell!r:.40})" for name, cell in example_by_column.items() if cell is not None]
    return (
        f"These columns are no rewards, because they hold texts or lists instead of numbers: {', '.join(column_phrases)}."
        if column_phrases
        else ""
    )


def is_computed(name: str) -> bool:
    """Return whether a column holds advantages or credit that a trainer computed from rewards."""
    return name == "advantage" or name.startswith("credit/")


def training_record(rewards: Mapping[str, Reward], columns: Mapping[str, Sequence[Any]]) -> AsRecorded | None:
    """Return the advantages, credit or rewards that a trainer used."""
    computed_columns = parse_rewards({name: values for name, values in columns.items() if is_computed(name)})
    candidate_rewards = {**rewards, **computed_columns}
    used_name = next((name for name in ("advantage", "score", "reward") if name in candidate_rewards), None)
    if used_name is None:
        return None
    block_credit = {name.removeprefix("credit/"): x.value_n for name, x in computed_columns.items() if name != "advantage"}
    credit_source = "the file's column 'credit/BLOCK' for each block"
    if not block_credit:
        baseline_note = "" if used_name == "advantage" else ", from which nothing is subtracted"
        credit_source = f"the file's '{used_name}'{baseline_note}"
    return AsRecorded(credit_source, candidate_rewards[used_name].value_n.numpy(), by_block=block_credit)


def missing_note(rewards: Mapping[str, Reward]) -> str:
    """Tell the user how many recorded rewards are missing."""
    missing_counts = {name: int((reward.status_n != int(Status.OK)).sum()) for name, reward in rewards.items()}
    missing_phrases = [f"{n} of {len(rewards[name].value_n)} values of '{name}'" for name, n in missing_counts.items() if n]
    if len(missing_phrases) > 4:
        missing_phrases[4:] = [f"values of {len(missing_phrases) - 4} more columns"]
    if not missing_phrases:
        return ""
    return (
        f"Some recorded numbers are missing or not finite: {', '.join(missing_phrases)}. A completion whose number is "
        "missing has no reward, and baselines leave it out."
    )


def split_pieces(text: str) -> list[str]:
    """Split a text into tags, words, values of JSON and white space. The pieces, joined, are the text again."""
    text_parts = _VALUE_START.split(text) if _OBJECT.search(text) else [text]
    return [piece for text_part in text_parts for piece in _PIECE.findall(text_part)]


def tokenize(completions: Iterable[Parts], tokenizer: str | Path | None = None) -> TokenizedTexts:
    """Split completions into tokens, or into words without a tokenizer."""
    flat_token_ids = DiskArray(np.int32)
    token_counts = array("q")
    sampled_text_flags = array("b")
    text_counts = array("q")
    changed_count = 0

    def iterate_texts() -> Iterator[str]:
        for parts in completions:
            text_counts.append(len(parts))
            for text, is_sampled in parts:
                sampled_text_flags.append(is_sampled)
                yield text

    if tokenizer is None:
        id_of_piece: dict[str, int] = {}
        for text in iterate_texts():
            token_ids = [id_of_piece.setdefault(piece, len(id_of_piece)) for piece in split_pieces(text)]
            flat_token_ids.extend(token_ids)
            token_counts.append(len(token_ids))
        vocabulary = Vocabulary(tuple(piece.encode() for piece in id_of_piece) or (b"",))
        token_note = "The file holds no token ids; credit is shown per word." if id_of_piece else ""
    else:
        encoder, vocabulary = load_tokenizer(tokenizer)
        text_iterator = iterate_texts()
        while text_chunk := list(islice(text_iterator, AT_ONCE)):
            for text, encoding in zip(text_chunk, encoder.encode_batch(text_chunk, add_special_tokens=False), strict=True):
                token_ids = np.array(encoding.ids, np.int32)  # an array takes less memory than the tokenizer's `encoding`
                flat_token_ids.extend(token_ids)
                token_counts.append(len(token_ids))
                changed_count += vocabulary.join(token_ids)[0] != text.encode()
        token_note = f"The file holds no token ids; the text is encoded with the tokenizer of '{tokenizer}'."
        if changed_count:
            token_note += f" Encoding changes {changed_count} of {len(token_counts)} texts. Check the tokenizer."
    text_token_edges = np.cumsum([0, *token_counts])
    completion_edges = text_token_edges[np.cumsum([0, *text_counts])]
    is_trainable = np.broadcast_to(np.True_, completion_edges[-1])  # to save memory, one stored True stands for every token
    if not all(sampled_text_flags):
        is_trainable = np.repeat(np.array(sampled_text_flags, np.bool_), token_counts)
    return TokenizedTexts(Ragged(flat_token_ids.read(), completion_edges), is_trainable, vocabulary, token_note)


def load_tokenizer(folder: str | Path) -> tuple[Any, Vocabulary]:
    """Load a local folder's tokenizer, with the bytes of every token id."""
    tokenizer_path = Path(folder)
    tokenizer_file = tokenizer_path if tokenizer_path.is_file() else tokenizer_path / "tokenizer.json"
    file_stat = tokenizer_file.stat() if tokenizer_file.is_file() else None
    file_stamp = (0, 0) if file_stat is None else (file_stat.st_mtime_ns, file_stat.st_size)
    try:
        model_config = json.loads(tokenizer_file.with_name("config.json").read_text(encoding="utf-8"))
        vocabulary_size = model_config.get("vocab_size")
    except (OSError, ValueError, AttributeError):
        vocabulary_size = None
    return _load_file(tokenizer_file, file_stamp, vocabulary_size if isinstance(vocabulary_size, int) else None)


@lru_cache(maxsize=1)
def _load_file(file: Path, stamp: tuple[int, int], vocabulary_size: int | None) -> tuple[Any, Vocabulary]:
    """Load a tokenizer file. It stays in memory until another is loaded or the file's `stamp` changes."""
    from tokenizers import Tokenizer

    try:
        loaded_tokenizer = Tokenizer.from_str(file.read_text(encoding="utf-8"))
    except FileNotFoundError as error:
        raise DataError(
            f"'{file.parent}' holds no tokenizer.json; give the folder of a model or of a fast tokenizer."
        ) from error
    except Exception as error:  # the Rust parser raises plain Exception
        raise DataError(f"'{file}' is not a readable tokenizer: {first_line(error)}.") from error
    loaded_tokenizer.no_truncation()
    loaded_tokenizer.no_padding()
    return loaded_tokenizer, Vocabulary.from_tokenizer(loaded_tokenizer, size=vocabulary_size)
