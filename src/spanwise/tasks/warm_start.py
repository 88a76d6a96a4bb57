"""The warm start: train an embedded task's tiny model once, on flawed completions, and cache it.

A cached model is a whole folder or none, and a record holds the digest of each file.
"""

from __future__ import annotations

import json
import logging
import math
import os
import shutil
import tempfile
from collections.abc import Callable, Iterable, Iterator
from dataclasses import asdict, dataclass, replace
from hashlib import sha256
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from spanwise.disk import refusal
from spanwise.errors import DataError
from spanwise.tasks.digits import HELD_OUT
from spanwise.tasks.embedded import PAD, Course, Start, Stretch, Task, embedded
from spanwise.tasks.fields import Fields

_RECORD = "warm_start.json"
#: The folder of the warm starts in the package. `make starts` trains them again.
SHIPPED = Path(__file__).with_name("starts")
_logger = logging.getLogger(__name__)
Progress = Callable[[int, int, float], None]


@dataclass(frozen=True)
class Phase:
    """A part of supervised training with its own cosine schedule.

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
    """Everything that a warm start depends on, besides task, seed and training texts.

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
        long_tables: arithmetic alone, from random weights; a model that meets it first within long traces learns it much later.
        long_early: long traces, from the end of `long_tables`, without a slip.
        long: from the end of `long_early`; now with slips.
        fields_early: the objects of `fields`, from random weights, every value as its rule says.
        fields: from the end of `fields_early`; most values do not follow their rule.
        invoices_early: letters with few facts, from random weights.
        invoices: whole letters, from the end of `invoices_early`, read without a fault.
        invoices_clerk: from the end of `invoices`; now with the faults of a hurried clerk.
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
    long_tables: Phase = Phase(steps=200, learning_rate=3e-3, matrix_learning_rate=0.03)
    long_early: Phase = Phase(steps=250, learning_rate=2e-3, matrix_learning_rate=0.02)
    long: Phase = Phase(steps=100, learning_rate=1e-3, matrix_learning_rate=0.01)
    fields_early: Phase = Phase(steps=400, learning_rate=3e-3, matrix_learning_rate=0.03)
    fields: Phase = Phase(steps=100, learning_rate=1e-3, matrix_learning_rate=0.005)
    invoices_early: Phase = Phase(steps=150, learning_rate=3e-3, matrix_learning_rate=0.02)
    invoices: Phase = Phase(steps=250, learning_rate=3e-3, matrix_learning_rate=0.02)
    invoices_clerk: Phase = Phase(steps=120, learning_rate=1e-3, matrix_learning_rate=0.005)


def shortened(steps: int, settings: WarmStartSettings | None = None) -> WarmStartSettings:
    """Return warm-start settings with `steps` steps per phase. Training is short, and the model learns little."""
    settings = settings or WarmStartSettings()
    return replace(settings, **{name: replace(phase, steps=steps) for name, phase in _phases(settings).items()})


def warm_start(
    start: Start | Fields | Course,
    *,
    seed: int = 0,
    cache_folder: str | Path | None = None,
    progress: Progress | None = None,
    settings: WarmStartSettings | None = None,
    device: str | torch.device = "cpu",
) -> Path:
    """Return the folder of the warm-started model and its tokenizer. The first call trains and caches the model.

    The letters' start with seed 0 comes with the package, so that nobody waits four minutes for it. The hard start continues the
    easy one and shares its cache; the start with two attempts is its own. A cached folder with a missing or altered file is
    rebuilt, with a notice in the log. On the CPU training takes one thread.

    Args:
        start: "easy" solves about 58 % of the held-out prompts, "hard" about 33 % and refuses twice as often (9 %); "twice" makes
            two attempts, each of which solves about 18 %, and "long" writes some seventy tokens, see `tasks.digits`,
            and solves about half; "invoices" reads letters into JSON, with about 30 % of nine fields right.
            `Fields` write a JSON object, see `fields`; every kind and number of fields has a start of its own.
        seed: of the weights and the traces.
        cache_folder: where to keep it; None: `$SPANWISE_CACHE`, else the cache of the user, or where the package brings this start.
        progress: called as `progress(step, total, loss)` after every step that is really made.
        settings: None for the defaults.
        device: where to train. The cache does not tell devices apart: their weights differ by rounding alone.

    Returns:
        A folder for `from_pretrained`.

    Raises:
        DataError: the folder cannot be written.
    """
    settings = settings or WarmStartSettings()
    course = start if isinstance(start, Course) else embedded(start).course
    cache_root = Path(cache_folder) if cache_folder is not None else default_cache_folder()
    stretches = course.stretches
    stage_folders = [cache_root / _folder_name(course, index, seed, settings) for index in range(len(stretches))]
    if cache_folder is None and is_intact(SHIPPED / stage_folders[-1].name):
        return SHIPPED / stage_folders[-1].name
    possible_counts = range(len(stretches), 0, -1)
    stages_done = next((count for count in possible_counts if is_intact(stage_folders[count - 1])), 0)
    if stages_done == len(stretches):
        return stage_folders[-1]
    total_steps = sum(_phases(settings)[stretch.name].steps for stretch in stretches[stages_done:])
    tokenizer = course.tokenizer()
    model = load(stage_folders[stages_done - 1]) if stages_done else course.model(tokenizer, seed, **course.shape)
    model.to(device)
    steps_done = 0
    for index in range(stages_done, len(stretches)):
        for loss in _train(model, tokenizer, stretches[index], seed, settings, centred=course.centred):
            steps_done += 1
            if progress is not None:
                progress(steps_done, total_steps, loss)
        save(model, tokenizer, stage_folders[index], record=_identity(course, index, seed, settings))
    return stage_folders[-1]


