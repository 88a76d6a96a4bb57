"""How long everything that reads a completion takes, by its length: shapes that are bad for readers, and the readers."""

import math
import time
from functools import partial

import numpy as np
import torch

from chain_agent import Episode
from spanwise import Batch, Layout, Objective, Scheme, Vocabulary, advantages, credit_batch, read
from spanwise.commands.credit.blocks import usual_tags
from spanwise.measure import voting
from spanwise.report import TokenView
from spanwise.report.tokens import payload
from spanwise.rollouts.cells import clean, completion_parts
from spanwise.rollouts.rows import TokenRow, display_prompt, token_text
from spanwise.rollouts.table import parse_rewards, tokenize
from spanwise.score import MathVerifier, Verdict, json_schema, judge, parse_confidence, score_all
from spanwise.score.rewards import format_, second_attempt
from spanwise.segment import census, find_blocks
from spanwise.tasks.digits import is_refusal
from spanwise.types import Status

LAYOUT = Layout({"solution": ["reasoning", "answer"], "confidence": ["confidence"]})
#: Every other segmenter of text, with a layout of its marks.
OTHERS = {
    "json": Layout({"a": "json:a", "x": "json:items[*]", "rest": []}),
    "code": Layout(
        {"f[*]": "code:python.function", "d": "code:python.docstring", "s": "code:python.statement", "rest": []}, most=2
    ),
    "fences": Layout({"c": "code:fence", "rest": []}),
    "markdown": Layout(["section[*]"], segmenter="markdown", most=3),
    "delimiters": Layout({"t": "delimiters:<answer>...</answer>", "r": "delimiters:Answer:...", "rest": []}),
    "channels": Layout(["reasoning", "tool_call[*]", "answer"], segmenter="channels", most=2),
    "regex": Layout({"n": r"regex:^(\w+\s?)*$", "w": r"regex:(x+x+)+y", "rest": []}),
    **{name: Layout({"u[*]": f"{name}:"}, most=3) for name in ("lines", "paragraphs", "sentences", "steps")},
}
BYTES = Vocabulary(tuple(bytes([byte]) for byte in range(256)))


