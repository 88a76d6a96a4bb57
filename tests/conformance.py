"""One set of rollouts for every engine, with the advantages that each recipe gives their tokens.

The rollouts: groups of 4, 3, 2 and 1; tool output, missing blocks, a completion that was cut off, a unanimous group;
conversations of one to three turns, and one whose history branches. `python tests/conformance.py` writes `conformance.json` anew:
the rollouts as ids, and the advantages as loops over the definitions give them, in float64. Every adapter must give these.
"""

import inspect
import json
import random
import sys
from functools import cache
from itertools import accumulate
from pathlib import Path
from types import ModuleType

from oracles import average, slow_gigpo

FILE = Path(__file__).with_suffix(".json")
PIECES = ["<pad>", "<eos>", "<answer>", "</answer>", "<confidence>", "</confidence>", "<tool>", *"0123456789.+=?ab",
          '{"a":', '"n":[', ",", "]", "}"]  # fmt: skip
LAYOUT = "layout: {solution: [answer], confidence: [confidence]}\n"
RECIPES = {
    "blocks": LAYOUT + "method: bae\nobjectives:\n"
    "  - {reward: correct, pays: [solution], options: {verify: exact}}\n"
    "  - {reward: brier, pays: [confidence], given: correct, baseline: outcome, if_missing: -1.0}\n",
    "turns": LAYOUT + "method: bae\nobjectives:\n"
    "  - {reward: correct, pays: [solution], options: {verify: exact}}\n"
    "  - {reward: environment, pays: [confidence], scope: turn, options: {column: paid}}\n",
    "fields": "layout: {rest: [], a: a, 'n[*]': 'n[*]'}\nsegmenter: json\nmost: 2\nmethod: bae\nobjectives:\n"
    "  - {reward: equals, each: a, if_missing: 0.0}\n"
    "  - {reward: equals, each: 'n[*]', given: earlier, baseline: outcome, name: n}\n",
    # The same verdicts from a function that is awaited.
    "waits": LAYOUT + "method: bae\nobjectives:\n"
    "  - {reward: 'conformance:right', name: correct, pays: [solution]}\n"
    "  - {reward: brier, pays: [confidence], given: correct, baseline: outcome, if_missing: -1.0}\n",
    "gigpo": LAYOUT + "method: gigpo\nper: completion\nobjectives:\n"
    "  - {reward: environment, pays: [solution, confidence], options: {column: paid}}\n",
}
SOLUTION, CONFIDENCE, NOBODY = 0, 1, -1
REST, A, FIRST, SECOND = 0, 1, 2, 3
GOLD = '{"a":4,"n":[1,2]}'


#: One block for the whole completion; what the environment pays.
WHOLE = "layout: {all: [answer]}\nmethod: grpo\nobjectives: [{reward: environment, pays: all}]\n"
RLOO = WHOLE.replace("grpo", "rloo") + "per: completion\n"
#: The rollouts of each recipe; those of turns have several rows each.
ROWS = {"blocks": "flat", "waits": "flat", "fields": "fields", "turns": "turns", "gigpo": "turns"}


async def right(blocks, answer):
    """Return 1.0 for each completion with the right answer, after a short sleep."""
    import asyncio

    await asyncio.sleep(0.001)
    return [float(text["solution"]["answer"] == gold) for text, gold in zip(blocks, answer, strict=True)]


def ids(pieces):
    return [PIECES.index(piece) for piece in pieces]


def completion(thought, answer, confidence, *, tool="", end=("<eos>",)):
    """Return the pieces of a completion and the block of each."""
    solution = [*thought, *tool, "<answer>", answer, "</answer>"] if answer else list(thought)
    blocks = [*[SOLUTION] * len(thought), *[NOBODY] * len(tool), *[SOLUTION] * (3 if answer else 0)]
    report = ["<confidence>", *str(confidence), "</confidence>"] if confidence is not None else []
    blocks += [CONFIDENCE] * len(report)
    last = CONFIDENCE if report else SOLUTION
    return [*solution, *report, *end], [*blocks, *[last] * len(end)]


