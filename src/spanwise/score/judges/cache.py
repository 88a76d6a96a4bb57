"""Keep a judge's verdicts in a SQLite file by content, so that a second run asks nothing; several processes may share it."""

from __future__ import annotations

import json
import sqlite3
import threading
import warnings
from collections.abc import Collection, Mapping
from hashlib import sha256
from pathlib import Path
from typing import Any

from spanwise.errors import RecipeError

_TABLE = (
    "CREATE TABLE IF NOT EXISTS judgements "
    "(question TEXT PRIMARY KEY, prompt TEXT, value REAL, reason TEXT, tokens INTEGER, place TEXT)"
)


def digest(content: Any) -> str:
    """Return the name of a content: equal JSON has equal names."""
    return sha256(json.dumps(content, sort_keys=True, ensure_ascii=False).encode(errors="surrogatepass")).hexdigest()


class Cache:
    """Verdicts by the digest of all that was asked: model, messages, choices.

    >>> cache = Cache(":memory:", "memory", prompt="a")
    >>> cache.put("q", 1.0, "because", 12)
    >>> cache.get(["q", "r"])
    {'q': (1.0, 'because', 12, None)}
    """

    def __init__(self, path: str, name: str, prompt: str) -> None:
        self.prompt, self._lock = prompt, threading.Lock()
        try:
            Path(path).parent.mkdir(parents=True, exist_ok=True)
            # Other processes may write for as long as a slow disk takes.
            self._file = sqlite3.connect(path, timeout=60.0, isolation_level=None, check_same_thread=False)
            self._file.execute("PRAGMA journal_mode=WAL")
            self._file.execute("PRAGMA synchronous=NORMAL")
            self._file.execute(_TABLE)
            counts = self._file.execute("SELECT prompt, COUNT(*) FROM judgements GROUP BY prompt").fetchall()
        except (OSError, sqlite3.Error) as error:
            raise RecipeError(f"The judge's cache '{name}' is no cache of verdicts: {error}. Name another file.") from error
        prompts: Mapping[str, int] = dict(counts)
        if prompts and prompt not in prompts:
            warnings.warn(
                f"The judge's cache '{name}' holds {sum(prompts.values())} verdicts, all of another prompt, model or choices, "
                f"so that every question is asked anew. If that is not what you meant, set back what you changed.",
                UserWarning,
                stacklevel=2,
            )

    def get(self, questions: Collection[str]) -> dict[str, tuple[float, str | None, int, str | None]]:
        """Return what is known of these questions."""
        with self._lock:
            rows = (
                self._file.execute("SELECT * FROM judgements WHERE question = ?", (name,)).fetchone() for name in questions
            )
            return {row[0]: row[2:] for row in rows if row is not None}

    def put(self, question: str, value: float, reason: str | None, tokens: int, place: str | None = None) -> None:
        """Keep one verdict."""
        with self._lock:
            row = (question, self.prompt, value, reason, tokens, place)
            self._file.execute("INSERT OR REPLACE INTO judgements VALUES (?, ?, ?, ?, ?, ?)", row)