def repeated(part, end=""):
    return lambda size: part * (size // len(part.encode())) + end


def nested(opening, inside, closing):
    def text_of(size):
        depth = (size - len(inside)) // (len(opening) + len(closing))
        return opening * depth + inside + closing * depth

    return text_of


def functions(size):
    return "".join(" " * depth + "def f():\n" for depth in range(int((2 * size) ** 0.5) - 9))


#: Name -> a text of so many bytes.
SHAPES = {
    "nested \\boxed{": nested(r"\boxed{", "4", "}"),
    "nested $\\boxed{": nested(r"$ \boxed{", "4", "} $"),
    "\\boxed{ that never close": repeated(r"\boxed{"),
    "digits": repeated("7"),
    "digits, then a letter": repeated("7", "x"),
    "zeros, then a letter": repeated("0", "x"),
    "1. and digits, then a letter": lambda size: "1." + "3" * (size - 3) + "x",
    "0. and digits": lambda size: "0." + "3" * (size - 2),
    "words, then a sign": repeated("so it is ", "!"),
    "letters, then a sign": repeated("x", "!"),
    "space, then a letter": lambda size: " " * size + "x" + " " * 9,
    "open tags": repeated("<answer>"),
    "nested tags": nested("<answer>", "4", "</answer>"),
    "pairs of tags": repeated("<answer>4</answer>"),
    "tags of many names": lambda size: "".join(f"<t{n}>" for n in range(size // 8)),
    "pairs of any tag": repeated("<t>4</t>"),
    "an open tag name": lambda size: "<" + "a" * size,
    "ends of text": repeated("</s>"),
    "brackets": repeated("<"),
    "closing brackets": repeated("</"),
    "round brackets that never close": repeated("("),
    "brackets of all kinds": repeated("([{"),
    "nested round brackets": nested("(", "4", ")"),
    "functions in functions": functions,
    "braces": repeated("{"),
    "dollars": repeated("$x"),
    "a list in a list": repeated("["),
    "bidi and zero width": repeated("\u202e\u200b\u2066x"),
    "emoji": repeated("🙂🏽"),
    "NUL": repeated("\x00"),
    "quotes": repeated('"'),
    "backslashes": repeated("\\"),
    "an open string": lambda size: '{"a": "' + "x" * size,
    "an open string of escapes": lambda size: '{"a": "' + "\\n" * (size // 2),
    "arrays in a field": lambda size: '{"a": ' + "[" * size,
    "objects in a field": repeated('{"a": '),
    "closers in an object": lambda size: '{"a": ' + "[}]" * (size // 3),
    "space after keys": lambda size: '{"a"' + " " * (size // 2) + '"b"' + " " * (size // 2),
    "elements": lambda size: '{"items": [' + "1, " * (size // 3),
    "fields": lambda size: "{" + "".join(f'"k{n}": "v", ' for n in range(size // 14)),
    "the same field": repeated('{"a": "x", "a": 1}'),
    "an object of fields": lambda size: "{" + ", ".join(f'"k{n}": "v"' for n in range(size // 14)) + "}",
    "an array in a field": lambda size: '{"items": [' + ", ".join(["0.07"] * (size // 6)) + "]}",
    "commas, then a sign": repeated(",", "!"),
}


class NoProcess(MathVerifier):
    """Starts no process: counts what one would be asked, and how long that is."""

    def __init__(self):
        super().__init__()
        self.asked, self.longest = 0, 0

    def equal(self, pairs):
        self.asked += len(pairs)
        self.longest = max([self.longest, *(len(text) for pair in pairs for text in pair)])
        return [Verdict(Status.OK, 0.0)] * len(pairs)


def segmented(layout, text):
    ids = torch.from_numpy(np.frombuffer(text.encode(), dtype=np.uint8).astype(np.int64))[None]
    return find_blocks(ids, torch.ones_like(ids), layout=layout, vocabulary=BYTES)


CORRECT = Objective("correct", pays=("solution",), options={"verify": "exact"})
SCHEME = Scheme("bae", LAYOUT, [CORRECT, Objective("brier", pays=("confidence",), given="correct")])


def credited(text):
    ids = list(text.encode())
    batch = Batch.jagged([ids, ids[:9]], [0, 0], columns={"answer": ["4", "4"]})
    reading = read(batch, SCHEME, BYTES)
    return advantages(credit_batch(reading, batch, SCHEME), reading.spans, SCHEME)


def blocks(text):
    return {"solution": {"": text, "reasoning": text, "answer": text}, "confidence": {"": text, "confidence": text}}


def rewarded(name, text):
    return score_all([CORRECT, Objective(name, pays=("confidence",))], [blocks(text)], columns={"answer": ["4"]})


#: Of the keywords that are checked without a deadline, those that look at every part of a value.
SCHEMA = {
    "additionalProperties": {"enum": ["v", {"a": 1}], "minLength": 1},
    "properties": {"items": {"items": {"type": "integer", "multipleOf": 0.01}}},
    "anyOf": [{"required": ["b"]}, {"not": {"items": {"const": 2}}}],
}


def checked(text, **options):
    """The JSON of a whole completion, and of a field that says the text behind some prose of the same."""
    texts = [{"all": {"": whole, "n": text}} for whole in (text, f'{{{text}, {text!r}}}, {{"n": {text}')]
    return json_schema(texts, pays=("all",), columns={}, scored={}, schema=SCHEMA, **options)


def attempted(text):
    two = {"first": {"": "", "answer": text}, "second": {"": "", "answer": text + "!"}}
    return second_attempt([two], pays=("second",), columns={"answer": ["4"]}, scored={}, verifier=NoProcess())


def voted(text):
    answers = [text + sign for sign in "abcdefghijklmnop"]
    return voting(answers, torch.full((16,), 0.5), torch.ones(16), prompts=[0] * 16, budgets=[4], resamples=2)


def token_page(text):
    tokens = [token_text(BYTES.pieces[byte]) for byte in text.encode()]
    flat = [0.0] * len(tokens)
    return payload(TokenView(("bae",), [TokenRow(text, tokens, {"bae": flat}, {}, {}, {}, "")]))


#: Name -> a function of the text. Answers are judged against an integer, against words and against themselves in other words.
READERS = {
    "judge, gold 4": lambda text: judge(["4"], [text], verifier=NoProcess()),
    "judge, gold Paris": lambda text: judge(["Paris"], [text], verifier=NoProcess()),
    "judge, as gold": lambda text: judge([text], [text + " 4"], verifier=NoProcess()),
    "parse_confidence": parse_confidence,
    "brier": partial(rewarded, "brier"),
    "format": lambda text: format_([blocks(text)], pays=("solution", "confidence"), columns={}, scored={}),
    "json_schema": checked,
    "json_schema, a field": partial(checked, tag="n"),
    "second_attempt": attempted,
    "find_blocks": partial(segmented, LAYOUT),
    **{f"segment, {name}": partial(segmented, layout) for name, layout in OTHERS.items()},
    "read, credit, advantages": credited,
    "census": lambda text: census([text], ["answer"]).sentence,
    "usual tags of a file": lambda text: usual_tags([text]),
    "words of a file": lambda text: tokenize([[(text, True)]]),
    "messages": lambda text: completion_parts([{"role": "assistant", "content": text}, text]),
    "clean": lambda text: clean(text + "\ud800"),
    "cells of a file": lambda text: parse_rewards({"score": [text, 1.0]}),
    "shown prompt": lambda text: (display_prompt(text), display_prompt("[{" + text), display_prompt('[{"a":' + text)),
    "votes": voted,
    "token view": token_page,
    "agent's reply": lambda text: Episode("7+3*4=").reply(text),
    "refusal": lambda text: is_refusal(blocks(text)),
}


def seconds(reader, text, repeats=3):
    """The fastest of some runs; one run is enough where it is slow."""
    best = math.inf
    for _ in range(repeats):
        start = time.process_time()
        READERS[reader](text)
        best = min(best, time.process_time() - start)
        if best > 0.2:
            break
    return best


def measured(reader, shape, sizes, *, patience=3.0):
    """Seconds at each size, up to the first that takes longer than `patience`; an error's name ends the row."""
    times = []
    for size in sizes:
        text = SHAPES[shape](size)
        try:
            times.append(seconds(reader, text))
        except Exception as error:
            return times, type(error).__name__
        if times[-1] > patience:
            break
    return times, ""


def table(least=14, most=20, patience=3.0):
    """A line per reader: its worst shape, by exponent and by time."""
    sizes = [2**k for k in range(least, most + 1)]
    for reader in READERS:
        worst = None
        for shape in SHAPES:
            times, error = measured(reader, shape, sizes, patience=patience)
            slope = np.polyfit(np.log(sizes[: len(times)]), np.log(times), 1)[0] if len(times) > 1 else math.nan
            short = bool(error) or len(times) < len(sizes)
            key = (short, times[-1] if times else 0.0)
            if worst is None or key > worst[0]:
                worst = key, shape, times, slope, error
            if short or (slope > 1.25 and times[-1] > 0.02):
                print(f"  ! {reader} | {shape} | {' '.join(f'{t:.4f}' for t in times)} | {slope:.2f} {error}", flush=True)
        _, shape, times, slope, error = worst
        cells = " ".join(f"{t * 1e3:9.2f}" for t in times)
        print(f"{reader:26} {shape:30} {cells} {slope:6.2f} {error}", flush=True)


if __name__ == "__main__":
    table()