#: (group, question, answer, thought, said, confidence, more)
FLAT = [
    ("g4", "2+2=", "4", "ab", "4", 0.9, {"tool": "77"}),
    ("g4", "2+2=", "4", "b", "4", 0.6, {}),
    ("g2", "1+1=", "2", "a", "2", 0.5, {}),
    ("g4", "2+2=", "4", "aabb", "3", 0.8, {"tool": "4"}),
    ("g3", "1+2=", "3", "a", "3", 0.75, {"tool": "bbb"}),
    ("g3", "1+2=", "3", "bb", "3", None, {}),
    ("g1", "3+3=", "6", "a", "6", 0.4, {}),
    ("g4", "2+2=", "4", "b", "5", 0.1, {}),
    ("g2", "1+1=", "2", "bb", "2", 0.7, {"tool": "1"}),
    ("g3", "1+2=", "3", "abab", "7", None, {"end": ()}),  # cut off before it reports
]
#: (group, question, answer, turns); a turn is (thought, said, confidence, what the environment pays it, anchor).
TALKS = [
    ("h3", "2+2=", "4", [("a", "1", 0.5, 1.0, "s"), ("bb", "2", 0.9, 0.0, "t"), ("", "4", 0.7, 1.0, "u")]),
    ("h3", "2+2=", "4", [("ab", "4", 0.3, 0.25, "s")]),
    ("h3", "2+2=", "4", [("", "3", 0.5, 0.0, "s"), ("a", "5", None, 0.5, "t")]),
    ("h2", "1+2=", "3", [("b", "2", 0.8, 1.0, "s"), ("", "3", 0.2, 1.0, "v")]),
    ("h2", "1+2=", "3", [("ba", "7", 0.6, 0.0, "s"), ("a", "3", 0.4, 1.0, "v")]),
]
#: A rollout whose second turn starts from an edited history, beside one that does not: only rows can hold it.
BRANCHED = [
    ("hb", "1+1=", "2", [("a", "1", 0.1, 0.5, "s"), ("b", "2", 0.9, 1.0, "t")]),
    ("hb", "1+1=", "2", [("aa", "2", 0.4, 0.0, "s")]),
]
#: (group, a, the elements of n, more): JSON whose blocks lie between the pieces of the rest; a comma reads no further than it is.
JSON = [
    ("g4", "4", "12", {"tool": "77"}),
    ("g4", "4", "13", {"before": "ab"}),
    ("g4", "3", "12", {}),
    ("g4", "4", "9", {}),
    ("g3", None, "12", {}),
    ("g3", "4", "32", {"tool": "1"}),
    ("g3", "5", "31", {}),
    ("g2", "4", "1", {"cut": True}),
    ("g2", "4", "12", {"tool": "2"}),
    ("g1", "4", "11", {}),
]
BETWEEN = ("<tool>", "+")  # what the environment says between two turns


def row_of(group, question, answer, pieces, blocks, **more):
    sampled = [int(block >= 0) for block in blocks]
    about = {"group": group, "question": question, "answer": answer, "prompt": ids(question)}
    return {**about, "ids": ids(pieces), "sampled": sampled, "blocks": blocks, **more}


def flat_rows():
    rows = []
    for group, question, answer, thought, answered, confidence, more in FLAT:
        pieces, blocks = completion(thought, answered, confidence, **more)
        facts = {"right": float(answered == answer), "confidence": confidence}
        rows.append(row_of(group, question, answer, pieces, blocks, **facts))
    return rows


