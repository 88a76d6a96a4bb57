"""The warm start: a tiny model that has read noisy traces of an embedded task, trained once and cached."""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import numpy as np
import torch

from spanwise.errors import DataError
from spanwise.tasks.digits import Difficulty
from spanwise.tasks.digits_long import LONG_POSITIONS
from spanwise.tasks.fields import Fields
from spanwise.tasks.muon import matrix_optimizer
from spanwise.tasks.tiny import PAD, build_fields_tokenizer, build_model, build_tokenizer
from spanwise.tasks.traces import ALL_NOISE, imitated, trace_batch
from spanwise.tasks.warm_cache import default_cache_folder, is_intact, load, save

if TYPE_CHECKING:
    from transformers import PreTrainedModel, PreTrainedTokenizerFast
else:
    PreTrainedModel = PreTrainedTokenizerFast = Any  # the names must exist for runtime type checkers

Progress = Callable[[int, int, float], None]
#: The warm starts of the digit chain, and the stretches of training each is made of; every stretch is cached.
Start = Difficulty | Literal["twice", "agent", "long"]
_PARTS: dict[str, tuple[str, ...]] = {
    "easy": ("easy",),
    "hard": ("easy", "hard"),
    "twice": ("twice_early", "twice"),
    "agent": ("agent_early", "agent"),
    "long": ("long_tables", "long_early", "long"),
    "fields": ("fields_early", "fields"),
}
#: Where the model is another one than that of the short chains.
_SHAPE: dict[str, dict[str, int]] = {
    "long": {"layers": 3, "positions": LONG_POSITIONS},
    "fields": {"width": 64, "heads": 2},
}


@dataclass(frozen=True)
class Phase:
    """One stretch of supervised training with its own cosine schedule.

    Args:
        steps: how many optimiser steps.
        learning_rate: AdamW's peak, for embeddings and norms.
        matrix_learning_rate: Muon's peak, for the weight matrices; with AdamW alone arithmetic takes several times as long.

    Example:
        >>> Phase(100, learning_rate=3e-3, matrix_learning_rate=2e-2).steps
        100
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
        fields_early: the objects of `fields`, from random weights, every value as its rule says.
        fields: from the end of `fields_early`; most values do not follow their rule.
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
    fields_early: Phase = Phase(steps=400, learning_rate=3e-3, matrix_learning_rate=0.03)
    fields: Phase = Phase(steps=100, learning_rate=1e-3, matrix_learning_rate=0.005)


def shortened(steps: int) -> WarmStartSettings:
    """The default settings with every phase cut to `steps`: a model that has learned little, in little time."""
    full = WarmStartSettings()
    return replace(full, **{part: replace(_phase(part, full), steps=steps) for part in ALL_NOISE})


def warm_start(
    start: Start | Fields,
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
            seventy tokens, see `digits_long`, and solves about half. `Fields` write a JSON object, see `fields`; every kind and
            number of fields has a start of its own.
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
    fields = start if isinstance(start, Fields) else None
    name = "fields" if isinstance(start, Fields) else start
    root = Path(cache_folder) if cache_folder is not None else default_cache_folder()
    path = _PARTS[name]
    folders = [root / _folder_name(part, seed, settings, fields) for part in path]
    done = next((index + 1 for index in reversed(range(len(path))) if is_intact(folders[index])), 0)
    if done == len(path):
        return folders[-1]
    total = sum(_phase(part, settings).steps for part in path[done:])
    tokenizer = build_tokenizer() if fields is None else build_fields_tokenizer()
    model = load(folders[done - 1]) if done else build_model(tokenizer, seed, **_SHAPE.get(name, {}))
    made = 0
    for part, folder in zip(path[done:], folders[done:], strict=True):
        for loss in _train(model, tokenizer, part, seed, settings, fields):
            made += 1
            if progress is not None:
                progress(made, total, loss)
        save(model, tokenizer, folder, record=_identity(part, seed, settings, fields))
    return folders[-1]


def _train(
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerFast,
    part: str,
    seed: int,
    settings: WarmStartSettings,
    fields: Fields | None,
) -> Iterator[float]:
    """Train in place, one step per item; yields the mean loss over the completion tokens."""
    phase = _phase(part, settings)
    optimizers = _optimizers(model, phase)
    rng = np.random.default_rng([seed, 0, list(ALL_NOISE).index(part)])
    peaks = [group["lr"] for optimizer in optimizers for group in optimizer.param_groups]
    model.train()
    with _one_thread():
        for step in range(phase.steps):
            rise, fall = (step + 1) / settings.warm_up, (1 + math.cos(math.pi * step / phase.steps)) / 2
            share = min(1.0, rise) * (settings.floor + (1 - settings.floor) * fall)
            groups = [group for optimizer in optimizers for group in optimizer.param_groups]
            for group, peak in zip(groups, peaks, strict=True):
                group["lr"] = peak * share
            ids_nt, prompt_length = trace_batch(tokenizer, settings.batch, part=part, rng=rng, fields=fields)
            logits_ntv = model(input_ids=ids_nt, logits_to_keep=ids_nt.shape[1] - prompt_length + 1).logits
            loss = torch.nn.functional.cross_entropy(
                logits_ntv[:, :-1].flatten(0, 1),
                imitated(tokenizer, ids_nt, prompt_length, part=part).flatten(),
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
        matrix_optimizer(matrices, lr=phase.matrix_learning_rate),
        torch.optim.AdamW(others, lr=phase.learning_rate, betas=(0.9, 0.95), weight_decay=0.0),
    ]


def _phase(part: str, settings: WarmStartSettings) -> Phase:
    return getattr(settings, part)


def _identity(part: str, seed: int, settings: WarmStartSettings, fields: Fields | None = None) -> dict[str, Any]:
    """What the weights depend on: this part and those before it; the easy start does not depend on the hard phase."""
    path = next(parts for parts in _PARTS.values() if part in parts)
    used = path[: path.index(part) + 1]
    skipped = set(ALL_NOISE) - set(used)
    settings_used = {name: value for name, value in asdict(settings).items() if name not in skipped}
    noise = {name: asdict(ALL_NOISE[name]) for name in used}
    asked = {} if fields is None else {"fields": asdict(fields)}
    return {"difficulty": part, "seed": seed, "settings": settings_used, "noise": noise, **asked}


def _folder_name(part: str, seed: int, settings: WarmStartSettings, fields: Fields | None = None) -> str:
    key = hashlib.sha256(json.dumps(_identity(part, seed, settings, fields), sort_keys=True).encode()).hexdigest()
    task = f"digits-{part}" if fields is None else f"{part}-{fields.kind}-{fields.count}"
    return f"{task}-{seed}-{key[:12]}"


@contextmanager
def _one_thread() -> Iterator[None]:
    """At this size a second thread helps little on an idle machine and makes a busy one several times slower."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(threads)