def digits_task(
    start: Start | Fields,
    *,
    seed: int = 0,
    start_seed: int = 0,
    train_size: int,
    eval_size: int = HELD_OUT,
    cache_folder: str | Path | None = None,
    progress: Progress | None = None,
    settings: WarmStartSettings | None = None,
) -> Task:
    """Build an embedded task with its warm-started model. It has digit chains, JSON objects or letters.

    The evaluation prompts are the same for every seed; neither the training prompts nor the warm start contain any of the 512.

    Args:
        start: how good the warm start is, "twice" for two attempts, "long" for the long chain; see `warm_start`. `Fields` ask for a
            JSON object, and the column `answer` holds the gold object as text.
        seed: of the training prompts.
        start_seed: of the warm start; runs that differ only in `seed` share it.
        train_size: how many training prompts.
        eval_size: how many of the 512 evaluation prompts, from the first.
        cache_folder, progress, settings: see `warm_start`.

    Raises:
        DataError: `eval_size` is not in 1..512, `train_size` is below 1, or the cache cannot be written.
    """
    if train_size < 1:
        raise DataError(f"A task needs at least 1 training prompt, but train_size is {train_size}; set it to 1 or more.")
    embedded_task = embedded(start)
    eval_problems = embedded_task.source.held_out(eval_size)
    train_problems = embedded_task.source.training(train_size, rng=np.random.default_rng([seed, 1]))
    return Task(
        embedded_task.name,
        str(warm_start(start, seed=start_seed, cache_folder=cache_folder, progress=progress, settings=settings)),
        _dataset(train_problems.prompts, embedded_task.answers(train_problems)),
        _dataset(eval_problems.prompts, embedded_task.answers(eval_problems)),
        embedded_task.layout,
        embedded_task.longest,
    )


def _dataset(prompts: list[str], answers: list[str]) -> Any:
    from datasets import Dataset

    return Dataset.from_dict({"prompt": prompts, "answer": answers})


