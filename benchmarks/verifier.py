"""How many answers a second are compared as mathematics, and what three answers that hang cost at every batch.

python benchmarks/verifier.py        # prints the lines of docs/reliability.md; a minute
"""

from __future__ import annotations

import time

from spanwise.score import MathVerifier
from spanwise.score.workers import cores

ANSWERS = [(r"\frac{1}{2}", f"\\frac{{{n}}}{{{2 * n + 1}}}+x^{n}") for n in range(1, 200)]
HANGS = [("4", r"$9^{9^{9^{9}}}$" + " " * n) for n in range(3)]


def seconds(verifier: MathVerifier, pairs: list[tuple[str, str]]) -> float:
    """How long a batch takes."""
    started = time.perf_counter()
    verifier.equal(pairs)
    return time.perf_counter() - started


def main() -> None:
    """One worker, then one for each core."""
    for workers in sorted({1, cores()}):
        with MathVerifier(workers=workers) as verifier:
            verifier.equal([("1/2", f"{n}/{2 * n}") for n in range(4 * workers)])  # all of them have started
            speed = len(ANSWERS) / seconds(verifier, ANSWERS)
            hung = ", ".join(f"{seconds(verifier, HANGS):.1f}" for _ in range(3))
            print(f"{workers} worker(s): {speed:.0f} answers a second; three batches with the same three hangs: {hung} s")


if __name__ == "__main__":
    main()
