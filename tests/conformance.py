"""One set of rollouts for every engine, what each recipe credits their tokens with, and the words they are made of.

The rollouts: groups of 4, 3, 2 and 1; tool output, missing blocks, a completion that was cut off, a unanimous group; conversations of
one to three turns, and one whose history branches. `python tests/conformance.py` writes `conformance.json` anew: the rollouts as ids,
and the advantages as loops over the definitions give them, in float64. Every adapter is held against that file.
"""

import json
from pathlib import Path

FILE = Path(__file__).with_suffix(".json")
PIECES = ["<pad>", "<eos>", "<answer>", "</answer>", "<confidence>", "</confidence>", "<tool>", *"0123456789.+=?ab"]
LAYOUT = "layout: {solution: [answer], confidence: [confidence]}\n"
RECIPES = {
    "blocks": LAYOUT + "method: bae\nobjectives:\n"
    "  - {reward: correct, pays: [solution], options: {verify: exact}}\n"
    "  - {reward: brier, pays: [confidence], given: correct, baseline: outcome, if_missing: -1.0}\n",
    "turns": LAYOUT + "method: bae\nobjectives:\n"
    "  - {reward: correct, pays: [solution], options: {verify: exact}}\n"
    "  - {reward: environment, pays: [confidence], scope: turn, options: {column: paid}}\n",
    "gigpo": LAYOUT + "method: gigpo\nper: completion\nobjectives:\n"
    "  - {reward: environment, pays: [solution, confidence], options: {column: paid}}\n",
}
SOLUTION, CONFIDENCE, NOBODY = 0, 1, -1


def ids(pieces):
    return [PIECES.index(piece) for piece in pieces]


def said(thought, answer, confidence, *, tool="", end=("<eos>",)):
    """A completion as pieces, and the block of each."""
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
BETWEEN = ("<tool>", "+")  # what the environment says between two turns


def flat_rows():
    rows = []
    for group, question, answer, thought, answered, confidence, more in FLAT:
        pieces, blocks = said(thought, answered, confidence, **more)
        rows.append(
            {
                "group": group, "question": question, "answer": answer, "prompt": ids(question), "ids": ids(pieces),
                "sampled": [int(block >= 0) for block in blocks], "blocks": blocks, "right": float(answered == answer),
                "confidence": confidence,
            }
        )  # fmt: skip
    return rows


def turn_rows(talks, *, edited=False):
    """A row per turn: all that was said before as its prompt; the history of an edited talk begins with another sign."""
    rows = []
    for n, (group, question, answer, turns) in enumerate(talks):
        context = ids(question)
        for step, (thought, answered, confidence, paid, anchor) in enumerate(turns):
            pieces, blocks = said(thought, answered, confidence, end=("<eos>",) if step == len(turns) - 1 else ())
            prompt = ids("?") + context[1:] if edited and step else list(context)
            rows.append(
                {
                    "group": group, "question": question, "answer": answer, "rollout": f"{group}/{n}", "step": step,
                    "prompt": prompt, "ids": ids(pieces), "sampled": [1] * len(pieces), "blocks": blocks, "paid": paid,
                    "anchor": anchor, "right": float(answered == answer),
                }
            )  # fmt: skip
            context += ids(pieces) + ids(BETWEEN)
    return rows


def rollouts():
    return {"flat": flat_rows(), "turns": turn_rows(TALKS) + turn_rows(BRANCHED, edited=True)}


# --------------------------------------------------------------------------- the definitions, in loops


def mean(values):
    return sum(values) / len(values)


def shared(row, credit, sizes, stop=0.0):
    """Credit of the solution and of the confidence over their tokens; that of stopping on the last token of the model."""
    tokens = [credit[block] / sizes[block] if block >= 0 else 0.0 for block in row["blocks"]]
    last = max(t for t, block in enumerate(row["blocks"]) if block >= 0)
    tokens[last] += stop
    return tokens


def blocks_advantages(rows):
    found = []
    for row in rows:
        group = [one for one in rows if one["group"] == row["group"]]
        solution = row["right"] - mean([one["right"] for one in group]) if len(group) > 1 else 0.0
        brier = [
            None if one["confidence"] is None else -((one["confidence"] - one["right"]) ** 2)
            for one in group
            if one["right"] == row["right"]
        ]
        there = [value for value in brier if value is not None]
        everyone = [-((one["confidence"] - one["right"]) ** 2) for one in group if one["confidence"] is not None]
        sizes = [max(row["blocks"].count(block), 1) for block in (SOLUTION, CONFIDENCE)]
        if row["confidence"] is None:  # compared with the like, with the group where there is none
            found.append(shared(row, [solution, 0.0], sizes, stop=-1.0 - mean(there or everyone)))
        else:
            own = -((row["confidence"] - row["right"]) ** 2)
            found.append(shared(row, [solution, own - mean(there) if len(there) > 1 else 0.0], sizes))
    return found


