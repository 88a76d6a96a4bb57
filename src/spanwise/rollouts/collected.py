"""Collect the completions of a file as columns."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from spanwise.rollouts.columns import ColumnBuilder
from spanwise.rollouts.table import Ragged, RolloutTable, TokenizedTexts, load_tokenizer
from spanwise.rollouts.token_rows import TokenRows

#: The note for the user if the tokenizer of a file is unknown.
PER_WORD = "Credit is shown per word. To see credit per token, give the tokenizer's folder with --tokenizer."


@dataclass
class Collected:
    """The completions of a file by column. Their tokens lie on disk."""

    fields: ColumnBuilder = field(default_factory=ColumnBuilder)
    rewards: ColumnBuilder = field(default_factory=ColumnBuilder)
    columns: ColumnBuilder = field(default_factory=ColumnBuilder)
    tokens: TokenRows = field(default_factory=TokenRows)

    def append(self, fields: Mapping[str, Any], rewards: Mapping[Any, Any], columns: Mapping[str, Any]) -> None:
        """Add a completion."""
        self.fields.append(fields)
        self.rewards.append(rewards)
        self.columns.append(columns)

    def values(self, name: str) -> list[Any]:
        """Return one field's values for all completions."""
        return self.fields.columns.get(name, [])

    def load_tokens(self, tokenizer: str | Path) -> TokenizedTexts:
        """Return the token ids that the rollout file holds, with the vocabulary of a tokenizer in a local folder."""
        token_ids = Ragged(self.tokens.ids.read(), self.tokens.offsets)
        return TokenizedTexts(token_ids, self.tokens.trainable.read(), load_tokenizer(tokenizer)[1], "")

    def table(self, source: str, path: Path, tokens: TokenizedTexts, **options: Any) -> RolloutTable:
        """Return the completions as a table. The options are those of `RolloutTable.of`, such as `keys` and `notes`."""
        options |= {"columns": self.columns.columns, "rewards": self.rewards.columns}
        return RolloutTable.of(source, path, tokens, prompts=self.values("prompt"), steps=self.values("step"), **options)
