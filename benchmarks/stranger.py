"""What a stranger can hand over, tried on everything that reads it. Prints cases and failures by class.

    PYTHONPATH=tests python benchmarks/stranger.py      # some minutes on one core; every run has the same cases

A case passes when it ends in its time (10 s of the processor, 100 s in all), with a result or with a sentence (SpanwiseError),
and when the file that hostile code would leave is not there. A completion that meets a reward or an outcome passes with a result
alone, because an error would end a training run.
"""

# ruff: noqa: E501

from __future__ import annotations

import argparse
import contextlib
import io
import json
import os
import pickle
import shutil
import signal
import sys
import tempfile
import warnings
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import torch
from transformers import LlamaConfig, LlamaForSequenceClassification

from judge_server import Server, verdict
from rollout_files import own_run
from spanwise import Batch, Layout, Objective, Scheme, Vocabulary, credit_batch, read
from spanwise.cli import main as command
from spanwise.errors import SpanwiseError
from spanwise.pipeline import Reading
from spanwise.score import OUTCOMES, REWARDS
from spanwise.segment import SEGMENTERS, find_blocks
from tokenizers_small import byte_level

SECONDS = 10
#: Of the processor, which others may use as well, and of the clock.
_LIMITS = ((signal.SIGPROF, signal.ITIMER_PROF, SECONDS), (signal.SIGALRM, signal.ITIMER_REAL, 10 * SECONDS))
CASES: Counter[str] = Counter()
FAILURES: list[tuple[str, str, str]] = []


class TooLong(BaseException):
    """The case did not end in its time."""


def _stop(*_: Any) -> None:
    raise TooLong


def case(kind: str, name: str, call: Callable[[], Any], *, mark: Path | None = None) -> None:
    """Run a case, count it, and keep what went wrong."""
    CASES[kind] += 1
    before = os.getcwd(), torch.get_default_dtype()
    for sign, timer, seconds in _LIMITS:
        signal.signal(sign, _stop)
        signal.setitimer(timer, seconds)
    wrong = ""
    try:
        with contextlib.redirect_stdout(io.StringIO()), contextlib.redirect_stderr(io.StringIO()), warnings.catch_warnings():
            warnings.simplefilter("ignore")
            wrong = call() or ""
    except SpanwiseError:
        pass
    except SystemExit as error:
        wrong = "" if error.code in (None, 0, 2) else f"exit {str(error.code)[:200]}"
    except TooLong:
        wrong = f"longer than {SECONDS} s"
    except Exception as error:
        wrong = f"{type(error).__name__}: {str(error)[:200]}"
    finally:
        for _, timer, _ in _LIMITS:
            signal.setitimer(timer, 0)
    if mark is not None and mark.exists():
        wrong = "code of the folder ran"
        shutil.rmtree(mark)
    if (os.getcwd(), torch.get_default_dtype()) != before:
        wrong = wrong or "the folder or the dtype stayed changed"
        os.chdir(before[0])
        torch.set_default_dtype(before[1])
    if wrong:
        FAILURES.append((kind, name, wrong))


# ------------------------------------------------------------------------------------------------------- folders


class Payload:
    """Unpickled, it leaves a folder."""

    def __init__(self, mark: Path) -> None:
        self.mark = mark

    def __reduce__(self) -> tuple[Any, ...]:
        """What the unpickler calls."""
        return os.mkdir, (str(self.mark),)


