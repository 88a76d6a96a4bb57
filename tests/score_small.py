"""Completions and objectives that tests of rewards share."""

from spanwise import Objective, Status

OK, ABSENT, UNPARSABLE, TIMEOUT, ERROR, UNSCORED, BROKE = (int(status) for status in Status)


def completion(answer="4", confidence="0.7", reasoning="r"):
    """A block is left out with False, a tag without a pair is None."""
    solution = {"": f"<reasoning>r</reasoning><answer>{answer}</answer>", "reasoning": reasoning, "answer": answer}
    report = {"": f"<analysis>a</analysis><confidence>{confidence}</confidence>", "analysis": "a", "confidence": confidence}
    return {"solution": None if answer is False else solution, "confidence": None if confidence is False else report}


CORRECT = Objective("correct", pays=("solution",))
BRIER = Objective("brier", pays=("confidence",), given="correct", baseline="outcome")


def trl_reward(prompts, completions, completion_ids, **kwargs):
    assert set(kwargs) == {"answer", "level"}
    return [float(len(p) + len(c) + len(i)) for p, c, i in zip(prompts, completions, completion_ids, strict=True)]