def field_rows():
    rows = []
    for group, a, elements, more in JSON:
        written = [(sign, REST) for sign in more.get("before", "")]
        if a is not None:
            written += [('{"a":', REST), *((sign, NOBODY) for sign in more.get("tool", "")), (a, A), (",", REST)]
        else:
            written += [("=", REST), ('{"a":', REST)]  # no value: a key follows, so this field holds nothing
        written.append(('"n":[', REST))
        for number, element in enumerate(elements):
            written += [*[(",", REST)] * (number > 0), (element, FIRST + number)]
        written += [] if more.get("cut") else [("]", REST), ("}", REST), ("<eos>", REST)]
        pieces, blocks = map(list, zip(*written, strict=True))
        right = [float(gold == element) for gold, element in zip("12", elements, strict=False)]
        if more.get("cut"):
            right[-1] = 0.0  # the element has no end, so it holds nothing
        rows.append(row_of(group, "?", GOLD, pieces, blocks, a=a and float(a == "4"), n=right))
    return rows


def turn_rows(talks, *, edited=False):
    """Return a row per turn, with everything before it as its prompt; an edited history begins with another sign."""
    rows = []
    for n, (group, question, answer, turns) in enumerate(talks):
        context = ids(question)
        for step, (thought, answered, confidence, paid, anchor) in enumerate(turns):
            pieces, blocks = completion(thought, answered, confidence, end=("<eos>",) if step == len(turns) - 1 else ())
            prompt = ids("?") + context[1:] if edited and step else list(context)
            facts = {"prompt": prompt, "paid": paid, "anchor": anchor, "right": float(answered == answer)}
            rows.append(row_of(group, question, answer, pieces, blocks, rollout=f"{group}/{n}", step=step, **facts))
            context += ids(pieces) + ids(BETWEEN)
    return rows


def rollouts():
    turns = turn_rows(TALKS) + turn_rows(BRANCHED, edited=True)
    return {"flat": flat_rows(), "fields": field_rows(), "turns": turns}


def shared(row, credit, sizes, stop=0.0):
    """Credit of the solution and of the confidence over their tokens; that of stopping on the last token of the model."""
    tokens = [credit[block] / sizes[block] if block >= 0 else 0.0 for block in row["blocks"]]
    last = max(t for t, block in enumerate(row["blocks"]) if block >= 0)
    tokens[last] += stop
    return tokens


def brier(row):
    return -((row["confidence"] - row["right"]) ** 2)


def blocks_credit(rows):
    """The credit of the solution, of the confidence, and of stopping."""
    credit = []
    for row in rows:
        group = [mate for mate in rows if mate["group"] == row["group"]]
        solution = row["right"] - average([mate["right"] for mate in group]) if len(group) > 1 else 0.0
        everyone = [brier(mate) for mate in group if mate["confidence"] is not None]
        alike = [brier(mate) for mate in group if mate["confidence"] is not None and mate["right"] == row["right"]]
        if row["confidence"] is None:  # compared with its stratum, or with the group if the stratum is empty
            credit.append((solution, 0.0, -1.0 - average(alike or everyone)))
        else:
            credit.append((solution, brier(row) - average(alike) if len(alike) > 1 else 0.0, 0.0))
    return credit


def blocks_advantages(rows):
    advantages = []
    for row, (*parts, stop) in zip(rows, blocks_credit(rows), strict=True):
        sizes = [max(row["blocks"].count(block), 1) for block in (SOLUTION, CONFIDENCE)]
        advantages.append(shared(row, parts, sizes, stop=stop))
    return advantages


def fields_advantages(rows):
    advantages = []
    for row in rows:
        group = [mate for mate in rows if mate["group"] == row["group"]]
        present = [mate["a"] for mate in group if mate["a"] is not None]
        credit, stop = [0.0, 0.0, 0.0, 0.0], 0.0
        if row["a"] is None:
            stop = 0.0 - average(present)
        elif len(present) > 1:
            credit[A] = row["a"] - average(present)
        first = [mate["n"][0] for mate in group]
        credit[FIRST] = row["n"][0] - average(first) if len(first) > 1 else 0.0
        alike = [mate["n"][1] for mate in group if len(mate["n"]) > 1 and mate["n"][0] == row["n"][0]]
        if len(row["n"]) > 1 and len(alike) > 1:
            credit[SECOND] = row["n"][1] - average(alike)
        sizes = [max(row["blocks"].count(block), 1) for block in (REST, A, FIRST, SECOND)]
        advantages.append(shared(row, credit, sizes, stop=stop))
    return advantages