def _train(
    model: Any, tokenizer: Any, stretch: Stretch, seed: int, settings: WarmStartSettings, *, centred: bool
) -> Iterator[float]:
    """Train the model on one stage of its warm start. After each step, yield the mean loss of the learned tokens."""
    phase = _phases(settings)[stretch.name]

    def learning_rate_factor(step: int) -> float:
        cosine_factor = (1 + math.cos(math.pi * step / max(phase.steps, 1))) / 2
        return min(1.0, (step + 1) / max(settings.warm_up, 1)) * (settings.floor + (1 - settings.floor) * cosine_factor)

    optimizers = _build_optimizers(model, phase)
    lr_schedules = [torch.optim.lr_scheduler.LambdaLR(optimizer, learning_rate_factor) for optimizer in optimizers]
    batch_rng = np.random.default_rng([seed, 0, stretch.place])
    old_thread_count = torch.get_num_threads()
    id_of_token = tokenizer.get_vocab()
    model.train()
    # A second thread hardly speeds up so small a model, and slows a busy machine down.
    torch.set_num_threads(1)
    try:
        for _ in range(phase.steps):
            ids_nt, prompt_length_n = stretch.batch(tokenizer, settings.batch, batch_rng)
            min_prompt_length = int(prompt_length_n.min())
            ids_nt, prompt_length_n = ids_nt.to(model.device), prompt_length_n.to(model.device)
            kept_logit_count = ids_nt.shape[1] - min_prompt_length + 1
            logits_ntv = model(input_ids=ids_nt, logits_to_keep=kept_logit_count).logits
            is_learned_nt = torch.arange(ids_nt.shape[1], device=model.device) >= prompt_length_n[:, None]
            if stretch.learned is not None:
                is_learned_nt &= stretch.learned(ids_nt, id_of_token)
            target_nt = torch.where(is_learned_nt, ids_nt, id_of_token[PAD])
            loss = torch.nn.functional.cross_entropy(
                logits_ntv[:, :-1].flatten(0, 1), target_nt[:, min_prompt_length:].flatten(), ignore_index=id_of_token[PAD]
            )
            loss.backward()
            torch.nn.utils.clip_grad_norm_(model.parameters(), settings.clip)
            for optimizer, schedule in zip(optimizers, lr_schedules, strict=True):
                optimizer.step()
                optimizer.zero_grad()
                schedule.step()
            if centred:
                embeddings_vd = model.get_input_embeddings().weight.data
                embeddings_vd -= embeddings_vd.mean(dim=0)
            yield loss.item()
    finally:
        torch.set_num_threads(old_thread_count)
    model.eval()


def _build_optimizers(model: Any, phase: Phase) -> list[torch.optim.Optimizer]:
    matrix_weights: list[torch.nn.Parameter] = []
    other_weights: list[torch.nn.Parameter] = []
    for weight in model.parameters():
        is_matrix = weight.ndim == 2 and weight is not model.get_input_embeddings().weight
        (matrix_weights if is_matrix else other_weights).append(weight)
    return [
        matrix_optimizer(matrix_weights, lr=phase.matrix_learning_rate),
        torch.optim.AdamW(other_weights, lr=phase.learning_rate, betas=(0.9, 0.95), weight_decay=0.0),
    ]


def _phases(settings: WarmStartSettings) -> dict[str, Phase]:
    return {name: phase for name, phase in vars(settings).items() if isinstance(phase, Phase)}


def _identity(course: Course, index: int, seed: int, settings: WarmStartSettings) -> dict[str, Any]:
    """Return all that determines a model's weights after a stage of its warm start."""
    stretch_of_name = {stretch.name: stretch for stretch in course.stretches[: index + 1]}
    unused_phases = _phases(settings).keys() - stretch_of_name.keys()
    return {
        "difficulty": course.stretches[index].name,
        "seed": seed,
        "settings": {name: setting for name, setting in asdict(settings).items() if name not in unused_phases},
        "noise": {name: asdict(stretch.noise) for name, stretch in stretch_of_name.items()},
        **course.key,
    }


def _folder_name(course: Course, index: int, seed: int, settings: WarmStartSettings) -> str:
    identity_json = json.dumps(_identity(course, index, seed, settings), sort_keys=True)
    return f"{course.folder.format(course.stretches[index].name)}-{seed}-{sha256(identity_json.encode()).hexdigest()[:12]}"


def default_cache_folder() -> Path:
    """Return the cache: `$SPANWISE_CACHE`, else `$XDG_CACHE_HOME/spanwise`, else `~/.cache/spanwise`."""
    if folder := os.environ.get("SPANWISE_CACHE"):
        return Path(folder).expanduser()
    return Path(os.environ.get("XDG_CACHE_HOME") or "~/.cache").expanduser() / "spanwise"


def is_intact(folder: Path) -> bool:
    """Return whether a cached folder exists with every file unchanged. Log a notice if a file has changed."""
    if not folder.exists():
        return False
    if damaged_files := _damaged_files(folder):
        damaged_files_text = ", ".join(damaged_files)
        _logger.warning("The cached warm start '%s' is damaged (%s); spanwise builds it again.", folder, damaged_files_text)
    return not damaged_files


def _damaged_files(folder: Path) -> list[str]:
    """Return the files of a cached folder that have changed since they were written."""
    try:
        digest_of_file = json.loads((folder / _RECORD).read_text())["files"]
        return [name for name, digest in digest_of_file.items() if _digest(folder / name) != digest]
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        return [f"{_RECORD} ({type(error).__name__})"]


