"""Write the training prompts of the paper's recipes: 7,500 of MATH and 17,398 of DAPO, columns `question` and `answer`.

    python recipes/math_dapo.py data/math_dapo.jsonl

The paper says "25k prompts from MATH and DAPO" and no more; these two sets add up to that. Only the training split of MATH is read,
so that MATH-500, which comes from its test split, stays unseen.
"""

from __future__ import annotations

import re
import sys
from pathlib import Path

from datasets import Dataset, concatenate_datasets, load_dataset

SUBJECTS = (
    "algebra",
    "counting_and_probability",
    "geometry",
    "intermediate_algebra",
    "number_theory",
    "prealgebra",
    "precalculus",
)


def boxed(solution: str) -> str:
    r"""What the last box of a worked solution holds.

    >>> boxed(r"so $\boxed{1}$, or rather $x = \boxed{\frac{1}{2}}$.")
    '\\frac{1}{2}'
    """
    _, *boxes = re.split(r"\\(?:boxed|fbox)\s*", solution)
    if not boxes or boxes[-1][:1] != "{":
        return boxes[-1].partition("$")[0].strip() if boxes else ""  # as in "$x = \boxed 3$"
    depth = 0
    for place, sign in enumerate(boxes[-1]):
        depth += {"{": 1, "}": -1}.get(sign, 0)
        if depth == 0:
            return boxes[-1][1:place]
    return ""


def questions(rows: Dataset, *, question: str, solution: str, box: bool) -> Dataset:
    """Two columns of text, without rows that have no answer."""
    answers = [boxed(text) if box else str(text).strip() for text in rows[solution]]
    pairs = [(str(q).strip(), a) for q, a in zip(rows[question], answers, strict=True) if a]
    return Dataset.from_dict({"question": [q for q, _ in pairs], "answer": [a for _, a in pairs]})


def main(target: str) -> None:
    """Read both sets from the hub and write one file."""
    maths = concatenate_datasets([load_dataset("EleutherAI/hendrycks_math", subject, split="train") for subject in SUBJECTS])
    dapo = load_dataset("open-r1/DAPO-Math-17k-Processed", "all", split="train")
    both = concatenate_datasets(
        [
            questions(maths, question="problem", solution="solution", box=True),
            questions(dapo, question="prompt", solution="solution", box=False),
        ]
    ).shuffle(seed=0)
    Path(target).parent.mkdir(parents=True, exist_ok=True)
    both.to_json(target)
    print(f"{target}: {len(both)} prompts. {len(maths) + len(dapo) - len(both)} rows without an answer are left out.")


if __name__ == "__main__":
    if len(sys.argv) != 2:
        raise SystemExit("Name the file to write: python recipes/math_dapo.py data/math_dapo.jsonl")
    main(sys.argv[1])