def turns_advantages(rows):
    last = {row["rollout"]: row["right"] for row in rows}  # the last turn that answers speaks for the rollout
    advantages = []
    for row in rows:
        mates = {other["rollout"] for other in rows if other["group"] == row["group"]}
        solution = last[row["rollout"]] - average([last[name] for name in sorted(mates)])
        votes = []
        for name in sorted(mates):
            paid = [other["paid"] for other in rows if other["rollout"] == name and CONFIDENCE in other["blocks"]]
            votes += [average(paid)] if paid else []
        turns = [other for other in rows if other["rollout"] == row["rollout"]]
        sizes = [max(sum(other["blocks"].count(block) for other in turns), 1) for block in (SOLUTION, CONFIDENCE)]
        advantages.append(shared(row, [solution, row["paid"] - average(votes)], sizes))
    return advantages


def gigpo_advantages(rows):
    names = ("paid", "group", "rollout", "step", "anchor")
    batch = [[row[name] for row in rows] for name in names]
    # The episodes are compared over rows, as its authors' code does.
    options = {"gamma": 0.95, "scale": "none", "over": "rows", "reward": "sum", "step_weight": 1.0, "ddof": 1, "eps": 0.0}
    advantages = []
    for row, credit in zip(rows, slow_gigpo(batch, **options).tolist(), strict=True):
        size = sum(len(other["ids"]) for other in rows if other["rollout"] == row["rollout"])
        advantages.append(shared(row, [credit] * 2, [size] * 2))
    return advantages


def written():
    rows = rollouts()
    loops = {"blocks": blocks_advantages, "waits": blocks_advantages, "fields": fields_advantages,
             "turns": turns_advantages, "gigpo": gigpo_advantages}  # fmt: skip
    advantages = {name: function(rows[ROWS[name]]) for name, function in loops.items()}
    return {"pieces": PIECES, "recipes": RECIPES, "rollouts": rows, "advantages": advantages}


@cache
def load():
    return json.loads(FILE.read_text())


def expected(name, *, whole=False):
    """The rows of a recipe, and the advantages of their tokens; `whole`: a conversation of several turns is one row."""
    rows, advantages = load()["rollouts"][ROWS[name]], load()["advantages"][name]
    return (sequences(rows), of_sequences(rows, advantages)) if whole and ROWS[name] == "turns" else (rows, advantages)


def assert_rows(advantages, wanted, tolerance=1e-6):
    """Check that the numbers are the same, row by row."""
    import pytest

    for values, numbers in zip(advantages, wanted, strict=True):
        assert values == pytest.approx(numbers, abs=tolerance)


def check_symmetries(engine):
    """The order of rows does not matter, masking is deletion, and a group of one gets nothing; `engine`: rows to advantages."""
    rows = load()["rollouts"]["flat"]
    order = random.Random(3).sample(range(len(rows)), len(rows))
    advantages, shuffled = engine(rows), engine([rows[n] for n in order])
    assert [shuffled[order.index(n)] for n in range(len(rows))] == advantages
    sampled = [[(i, t) for t, (i, flag) in enumerate(zip(row["ids"], row["sampled"], strict=True)) if flag] for row in rows]
    bare = [
        {**row, "ids": [i for i, _ in kept], "sampled": [1] * len(kept)} for row, kept in zip(rows, sampled, strict=True)
    ]
    for row, values, kept, alone in zip(rows, advantages, sampled, engine(bare), strict=True):
        assert [values[t] for _, t in kept] == alone
        assert not any(value for value, flag in zip(values, row["sampled"], strict=True) if not flag)
        assert row["group"] != "g1" or not any(values)


