"""Completions and objectives that tests of rewards share."""

from spanwise import Batch, Objective, Status, Vocabulary
from spanwise.score.score import score_one

BYTES = Vocabulary(tuple(bytes([byte]) for byte in range(256)))
OK, ABSENT, UNPARSABLE, TIMEOUT, ERROR, UNSCORED, BROKE = (int(status) for status in Status)


def completion(answer="4", confidence="0.7", reasoning="r"):
    """A block is left out with False, a tag without a pair is None."""
    solution = {"": f"<reasoning>r</reasoning><answer>{answer}</answer>", "reasoning": reasoning, "answer": answer}
    report = {"": f"<analysis>a</analysis><confidence>{confidence}</confidence>", "analysis": "a", "confidence": confidence}
    return {"solution": None if answer is False else solution, "confidence": None if confidence is False else report}


def rewarded(reward, text=None, *, columns=None, **fields):
    """The rewards of one objective that pays the solution."""
    text = [completion()] if text is None else text
    return score_one(Objective(reward, **{"pays": "solution", **fields}), text, columns=columns or {}, scored={})


def byte_group(*texts, **columns):
    """One group of completions, a byte a token."""
    return Batch.jagged([list(text.encode()) for text in texts], [0] * len(texts), columns=columns)


CORRECT = Objective("correct", pays=("solution",))
BRIER = Objective("brier", pays=("confidence",), given="correct", baseline="outcome")


def trl_reward(prompts, completions, completion_ids, **kwargs):
    assert set(kwargs) == {"answer", "level"}
    return [float(len(p) + len(c) + len(i)) for p, c, i in zip(prompts, completions, completion_ids, strict=True)]
