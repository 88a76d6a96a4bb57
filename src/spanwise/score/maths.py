"""`MathVerifier`: equality of mathematical answers, checked in processes that can be killed.

Math-Verify may hang, eat memory or take its process down on a hostile answer, and its own timeout works in a main thread only.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from spanwise.errors import DataError
from spanwise.score.workers import DEADLINE, Verdict, Workers, shared_workers


class MathVerifier(Workers):
    """Check answers against gold answers with Math-Verify, in worker processes with a deadline; see `spanwise.score.workers`.

    Args:
        workers: how many processes check at a time; None: one for each core of this process. They start on first use, and no more
            of them than there are checks to make.
        deadline: seconds of processor time one check may take. By the clock it may take four times that and ten seconds more.
        memory: address space of a worker in bytes, 0 for no limit (not enforced on Windows).
        cache: how many verdicts are kept, by (gold, answer).

    Raises:
        DataError: Math-Verify is not installed (on the first check).
        RewardError: the first workers of all cannot start, three times in a row. A later start that fails costs its item (ERROR).

    Example:
        >>> with MathVerifier() as verifier:
        ...     [verdict.value for verdict in verifier.equal([("1/2", "0.50"), ("1/2", "2")])]
        [1.0, 0.0]
    """

    script = Path(__file__).with_name("math_worker.py")
    what = "Math-Verify"
    advice = "Without it no answer can be compared; set verify: exact to compare text."

    def equal(self, pairs: Sequence[tuple[str, str]]) -> list[Verdict]:
        """Check every (gold, answer) pair; the verdicts come in the order of the pairs.

        OK with 1.0 or 0.0; TIMEOUT past the deadline; ERROR if the gold answer cannot be read, or the process died or ran
        out of memory. An answer that cannot be read is not equal: 0.0.
        """
        return self.check(pairs)

    def _running_threads(self) -> ThreadPoolExecutor:
        if self._threads is None and importlib.util.find_spec("math_verify") is None:
            raise DataError(
                "Comparing answers as mathematics needs Math-Verify: install 'spanwise[math]', or set verify: exact."
            )
        return super()._running_threads()


def shared_verifier(*, workers: int | None = None, deadline: float | int = DEADLINE) -> MathVerifier:
    """The verifier of these limits that the built-in rewards use, made on first use and closed when Python ends.

    Args:
        workers, deadline: see `MathVerifier`.

    >>> shared_verifier() is shared_verifier(deadline=5.0)
    True
    """
    return shared_workers(MathVerifier, workers=workers, deadline=deadline)
