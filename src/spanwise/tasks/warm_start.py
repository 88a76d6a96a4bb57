"""The warm start: a tiny model that has read noisy traces of the digit chain, trained once and cached."""

from __future__ import annotations

import hashlib
import json
import logging
import math
import os
import shutil
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import numpy as np
import torch
from jaxtyping import Int
from torch import Tensor

from spanwise.disk import refusal
from spanwise.errors import DataError
from spanwise.tasks.agent import AGENT_NOISE, AgentNoise, AgentPart, draw_chains, held_out_chains, noisy_talk
from spanwise.tasks.digits import NOISE, Difficulty, TraceNoise, draw_problems, held_out_prompts, noisy_traces
from spanwise.tasks.digits_long import (
    LONG_NOISE,
    LONG_POSITIONS,
    LongNoise,
    LongPart,
    draw_long_problems,
    held_out_long_prompts,
    long_traces,
    tables,
)
from spanwise.tasks.digits_twice import TWICE_NOISE, TwiceNoise, TwicePart, twice_traces
from spanwise.tasks.tiny import END, PAD, build_model, build_tokenizer

if TYPE_CHECKING:
    from transformers import PreTrainedModel, PreTrainedTokenizerFast
else:
    PreTrainedModel = PreTrainedTokenizerFast = Any  # the names must exist for runtime type checkers

Progress = Callable[[int, int, float], None]
#: The warm starts, and the stretches of training each is made of; every stretch is cached.
Start = Difficulty | Literal["twice", "agent", "long"]
Part = Difficulty | TwicePart | AgentPart | LongPart
_PARTS: dict[str, tuple[Part, ...]] = {
    "easy": ("easy",),
    "hard": ("easy", "hard"),
    "twice": ("twice_early", "twice"),
    "agent": ("agent_early", "agent"),
    "long": ("long_tables", "long_early", "long"),
}
# New parts go to the end: a part's place seeds its traces.
_ALL_NOISE: dict[Part, TraceNoise | TwiceNoise | AgentNoise | LongNoise] = {
    **NOISE,
    **TWICE_NOISE,
    **AGENT_NOISE,
    **LONG_NOISE,
}
#: Where the model is another one than that of the short chains.
_SHAPE: dict[str, dict[str, int]] = {"long": {"layers": 3, "positions": LONG_POSITIONS}}
_RECORD = "warm_start.json"
_logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class Phase:
    """One stretch of supervised training with its own cosine schedule.

    Args:
        steps: how many optimiser steps.
        learning_rate: AdamW's peak, for embeddings and norms.
        matrix_learning_rate: Muon's peak, for the weight matrices; with AdamW alone arithmetic takes several times as long.
    """

    steps: int
    learning_rate: float
    matrix_learning_rate: float


@dataclass(frozen=True)
class WarmStartSettings:
    """Everything a warm start depends on, besides difficulty, seed and the traces.

    Args:
        easy: from random weights, on mildly noisy traces.
        hard: from the end of `easy`, on very noisy traces; starting there from random weights learns no arithmetic.
        twice_early: two attempts, from random weights; most reflections write the steps out, without a slip.
        twice: from the end of `twice_early`; most reflections only repeat, the others slip often.
        batch: traces per step.
        warm_up: steps of linear warm-up in each phase.
        floor: the schedule ends at this share of the peak.
        clip: largest gradient norm.
        version: raised when traces, tokenizer or model change, so that older caches are not taken for new ones.
        agent_early: conversations about a chain, from random weights, without a slip.
        agent: from the end of `agent_early`; replies slip often.
        long_tables: arithmetic alone, from random weights; a model that meets it first within long traces learns it much later.
        long_early: long traces, from the end of `long_tables`, without a slip.
        long: from the end of `long_early`; now with slips.
    """

    easy: Phase = Phase(steps=400, learning_rate=3e-3, matrix_learning_rate=0.03)
    hard: Phase = Phase(steps=150, learning_rate=2e-3, matrix_learning_rate=0.02)
    twice_early: Phase = Phase(steps=400, learning_rate=3e-3, matrix_learning_rate=0.03)
    twice: Phase = Phase(steps=150, learning_rate=1e-3, matrix_learning_rate=0.005)
    batch: int = 64
    warm_up: int = 20
    floor: float = 0.02
    clip: float = 1.0
    version: int = 1
    agent_early: Phase = Phase(steps=200, learning_rate=3e-3, matrix_learning_rate=0.03)
    agent: Phase = Phase(steps=100, learning_rate=2e-3, matrix_learning_rate=0.02)
    long_tables: Phase = Phase(steps=200, learning_rate=3e-3, matrix_learning_rate=0.03)
    long_early: Phase = Phase(steps=250, learning_rate=2e-3, matrix_learning_rate=0.02)
    long: Phase = Phase(steps=100, learning_rate=1e-3, matrix_learning_rate=0.01)