def turns_advantages(rows):
    last = {row["rollout"]: row["right"] for row in rows}  # the last turn that answers speaks for the rollout
    found = []
    for row in rows:
        mates = {one["rollout"] for one in rows if one["group"] == row["group"]}
        solution = last[row["rollout"]] - mean([last[name] for name in sorted(mates)])
        votes = []
        for name in sorted(mates):
            paid = [one["paid"] for one in rows if one["rollout"] == name and CONFIDENCE in one["blocks"]]
            votes += [mean(paid)] if paid else []
        own = [one for one in rows if one["rollout"] == row["rollout"]]
        sizes = [max(sum(one["blocks"].count(block) for one in own), 1) for block in (SOLUTION, CONFIDENCE)]
        found.append(shared(row, [solution, row["paid"] - mean(votes)], sizes))
    return found


def gigpo_advantages(rows, gamma=0.95):
    total = {name: sum(one["paid"] for one in rows if one["rollout"] == name) for name in {r["rollout"] for r in rows}}
    later = [
        sum(gamma ** (o["step"] - r["step"]) * o["paid"] for o in rows if o["rollout"] == r["rollout"] and o["step"] >= r["step"])
        for r in rows
    ]
    found = []
    for n, row in enumerate(rows):
        group = [one for one in rows if one["group"] == row["group"]]
        episode = total[row["rollout"]] - mean([total[one["rollout"]] for one in group])  # over rows, as its authors' code
        same = [later[m] for m, one in enumerate(rows) if (one["group"], one["anchor"]) == (row["group"], row["anchor"])]
        step = later[n] - mean(same) if len(same) > 1 else 0.0
        size = sum(len(one["ids"]) for one in rows if one["rollout"] == row["rollout"])
        found.append(shared(row, [episode + step] * 2, [size] * 2))
    return found


def written():
    made = rollouts()
    advantages = {
        "blocks": blocks_advantages(made["flat"]), "turns": turns_advantages(made["turns"]), "gigpo": gigpo_advantages(made["turns"]),
    }  # fmt: skip
    return {"pieces": PIECES, "recipes": RECIPES, "rollouts": made, "advantages": advantages}


# --------------------------------------------------------------------------- for the tests


def load():
    return json.loads(FILE.read_text())


def sequences(rows):
    """The turns of each rollout as one row, with what the environment said in between; branched histories are left out."""
    found = {}
    for row in rows:
        if row["group"] == "hb":
            continue
        if row["rollout"] not in found:
            found[row["rollout"]] = {**row, "ids": [], "sampled": [], "turns": [], "row_of": []}
        one = found[row["rollout"]]
        before = len(one["prompt"]) + len(one["ids"])
        between = row["prompt"][before:]
        one["ids"] = [*one["ids"], *between, *row["ids"]]
        one["sampled"] = [*one["sampled"], *[0] * len(between), *row["sampled"]]
        one["turns"] = [*one["turns"], {"anchor": row["anchor"], "paid": row["paid"]}]
    return list(found.values())


def of_sequences(rows, advantages):
    """The advantages of rows at their places in `sequences(rows)`."""
    by_rollout = {}
    for row, values in zip(rows, advantages, strict=True):
        by_rollout.setdefault(row["rollout"], []).extend(values)
    found = []
    for one in sequences(rows):
        values = iter(by_rollout[one["rollout"]])
        found.append([next(values) if flag else 0.0 for flag in one["sampled"]])
    return found


def tokenizer():
    """A real tokenizer with one token for each piece."""
    import warnings

    from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        from transformers import PreTrainedTokenizerFast

    backend = Tokenizer(models.WordLevel({piece: index for index, piece in enumerate(PIECES)}, unk_token="?"))
    backend.pre_tokenizer = pre_tokenizers.Split(Regex(r"</?[a-z]+>|."), behavior="isolated")
    backend.decoder = decoders.Fuse()
    return PreTrainedTokenizerFast(
        tokenizer_object=backend, pad_token="<pad>", eos_token="<eos>", unk_token="?", padding_side="left"
    )


if __name__ == "__main__":
    FILE.write_text(json.dumps(written(), indent=None, separators=(",", ":")).replace('},{"group"', '},\n{"group"') + "\n")