def folders(place: Path) -> dict[str, tuple[Path, Path]]:
    """Name -> a hostile run folder and what its code would leave."""
    made: dict[str, tuple[Path, Path]] = {}

    def run(name: str) -> Path:
        folder, mark = place / name, place / f"{name}-ran"
        rules = '[{"reward": "correct", "pays": "solution"}, {"reward": "evil.py:reward", "pays": "confidence"}]'
        own_run(folder, rewards=[1.0, 0.0, 1.0, 0.0], recipe=f"group_size: 2\nprompts: 2\nobjectives: {rules}\n")
        (folder / "metrics.jsonl").write_text('{"step": 1, "rewards/correct/mean": 0.5}\n')
        for code in ("evil", "sitecustomize", "torch", "yaml", "conftest"):
            (folder / f"{code}.py").write_text(
                f"import os\nos.mkdir({str(mark)!r})\ndef reward(blocks):\n    return [1.0] * len(blocks)\n"
            )
        made[name] = folder, mark
        return folder

    run("names code")
    (run("garbage metrics") / "metrics.jsonl").write_bytes(
        np.random.default_rng(0).bytes(4096) + b"\n[1,2]\n{}\nNaN\n" + b'{"step": 1e400}\n' + b"{" * 100_000
    )
    (run("deep metrics") / "metrics.jsonl").write_text("[" * 100_000)
    (run("bad recipe") / "recipe.yaml").write_text(
        f"method: !!python/object/apply:os.mkdir ['{place / 'bad recipe-ran'}']\n"
    )
    bomb = "a0: &a0 [x]\n" + "".join(f"a{n}: &a{n} [{', '.join([f'*a{n - 1}'] * 9)}]\n" for n in range(1, 12))
    (run("yaml bomb") / "recipe.yaml").write_text(bomb)
    (run("recipe nested") / "recipe.yaml").write_text("options: " + "[" * 20_000)
    (run("summary") / "summary.json").write_text("[" * 100_000)
    folder = run("pickle")
    for file in ("rollouts/step-9.parquet", "rollouts/a.pkl", "checkpoint-1.bin"):
        (folder / file).write_bytes(pickle.dumps(Payload(made["pickle"][1])))
    folder = run("symlink out")
    secret = place / "outside.parquet"
    next(folder.glob("rollouts/*.parquet")).rename(secret)
    (folder / "rollouts" / "step-1.parquet").symlink_to(secret)
    (folder / "rollouts" / "loop.parquet").symlink_to("loop.parquet")
    folder = run("symlink loop")
    (folder / "rollouts" / "again").symlink_to(folder)
    for name, change in (("claims rows", 1), ("cut off", 2), ("empty", 3)):
        file = next(run(name).glob("rollouts/*.parquet"))
        data = file.read_bytes()
        file.write_bytes((data[:-40] + b"\xff" * 24 + data[-16:], data[: len(data) // 2], b"")[change - 1])
    folder = run("many nulls")
    pq.write_table(
        pa.table({"prompt": pa.nulls(2_000_000, pa.string()), "completion": pa.nulls(2_000_000, pa.string())}),
        folder / "rollouts" / "z.parquet",
    )
    return made


def looking(folder: Path, out: Path) -> dict[str, list[str]]:
    """Every command that only looks at a folder."""
    where = str(folder)
    file = str(next(iter(sorted(folder.glob("rollouts/*"))), folder))
    output = ["--output", str(out)]
    return {
        "why": ["why", where], "why, recipe": ["why", where, "--methods", "recipe"], "report": ["report", where],
        "credit": ["credit", where, *output], "credit, file": ["credit", file, *output],
        "credit, recipe": ["credit", where, "--methods", "recipe", *output], "report of credit": ["report", str(out)],
        "methods": ["methods"], "methods NAME": ["methods", "bae"],
    }  # fmt: skip


def hostile_folders(place: Path) -> None:
    """Every command that looks, on every folder, from inside and from above."""
    for name, (folder, mark) in folders(place).items():
        for words_name, words in looking(folder, place / "out").items():
            for where in (folder, folder.parent):
                home = Path.cwd()
                os.chdir(where)
                try:
                    case("folder", f"{name}: {words_name}", lambda words=words: command(words), mark=mark)
                finally:
                    os.chdir(home)


# --------------------------------------------------------------------------------------------------- completions

HOSTILE = {
    "unclosed tags": "<answer>" * 12_500, "closing tags": "</answer>" * 11_000, "braces": "{" * 100_000, "brackets": "[" * 100_000,
    "nested json": '{"a":' * 20_000 + "1" + "}" * 20_000, "boxed": r"\boxed{" * 15_000, "NUL": "<answer>\0\0</answer>" * 5_000,
    "right to left": "<answer>\u202e\u2066\u05e9\u05dc</answer><confidence>\u202e0.5</confidence>" * 100, "tags": "<a></a>" * 50_000,
    "digits": f"<answer>{'7' * 10_000}</answer><confidence>0.{'3' * 10_000}</confidence>", "power": "<answer>9^9^9^9^9</answer>",
    "yaml": "&a [*a, *a]\n" * 9_000, "regex": "a" * 50_000 + "!", "spaces": " " * 100_000 + "x", "newlines": "\n" * 100_000,
    "ansi": "<answer>\x1b[2J\x1b]0;owned\x07\x1b[31m4</answer>" * 500,
    "script": "<answer></script><script>document.title='owned'</script><img src=x onerror=alert(1)></answer><confidence>0.5</confidence>",
    "surrogates": "<answer>\udcff\ud800</answer>", "fences": "```python\n" * 10_000, "headings": "# Answer\n" * 11_000,
    "code": "def f(x):\n" * 9_000, "quotes": '"""' * 30_000, "backslashes": "\\" * 100_000, "numbers": "1. x\n" * 20_000,
    "nan": "<answer>nan</answer><confidence>nan</confidence>", "infinity": "<answer>1e999</answer><confidence>1e999</confidence>",
    "nothing": "", "combining": "e" + "\u0301" * 50_000,
}  # fmt: skip
#: Segmenter -> a layout that it reads.
READERS = {
    "tags": {"solution": ["answer"], "confidence": ["confidence"]}, "json": {"a": "json:a", "b": "json:items[*].price", "rest": []},
    "code": {"f[*]": "code:python.function", "c": "code:fence", "rest": []}, "markdown": {"p": "markdown:Answer", "rest": []},
    "delimiters": {"t": "delimiters:<answer>...</answer>", "rest": []}, "channels": {"r": "channels:reasoning", "a": "channels:answer", "rest": []},
    "regex": {"n": r"regex:(a|aa)+$", "rest": []}, "fixed": {"u[*]": "fixed:3"}, "cuts": {"u[*]": "cuts:2"}, "turns": {"u[*]": "turns:"},
    **{name: {"u[*]": f"{name}:"} for name in ("lines", "paragraphs", "sentences", "steps")}, "low_probability": {"u[*]": "low_probability:0.2"},
}  # fmt: skip
GOOD = b"<answer>4</answer><confidence>0.9</confidence>"
#: What the rewards read beside the completions.
COLUMNS: dict[str, Any] = {
    "answer": "4", "gold": '{"answer": 4, "items": [1]}', "golds": '{"answer": [4]}', "prompt": "2 + 2?", "environment": 1.0,
    "listed": '{"solution": 1.0}',
}  # fmt: skip


def options_of(judge: str, model: str) -> dict[str, dict[str, Any]]:
    """Reward -> the options that it needs here; `judge` is the address of a judge's server, `model` the folder of a reward model."""
    return {
        **{name: {"column": "gold"} for name in ("equals", "near", "count")}, "one_of": {"column": "golds"},
        "json_schema": {"schema": {"type": "object"}}, "overlong": {"longest": 64, "buffer": 16}, "second_attempt": {"first": "solution"},
        "judge": {"model": "judge", "base_url": judge}, "reward_model": {"model": model},
    }  # fmt: skip


def scheme_of(name: str, options: dict[str, dict[str, Any]]) -> Scheme:
    """Return a scheme with a reward or an outcome, and beside it the reward `correct`, which some of them read."""
    layout, correct = Layout(READERS["tags"]), Objective("correct", pays="solution")
    if name in OUTCOMES:
        return Scheme("bae", layout, [Objective("correct", pays="solution", given=name, baseline="outcome")])
    is_of_confidence = REWARDS[name].judged_by is not None
    own = Objective(name, pays="confidence" if is_of_confidence else "solution", options=options.get(name, {}))
    return Scheme("bae" if is_of_confidence else "grpo", layout, [own] if name == "correct" else [correct, own])


def read_beside_good(scheme: Scheme, ids: list[int], vocabulary: Vocabulary, good: list[int]) -> tuple[Reading, Batch]:
    """Read a completion in a group with a good one."""
    columns = {name: [cell] * 2 for name, cell in COLUMNS.items()} | {"completion_ids": [ids, good]}
    batch = Batch.jagged([ids, good], ["q"] * 2, columns=columns)
    return read(batch, scheme, vocabulary=vocabulary), batch


def reward_model(place: Path) -> str:
    """Save a small random reward model that reads bytes, and return its folder."""
    tokenizer, size = (
        byte_level(),
        {"hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2},
    )
    tokenizer.pad_token, tokenizer.model_max_length = tokenizer.eos_token, 512
    tokenizer.chat_template = "{% for turn in messages %}{{ turn.content }}<|end|>{% endfor %}"
    ends = {"pad_token_id": tokenizer.pad_token_id, "eos_token_id": tokenizer.eos_token_id, "bos_token_id": None}
    config = LlamaConfig(vocab_size=len(tokenizer), max_position_embeddings=512, num_labels=1, **size, **ends)
    torch.manual_seed(0)
    LlamaForSequenceClassification(config).save_pretrained(place)
    tokenizer.save_pretrained(place)
    return str(place)


def hostile_completions(place: Path) -> None:
    """Every completion through every segmenter, every reward and outcome, and `credit` with its page."""
    vocabulary = Vocabulary.from_tokenizer(byte_level())
    ids_of = {piece: index for index, piece in enumerate(vocabulary.pieces) if len(piece) == 1}
    rows = {
        name: torch.tensor(
            [[ids_of[bytes([byte])] for byte in text.encode(errors="surrogatepass")]], dtype=torch.int64
        ).reshape(1, -1)
        for name, text in HOSTILE.items()
    }
    for segmenter in SEGMENTERS:
        layout = Layout(READERS[segmenter], most=3)
        for name, ids_nt in rows.items():
            mask_nt = torch.ones_like(ids_nt, dtype=torch.bool)
            extra = {"logp_nt": -torch.ones(ids_nt.shape).double()} if segmenter == "low_probability" else {}
            case(
                f"segmenter {segmenter}",
                name,
                lambda i=ids_nt, m=mask_nt, y=layout, e=extra: _whole(
                    find_blocks(i, m, layout=y, vocabulary=vocabulary, **e)[0], m
                ),
            )
    with Server(lambda *_: verdict("yes")).serving() as server:
        options = options_of(server.url, reward_model(place / "reward-model"))
        good = [ids_of[bytes([byte])] for byte in GOOD]
        for reward in [*REWARDS, *OUTCOMES]:
            if reward == "runs":  # it executes, and says so
                continue
            scheme = scheme_of(reward, options)
            for name, ids_nt in rows.items():

                def pay(scheme: Scheme = scheme, ids_nt: torch.Tensor = ids_nt) -> str:
                    try:
                        reading, batch = read_beside_good(scheme, ids_nt[0].tolist(), vocabulary, good)
                        credit = credit_batch(reading, batch, scheme)
                    except SpanwiseError as error:
                        return f"the training ends: {error}"
                    if bool(reading.scores.status_nm[1].any()):
                        return "the good completion has no reward"
                    return "" if bool(torch.isfinite(credit.block_nk).all()) else "credit that is not finite"

                case(f"reward {reward}", name, pay)
    for name, text in HOSTILE.items():
        file = place / "one.jsonl"
        answers = [
            {"prompt": text[:5000], "completion": one, "answer": "4", "reward": paid}
            for one, paid in ((text, 1.0), ("<answer>4</answer>", 0.0))
        ]
        file.write_text("".join(json.dumps(row) + "\n" for row in answers))
        page = place / "page"

        def seen(file: Path = file, page: Path = page) -> str:
            shutil.rmtree(page, ignore_errors=True)
            command(
                ["credit", str(file), "--output", str(page), "--methods", "grpo", "--set", "layout={solution: [answer]}"]
            )
            html = (page / "report.html").read_text(encoding="utf-8", errors="surrogatepass")
            return (
                "an element of the completion is in the page"
                if "<script>document.title" in html or "<img src=x" in html
                else ""
            )

        case("credit and page", name, seen)


def _whole(spans: Any, mask_nt: torch.Tensor) -> str:
    return "" if torch.equal(spans.block_nt >= 0, mask_nt) else "a token without a block"


# ------------------------------------------------------------------------------------------------------- rewards


def _raises(blocks: Any, **_: Any) -> Any:
    raise RuntimeError("no")


def _changes(blocks: Any, **columns: Any) -> Any:
    for block in blocks:
        block.clear() if hasattr(block, "clear") else None
    for values in columns.values():
        values.clear() if hasattr(values, "clear") else None
    return [1.0, 0.0, 1.0, 0.0]


def _doing(action: Callable[[], Any]) -> Callable[..., Any]:
    def reward(blocks: Any, **_: Any) -> Any:
        action()
        return [1.0, 0.0, 1.0, 0.0]

    return reward


def _giving(value: Any) -> Callable[..., Any]:
    return lambda blocks, **_: value


BAD = {
    "raises": _raises, "changes its input": _changes, "NaN": _giving([float("nan")] * 4), "inf": _giving([float("inf"), 0, 0, 0]),
    "strings": _giving(["1"] * 4), "one string": _giving("1111"), "too few": _giving([1.0]), "too many": _giving([1.0] * 5), "None": _giving(None),
    "all None": _giving([None] * 4), "a bool each": _giving([True, False] * 2), "a dict": _giving({"a": 1}), "a number": _giving(1.0),
    "with grad": _giving(torch.ones(4, requires_grad=True)), "a matrix": _giving(np.ones((4, 1))), "complex": _giving([1j] * 4),
    "huge": _giving([1e308, -1e308, 1e308, 0.0]), "an int beyond float": _giving([10**400, 0, 0, 0]), "objects": _giving([object()] * 4),
    "exits": _doing(lambda: sys.exit(0)), "prints": _doing(lambda: print("x" * 10**6)), "a generator": lambda blocks, **_: (1.0 for _ in blocks),
    "dtype": _doing(lambda: torch.set_default_dtype(torch.float64)), "cwd": _doing(lambda: os.chdir("/")), "seed": _doing(lambda: torch.manual_seed(1)),
    "raises BaseException": _doing(lambda: (_ for _ in ()).throw(KeyboardInterrupt())), "half": _giving(torch.ones(4).half()), "empty": _giving([]),
}  # fmt: skip


def hostile_rewards(_: Path) -> None:
    """Every function through the road that every engine takes: read, then credit."""
    vocabulary = Vocabulary.from_tokenizer(byte_level())
    rows = [list(b"<answer>4</answer>")] * 4
    ids_of = {piece: index for index, piece in enumerate(vocabulary.pieces) if len(piece) == 1}
    ids = [[ids_of[bytes([byte])] for byte in row] for row in rows]
    for name, reward in BAD.items():

        def pay(reward: Callable[..., Any] = reward) -> str:
            scheme = Scheme("grpo", Layout({"solution": ["answer"]}), [Objective(reward, pays="solution", name="bad")])
            batch = Batch.jagged(ids, ["p", "p", "q", "q"], columns={"answer": ["4"] * 4})
            try:
                credit = credit_batch(read(batch, scheme, vocabulary=vocabulary), batch, scheme)
            except KeyboardInterrupt:
                return ""  # what somebody presses goes through
            except SystemExit:
                return "the run ends with exit status 0"
            return "" if bool(torch.isfinite(credit.block_nk).all()) else "credit that is not finite"

        case("reward function", name, pay)


def main() -> None:
    """Try everything, print the table and what failed."""
    argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter).parse_args()
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as place:
        for attack in (hostile_rewards, hostile_folders, hostile_completions):
            attack(Path(place))
    wrong = Counter(kind for kind, _, _ in FAILURES)
    print("| what | cases | failures |\n|---|---|---|")
    for kind, count in CASES.items():
        print(f"| {kind} | {count} | {wrong[kind]} |")
    print(f"| all | {CASES.total()} | {len(FAILURES)} |")
    for kind, name, what in FAILURES:
        print(f"{kind}, {name}: {what}")


if __name__ == "__main__":
    main()