def shortened(steps: int) -> WarmStartSettings:
    """The default settings with every phase cut to `steps`: a model that has learned little, in little time."""
    full = WarmStartSettings()
    return replace(full, **{part: replace(_phase(part, full), steps=steps) for part in _ALL_NOISE})


def default_cache_folder() -> Path:
    """`$SPANWISE_CACHE`, else `$XDG_CACHE_HOME/spanwise`, else `~/.cache/spanwise`."""
    if own := os.environ.get("SPANWISE_CACHE"):
        return Path(own).expanduser()
    return Path(os.environ.get("XDG_CACHE_HOME") or "~/.cache").expanduser() / "spanwise"


def warm_start(
    start: Start,
    *,
    seed: int = 0,
    cache_folder: str | Path | None = None,
    progress: Progress | None = None,
    settings: WarmStartSettings | None = None,
) -> Path:
    """The folder of the warm-started model and its tokenizer; trained on the first call, read from the cache afterwards.

    The hard start continues the easy one and shares its cache; the start with two attempts is its own. A cached folder with a
    missing or altered file is rebuilt, with a notice in the log. Training runs on the CPU with one thread.

    Args:
        start: "easy" solves about 58 % of the held-out prompts, "hard" about 33 % and refuses twice as often (9 %); "twice" makes
            two attempts, each of which solves about 18 %, see `digits_twice`; "agent" is asked step by step, see `agent`: about
            68 % of its turns are right and 14 % of its episodes solved; "long" writes some
            seventy tokens, see `digits_long`, and solves about half.
        seed: of the weights and the traces.
        cache_folder: where to keep it; None: see `default_cache_folder`.
        progress: called as `progress(step, total, loss)` after every step that is really made.
        settings: None for the defaults.

    Returns:
        A folder for `from_pretrained`.

    Raises:
        DataError: the folder cannot be written, or torch is too old to train.
    """
    settings = settings or WarmStartSettings()
    root = Path(cache_folder) if cache_folder is not None else default_cache_folder()
    path = _PARTS[start]
    folders = [root / _folder_name(part, seed, settings) for part in path]
    done = next((index + 1 for index in reversed(range(len(path))) if _is_intact(folders[index])), 0)
    if done == len(path):
        return folders[-1]
    total = sum(_phase(part, settings).steps for part in path[done:])
    tokenizer = build_tokenizer()
    model = _load(folders[done - 1]) if done else build_model(tokenizer, seed, **_SHAPE.get(start, {}))
    made = 0
    for part, folder in zip(path[done:], folders[done:], strict=True):
        for loss in _train(model, tokenizer, part, seed, settings):
            made += 1
            if progress is not None:
                progress(made, total, loss)
        _save(model, tokenizer, folder, record=_identity(part, seed, settings))
    return folders[-1]


def trace_batch(
    tokenizer: PreTrainedTokenizerFast, size: int, *, part: Part, rng: np.random.Generator
) -> tuple[Int[Tensor, "n t"], int]:
    """Token ids of `size` noisy traces, prompt included and padded on the right, and how many tokens every prompt has.

    No held-out prompt is among them.
    """
    if part == "agent_early" or part == "agent":
        return _talk_batch(tokenizer, size, AGENT_NOISE[part], rng)
    if part == "long_tables" or part == "long_early" or part == "long":
        return _long_batch(tokenizer, size, part, rng)
    problems = draw_problems(size, rng=rng, exclude=held_out_prompts())
    if part == "twice_early" or part == "twice":
        traces = twice_traces(problems, TWICE_NOISE[part], rng=rng)
    else:
        traces = noisy_traces(problems, NOISE[part], rng=rng)
    texts = [f"{prompt}{trace}{END}" for prompt, trace in zip(problems.prompts, traces, strict=True)]
    ids_nt = tokenizer(texts, padding=True, padding_side="right", return_tensors="pt")["input_ids"]
    return ids_nt, len(tokenizer(problems.prompts[0])["input_ids"])