def replace_trainer(monkeypatch, takes, values):
    """Put values at the dotted names of a trainer that is not installed, and a tokenizer in the place of its model's.

    takes: the parameters of the function at each name, as its contract has them; None: it is no function.
    """
    from spanwise.engines import recipe_run

    for path, parameters in takes.items():
        module, _, name = path.rpartition(".")
        if parameters is not None:
            assert [*inspect.signature(values[name]).parameters] == parameters
        for part in accumulate(module.split("."), "{}.{}".format):
            if part not in sys.modules:
                monkeypatch.setitem(sys.modules, part, ModuleType(part))
        setattr(sys.modules[module], name, values[name])
    named = type("Named", (), {"from_pretrained": lambda *_, **__: tokenizer()})
    monkeypatch.setattr(recipe_run, "AutoTokenizer", named)
    monkeypatch.setattr(recipe_run, "model_vocabulary_size", lambda path: None)


def sequences(rows):
    """The turns of each rollout as one row, with what the environment said in between; branched histories are left out."""
    by_rollout = {}
    for row in rows:
        if row["group"] == "hb":
            continue
        empty = {key: [] for key in ("ids", "sampled", "turns")}
        sequence = by_rollout.setdefault(row["rollout"], {**row, **empty})
        between = row["prompt"][len(sequence["prompt"]) + len(sequence["ids"]) :]
        sequence["ids"] += [*between, *row["ids"]]
        sequence["sampled"] += [*[0] * len(between), *row["sampled"]]
        sequence["turns"].append({"anchor": row["anchor"], "paid": row["paid"]})
    return list(by_rollout.values())


def of_sequences(rows, advantages):
    """The advantages of rows at their places in `sequences(rows)`."""
    by_rollout = {}
    for row, values in zip(rows, advantages, strict=True):
        by_rollout.setdefault(row["rollout"], []).extend(values)
    placed = []
    for sequence in sequences(rows):
        values = iter(by_rollout[sequence["rollout"]])
        placed.append([next(values) if flag else 0.0 for flag in sequence["sampled"]])
    return placed


def tokenizer():
    """A real tokenizer with one token for each piece."""
    from tokenizers_small import tag_level

    return tag_level(PIECES)


def scheme(name, folder):
    """The recipe as an engine reads it: from a file."""
    from spanwise.recipe import scheme_at

    path = Path(folder) / f"{name}.yaml"
    path.write_text(RECIPES[name])
    return scheme_at(path, longest=64)


def by_pipeline(rows, rule):
    """Return the advantages of rows as unpadded float64 lists; every adapter must give exactly these."""
    import torch

    from spanwise import Batch, Steps, Vocabulary, advantages, credit_batch, read

    columns = {name: [row.get(name) for row in rows] for name in ("answer", "paid")}
    steps = None
    if "rollout" in rows[0]:
        names = {name: j for j, name in enumerate(dict.fromkeys(row["rollout"] for row in rows))}
        of_row = torch.tensor([names[row["rollout"]] for row in rows])
        steps = Steps(of_row, torch.tensor([row["step"] for row in rows]), [row["anchor"] for row in rows])
    groups, sampled = [row["group"] for row in rows], [row["sampled"] for row in rows]
    batch = Batch.jagged([row["ids"] for row in rows], groups, sampled=sampled, columns=columns, steps=steps)
    reading = read(batch, rule, Vocabulary.from_tokenizer(tokenizer()))
    adv_nt = advantages(credit_batch(reading, batch, rule), reading.spans, rule, dtype=torch.float64)
    return [values[: len(row["ids"])] for row, values in zip(rows, adv_nt.tolist(), strict=True)]


if __name__ == "__main__":
    FILE.write_text(json.dumps(written(), indent=None, separators=(",", ":")).replace('},{"group"', '},\n{"group"') + "\n")
