"""Keep a judge's verdicts in a SQLite file, so that a second run need not ask again. Processes may share the file."""

from __future__ import annotations

import json
import sqlite3
import warnings
import weakref
from collections.abc import Collection
from hashlib import sha256
from pathlib import Path
from typing import Any

from spanwise.errors import RecipeError
from spanwise.score.judges.verdict import Judgement

_SET_UP = """
PRAGMA journal_mode=WAL; PRAGMA synchronous=NORMAL;
CREATE TABLE IF NOT EXISTS judgements
    (question TEXT PRIMARY KEY, prompt TEXT, value REAL, reason TEXT, tokens INTEGER, place TEXT);
"""


def digest(content: Any) -> str:
    """Return a hash of a JSON value that does not depend on the order of keys."""
    return sha256(json.dumps(content, sort_keys=True, ensure_ascii=False).encode(errors="surrogatepass")).hexdigest()


class Cache:
    """A file of a judge's verdicts. Each verdict is found by a digest of the request and of the choices' numbers."""

    def __init__(self, path: str, name: str, prompt: str) -> None:
        self.prompt = prompt
        try:
            Path(path).parent.mkdir(parents=True, exist_ok=True)
            # On a slow disk another process may lock the file for many seconds.
            self._file = sqlite3.connect(path, timeout=60.0, isolation_level=None, check_same_thread=False)
            # The garbage collector may close the file from another thread.
            weakref.finalize(self, self._file.close).atexit = False
            self._file.executescript(_SET_UP)
            verdict_counts = dict(self._file.execute("SELECT prompt, COUNT(*) FROM judgements GROUP BY prompt"))
        except (OSError, sqlite3.Error) as error:
            raise RecipeError(f"The judge's cache '{name}' is no cache of verdicts: {error}. Name another file.") from error
        if verdict_counts and prompt not in verdict_counts:
            warnings.warn(
                f"The judge's cache '{name}' holds {sum(verdict_counts.values())} verdicts, but none with this prompt, "
                "model and choices. So spanwise asks the judge every question anew. If no other objective wrote these "
                "verdicts, undo your change of prompt, model or choices.",
                stacklevel=2,
            )

    def get(self, questions: Collection[str]) -> dict[str, Judgement]:
        """Return the cached verdicts on questions, by the questions' digests."""
        select_query = "SELECT question, value, reason, tokens, place FROM judgements WHERE question = ?"
        judgement_rows = (self._file.execute(select_query, (question,)).fetchone() for question in questions)
        return {row[0]: Judgement(*row[1:]) for row in judgement_rows if row is not None}

    def put(self, question: str, verdict: Judgement) -> None:
        """Store the verdict on a question under the question's digest."""
        self._file.execute("INSERT OR REPLACE INTO judgements VALUES (?, ?, ?, ?, ?, ?)", (question, self.prompt, *verdict))