def _long_batch(
    tokenizer: PreTrainedTokenizerFast, size: int, part: LongPart, rng: np.random.Generator
) -> tuple[Int[Tensor, "n t"], int]:
    """Exercises, or half as many long traces as there are short ones in a step."""
    if part == "long_tables":
        pairs = tables(4 * size, rng=rng)
    else:
        problems = draw_long_problems(size // 2 or 1, rng=rng, exclude=held_out_long_prompts())
        pairs = list(zip(problems.prompts, long_traces(problems, LONG_NOISE[part], rng=rng), strict=True))
    texts = [f"{prompt}{trace}{END}" for prompt, trace in pairs]
    ids_nt = tokenizer(texts, padding=True, padding_side="right", return_tensors="pt")["input_ids"]
    return ids_nt, len(tokenizer(pairs[0][0])["input_ids"])


def _talk_batch(
    tokenizer: PreTrainedTokenizerFast, size: int, noise: AgentNoise, rng: np.random.Generator
) -> tuple[Int[Tensor, "n t"], int]:
    held_out = frozenset(chain.prompt for chain in held_out_chains())
    chains = draw_chains(size, rng=rng, exclude=held_out)
    talks = [noisy_talk(chain, noise, rng=rng) for chain in chains]
    texts = ["".join(f"{shown}{reply}{END}" for shown, reply in talk) for talk in talks]
    ids_nt = tokenizer(texts, padding=True, padding_side="right", return_tensors="pt")["input_ids"]
    return ids_nt, len(tokenizer(f"{chains[0].start}{chains[0].steps[0]}=")["input_ids"])


def _train(
    model: PreTrainedModel, tokenizer: PreTrainedTokenizerFast, part: Part, seed: int, settings: WarmStartSettings
) -> Iterator[float]:
    """Train in place, one step per item; yields the mean loss over the completion tokens."""
    phase = _phase(part, settings)
    optimizers = _optimizers(model, phase)
    rng = np.random.default_rng([seed, 0, list(_ALL_NOISE).index(part)])
    peaks = [group["lr"] for optimizer in optimizers for group in optimizer.param_groups]
    shown = torch.tensor([index for word, index in tokenizer.get_vocab().items() if word[0] in "+-*="])
    model.train()
    with _one_thread():
        for step in range(phase.steps):
            rise, fall = (step + 1) / settings.warm_up, (1 + math.cos(math.pi * step / phase.steps)) / 2
            share = min(1.0, rise) * (settings.floor + (1 - settings.floor) * fall)
            groups = [group for optimizer in optimizers for group in optimizer.param_groups]
            for group, peak in zip(groups, peaks, strict=True):
                group["lr"] = peak * share
            ids_nt, prompt_length = trace_batch(tokenizer, settings.batch, part=part, rng=rng)
            logits_ntv = model(input_ids=ids_nt, logits_to_keep=ids_nt.shape[1] - prompt_length + 1).logits
            imitated_nt = ids_nt[:, prompt_length:]
            if part in AGENT_NOISE:  # not what the environment says
                imitated_nt = imitated_nt.masked_fill(torch.isin(imitated_nt, shown), tokenizer.get_vocab()[PAD])
            if part == "long_tables":  # nothing but what a step leads to
                asked_nt = ids_nt[:, prompt_length - 1 : -1] == tokenizer.get_vocab()["="]
                imitated_nt = imitated_nt.masked_fill(~asked_nt, tokenizer.get_vocab()[PAD])
            loss = torch.nn.functional.cross_entropy(
                logits_ntv[:, :-1].flatten(0, 1),
                imitated_nt.flatten(),
                ignore_index=tokenizer.get_vocab()[PAD],
            )
            loss.backward()
            torch.nn.utils.clip_grad_norm_(model.parameters(), settings.clip)
            for optimizer in optimizers:
                optimizer.step()
                optimizer.zero_grad()
            yield loss.item()
    model.eval()


def _optimizers(model: PreTrainedModel, phase: Phase) -> list[torch.optim.Optimizer]:
    if not hasattr(torch.optim, "Muon"):
        raise DataError(
            f"The warm start is trained with torch.optim.Muon, which torch {torch.__version__} does not have; "
            f"install torch 2.9 or newer, or copy a finished warm start into the cache folder '{default_cache_folder()}'."
        )
    embedding = model.get_input_embeddings().weight
    matrices = [weight for weight in model.parameters() if weight.ndim == 2 and weight is not embedding]
    others = [weight for weight in model.parameters() if weight.ndim != 2 or weight is embedding]
    return [
        torch.optim.Muon(matrices, lr=phase.matrix_learning_rate, weight_decay=0.0),
        torch.optim.AdamW(others, lr=phase.learning_rate, betas=(0.9, 0.95), weight_decay=0.0),
    ]


def _phase(part: Part, settings: WarmStartSettings) -> Phase:
    return getattr(settings, part)


def _identity(part: Part, seed: int, settings: WarmStartSettings) -> dict[str, Any]:
    """What the weights depend on: this part and those before it; the easy start does not depend on the hard phase."""
    path = next(parts for parts in _PARTS.values() if part in parts)
    used = path[: path.index(part) + 1]
    skipped = set(_ALL_NOISE) - set(used)
    settings_used = {name: value for name, value in asdict(settings).items() if name not in skipped}
    noise = {name: asdict(_ALL_NOISE[name]) for name in used}
    return {"difficulty": part, "seed": seed, "settings": settings_used, "noise": noise}


def _folder_name(part: Part, seed: int, settings: WarmStartSettings) -> str:
    key = hashlib.sha256(json.dumps(_identity(part, seed, settings), sort_keys=True).encode()).hexdigest()
    return f"digits-{part}-{seed}-{key[:12]}"


def _is_intact(folder: Path) -> bool:
    """Whether a cached folder is there and every file is as it was written; logs a notice if it is there and is not."""
    if not folder.exists():
        return False
    try:
        files = json.loads((folder / _RECORD).read_text())["files"]
        broken = [name for name, digest in files.items() if _digest(folder / name) != digest]
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        broken = [f"{_RECORD} ({type(error).__name__})"]
    if broken:
        _logger.warning("The cached warm start '%s' is damaged (%s); it is built again.", folder, ", ".join(broken))
    return not broken


def _digest(file: Path) -> str:
    return hashlib.sha256(file.read_bytes()).hexdigest() if file.is_file() else "missing"


def _save(model: PreTrainedModel, tokenizer: PreTrainedTokenizerFast, folder: Path, *, record: dict[str, Any]) -> None:
    """Write beside the target and rename, so that a reader sees the whole folder or none."""
    try:
        folder.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=folder.parent, prefix=".writing-", ignore_cleanup_errors=True) as scratch:
            fresh = Path(scratch) / folder.name
            with _quiet():
                model.save_pretrained(fresh)
                tokenizer.save_pretrained(fresh)
            files = {file.name: _digest(file) for file in sorted(fresh.iterdir())}
            (fresh / _RECORD).write_text(json.dumps({**record, "files": files}, indent=2))
            shutil.rmtree(folder, ignore_errors=True)
            fresh.rename(folder)
    except Exception as error:
        reason = refusal(error) or (error.strerror or str(error) if isinstance(error, OSError) else None)
        if reason is None:
            raise
        if _is_intact(folder):  # another process finished the same warm start first
            return
        raise DataError(
            f"The warm start cannot be written to '{folder}' ({reason}); set SPANWISE_CACHE to a folder you may write to."
        ) from error


def _load(folder: Path) -> PreTrainedModel:
    from transformers import AutoModelForCausalLM

    with _quiet():
        return AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, trust_remote_code=False)


@contextmanager
def _quiet() -> Iterator[None]:
    """Hide the progress bars of transformers, which would cut through ours."""
    from transformers.utils import logging as transformers_logging

    shown = transformers_logging.is_progress_bar_enabled()
    transformers_logging.disable_progress_bar()
    try:
        yield
    finally:
        if shown:
            transformers_logging.enable_progress_bar()


@contextmanager
def _one_thread() -> Iterator[None]:
    """At this size a second thread helps little on an idle machine and makes a busy one several times slower."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(threads)