def _digest(file: Path) -> str:
    return sha256(file.read_bytes()).hexdigest() if file.is_file() else "missing"


def save(model: Any, tokenizer: Any, folder: Path, *, record: dict[str, Any]) -> None:
    """Save the model under a temporary name and rename its folder. So a reader sees the whole folder or none."""
    try:
        folder.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=folder.parent, prefix=".writing-", ignore_cleanup_errors=True) as scratch_path:
            new_folder = Path(scratch_path) / folder.name
            model.save_pretrained(new_folder)
            tokenizer.save_pretrained(new_folder)
            digest_of_file = {file.name: _digest(file) for file in sorted(new_folder.iterdir())}
            (new_folder / _RECORD).write_text(json.dumps({**record, "files": digest_of_file}, indent=2))
            if not _damaged_files(folder):  # another process saved the warm start first, and may be reading the folder
                return
            shutil.rmtree(folder, ignore_errors=True)
            new_folder.rename(folder)
    except Exception as error:
        system_reason = (error.strerror or str(error)) if isinstance(error, OSError) else None
        failure_reason = refusal(error) or system_reason
        if failure_reason is None:
            raise
        if not _damaged_files(folder):  # meanwhile another process has saved the warm start
            return
        raise DataError(
            f"The warm start cannot be written to '{folder}' ({failure_reason}); set SPANWISE_CACHE to a folder you may write to."
        ) from error


def load(folder: Path) -> Any:
    """Load the model from the folder of a cached warm start."""
    from transformers import AutoModelForCausalLM

    return AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, trust_remote_code=False)


#: The constants of the optimiser Muon, as in `torch.optim.Muon`.
_A, _B, _C, _STEPS, _EPS, _MOMENTUM = 3.4445, -4.7750, 2.0315, 5, 1e-7, 0.95


def matrix_optimizer(matrices: Iterable[Tensor], lr: float) -> torch.optim.Optimizer:
    """Return `torch.optim.Muon` if bfloat16 is fast on the device. Else: the same in float32."""
    matrix_weights = list(matrices)
    has_fast_bfloat16 = matrix_weights[0].is_cuda or torch.backends.cpu.get_cpu_capability().startswith("AVX512")
    return (torch.optim.Muon if has_fast_bfloat16 else Float32Muon)(matrix_weights, lr=lr, weight_decay=0.0)


class Float32Muon(torch.optim.Optimizer):
    """`torch.optim.Muon` with its defaults, in the precision of the weights."""

    def __init__(self, matrices: Iterable[Tensor], lr: float, weight_decay: float = 0.0) -> None:
        super().__init__(matrices, {"lr": lr, "weight_decay": weight_decay})

    @torch.no_grad()
    def step(self, closure: None = None) -> None:  # type: ignore[override]
        """Take one step of the optimiser; closures are not supported."""
        for group in self.param_groups:
            for weight in group["params"]:
                if weight.grad is None:
                    continue
                momentum_buffer = self.state[weight].setdefault("momentum_buffer", torch.zeros_like(weight))
                momentum_buffer.lerp_(weight.grad, 1 - _MOMENTUM)
                weight_update = orthogonalised(weight.grad.lerp(momentum_buffer, _MOMENTUM))
                weight.mul_(1 - group["lr"] * group["weight_decay"])
                weight.add_(weight_update, alpha=-group["lr"] * max(1.0, weight.shape[0] / weight.shape[1]) ** 0.5)


def orthogonalised(matrix: Tensor) -> Tensor:
    """Return a matrix with the same singular vectors, but singular values near 1. They are 0.7 to 1.2."""
    wide_matrix = matrix.T if matrix.shape[0] > matrix.shape[1] else matrix
    wide_matrix = wide_matrix / wide_matrix.norm().clamp(min=_EPS)
    for _ in range(_STEPS):
        gram_matrix = wide_matrix @ wide_matrix.T
        gram_polynomial = torch.addmm(gram_matrix, gram_matrix, gram_matrix, beta=_B, alpha=_C)
        wide_matrix = torch.addmm(wide_matrix, gram_polynomial, wide_matrix, beta=_A)
    return wide_matrix.T if matrix.shape[0] > matrix.shape[1] else wide_matrix
