"""Sample a policy's completions again from fixed prefixes: from before the last blocks, or from before single tokens.

And the critics of token fidelity: the run's own, and one fitted on other prompts.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cached_property
from itertools import chain, count
from pathlib import Path
from typing import Any

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from spanwise.batch import pad_tokens
from spanwise.engines.sample import continue_ids, end_ids, prompt_ids, sample
from spanwise.errors import DataError, RecipeError
from spanwise.fidelity.baselines import Rerolls, mean_and_noise
from spanwise.fidelity.tokens import DECISION, Trajectories
from spanwise.layout import Layout
from spanwise.modes.critic.config import CriticConfig
from spanwise.modes.critic.value_model import ABOUT, Saved, ValueModel
from spanwise.modes.sequences import Sequences, left_padded
from spanwise.objective import Objective
from spanwise.score import score_all
from spanwise.segment import Vocabulary, find_blocks
from spanwise.tasks.embedded import Task, stated_confidences
from spanwise.types import BlockText, Spans

#: The largest numbers of decisions and of other tokens re-rolled in a completion; in the embedded task all are.
MOST = 16
#: Tokens less probable than this are always re-rolled on both sides, because SAE cuts at these tokens.
UNLIKELY = 0.2
#: Continuations sampled at a time, and their tokens: with more, moving the cache takes longer than computing.
ROWS, TOKENS = 512, 32_768
#: The numbers of fitting steps after which the critic is evaluated.
CRITIC_STEPS = (5, 25, 80)
#: Completions per fitting step.
CRITIC_BATCH = 256
LEARNING_RATE = 1e-3
#: The number of a dataset row, and the tokens of a completion so far.
Prefix = tuple[int, tuple[int, ...]]


@dataclass(frozen=True)
class FirstBlocks:
    """The first blocks of N completions."""

    prompt_n: Int[Tensor, " n"]
    heads: Sequence[Sequence[int]]  # the token ids of each completion's prompt
    ids_nt: Int[Tensor, "n t"]  # the token ids up to the end of the longest first block
    mask_nt: Bool[Tensor, "n t"]  # the trainable tokens of the first block
    reward_n: Float[Tensor, " n"]  # whether the block is right; NaN if the completion has no such block

    def take(self, rows: slice) -> FirstBlocks:
        """Return some of the completions."""
        return FirstBlocks(*(column[rows] for column in vars(self).values()))

    def sequences(self, device: Any = "cpu") -> Sequences:
        """Return prompts and tokens as a model reads them."""
        head_nl, head_mask_nl = left_padded(self.heads, 0, device)
        ids_nt = self.ids_nt.to(device)
        ids_nl, attention_nl = torch.cat([head_nl, ids_nt], dim=1), torch.cat([head_mask_nl, torch.ones_like(ids_nt)], dim=1)
        return Sequences(ids_nl, attention_nl, self.ids_nt.shape[1])


@dataclass(frozen=True)
class Roller:
    """Samples completions of a task, continues them from any prefix, and judges their first blocks by the answer."""

    model: Any
    tokenizer: Any
    task: Task
    temperature: float
    limit: int  # the longest completion, in tokens

    @cached_property
    def vocabulary(self) -> Vocabulary:
        """The bytes of every token id that the model can sample."""
        return Vocabulary.of(self.tokenizer, self.model)

    def completions(self, rows: Any, *, samples: int, seed: int) -> tuple[Tensor, Tensor, Tensor]:
        """Sample `samples` completions of each dataset row; return ids, mask and the row of each completion."""
        ids_nt, mask_nt = sample(
            self.model, self.tokenizer, rows["prompt"][:], samples=samples, max_new_tokens=self.limit,
            temperature=self.temperature, seed=seed,
        )  # fmt: skip
        return ids_nt, mask_nt, torch.arange(len(rows)).repeat_interleave(samples)

    def continued(
        self, rows: Any, prefixes: Sequence[Prefix], *, rerolls: int, seed: int, batch_size: int = 512
    ) -> list[BlockText]:
        """Sample completions that begin with each prefix, and return their blocks."""
        heads, shortest = prompt_ids(self.tokenizer, rows["prompt"][:]), min(len(prefix) for _, prefix in prefixes)
        more_nt, more_mask_nt = continue_ids(
            self.model, self.tokenizer, [[*heads[row], *prefix] for row, prefix in prefixes], samples=rerolls,
            max_new_tokens=max(1, self.limit - shortest), temperature=self.temperature, seed=seed, batch_size=batch_size,
        )  # fmt: skip
        pairs = zip([prefix for _, prefix in prefixes for _ in range(rerolls)], more_nt, more_mask_nt, strict=True)
        return self.read(
            *pad_tokens([[*prefix, *more_t[real_t].tolist()][: self.limit] for prefix, more_t, real_t in pairs])
        )[1]

    def read(self, ids_nt: Tensor, mask_nt: Tensor) -> tuple[Spans, list[BlockText]]:
        """Find the blocks of completions and their text."""
        return find_blocks(ids_nt, mask_nt, layout=self.task.layout, vocabulary=self.vocabulary)

    def rewards(
        self, rows: Any, text: list[BlockText], row_n: Sequence[int], objective: Objective | None = None
    ) -> Float[Tensor, " n"]:
        """Compute an objective's reward of completions, by default whether the first block is right; NaN without a reward."""
        objective = objective or Objective("correct", pays=(self.task.layout.names[0],))
        return score_all([objective], text, columns=self.columns(rows, row_n)).reward_nm[:, 0]

    def columns(self, rows: Any, row_n: Sequence[int]) -> dict[str, list[Any]]:
        """Return the dataset's columns, one entry per completion."""
        cells = {name: rows[name][:] for name in rows.column_names if name != "prompt"}
        return {name: [column[row] for row in row_n] for name, column in cells.items()}

    def blocks(self, rows: Any, *, samples: int, seed: int) -> FirstBlocks:
        """Sample the first blocks of `samples` completions of each dataset row."""
        with self._stopping():
            ids_nt, mask_nt, row_n = self.completions(rows, samples=samples, seed=seed)
        spans, text = self.read(ids_nt, mask_nt)
        inside_nt = spans.block_nt == 0
        width = int(inside_nt.any(dim=0).nonzero().max()) + 1 if bool(inside_nt.any()) else 1
        heads = [head for head in prompt_ids(self.tokenizer, rows["prompt"][:]) for _ in range(samples)]
        reward_n = self.rewards(rows, text, row_n.tolist())
        return FirstBlocks(row_n, heads, ids_nt[:, :width], inside_nt[:, :width], reward_n)

    def rewards_from(self, rows: Any, prefixes: Sequence[Prefix], *, rerolls: int, seed: int) -> Float[Tensor, "d m"]:
        """Compute the rewards of fresh continuations of each prefix."""
        reward_dm = torch.full((len(prefixes), rerolls), torch.nan, dtype=torch.float64)
        # The shortest prefixes first, so that prefixes of one batch have about as much to sample.
        order = sorted(range(len(prefixes)), key=lambda d: len(prefixes[d][1]))
        capacity = min(ROWS, TOKENS // self.limit)
        prefix_count = max(1, capacity // rerolls)
        for number, first in enumerate(range(0, len(order), prefix_count)):
            indices = order[first : first + prefix_count]
            chosen = [prefixes[d] for d in indices]
            with self._stopping():
                text = self.continued(rows, chosen, rerolls=rerolls, seed=seed + number, batch_size=max(capacity, rerolls))
            row_n = [row for row, _ in chosen for _ in range(rerolls)]
            reward_dm[indices] = self.rewards(rows, text, row_n).reshape(-1, rerolls)
        return reward_dm

    @contextmanager
    def _stopping(self) -> Iterator[None]:
        """End a completion at the tag of a later block, because the reward is settled there; for one-token tags only."""
        config, vocabulary = self.model.generation_config, self.tokenizer.get_vocab()
        (_, first_tags), *later = self.task.layout.blocks
        opening = (f"<{tag}>" for _, tags in later for tag in tags if tag not in first_tags)
        old_end_ids = config.eos_token_id
        try:
            ends = end_ids(self.model, self.tokenizer)
            config.eos_token_id = [*ends, *(vocabulary[tag] for tag in opening if tag in vocabulary)]
            yield
        finally:
            config.eos_token_id = old_end_ids

    @torch.no_grad()
    def logp(self, blocks: FirstBlocks) -> Float[Tensor, "n t"]:
        """Compute the log-probability of each token at the sampling temperature."""
        rows = blocks.sequences(self.model.device)
        place_nl = (rows.attention_nl.cumsum(dim=1) - 1).clamp(min=0)
        logits_nlv = self.model(input_ids=rows.ids_nl, attention_mask=rows.attention_nl, position_ids=place_nl).logits
        logp_ntv = (logits_nlv[:, -rows.width - 1 : -1].double() / self.temperature).log_softmax(dim=-1)
        return logp_ntv.gather(2, blocks.ids_nt.to(logp_ntv.device)[..., None]).squeeze(-1).cpu()


def states_confidence(layout: Layout) -> bool:
    """Return whether the last block of a layout holds a confidence, on which the baselines are compared."""
    return "confidence" in layout.keys[layout.names[-1]]


def collect_last_blocks(roller: Roller, rows: Any, *, samples: int = 32, rerolls: int = 32, seed: int = 0) -> Rerolls:
    """Sample completions, then fresh last blocks from every distinct prefix: the prompt and every token before the last block."""
    layout, last = roller.task.layout, roller.task.layout.names[-1]
    if not states_confidence(layout):
        raise RecipeError(f"Fidelity re-rolls stated confidences, but the last block '{last}' has no tag 'confidence'.")
    ids_nt, mask_nt, row_n = roller.completions(rows, samples=samples, seed=seed)
    spans, text = roller.read(ids_nt, mask_nt)
    numbers: dict[Prefix, int] = {}
    prefix_n = torch.full((len(text),), -1)
    for n in spans.present_nk[:, -1].nonzero()[:, 0].tolist():
        prefix = int(row_n[n]), tuple(ids_nt[n, : int(spans.start_nk[n, -1])].tolist())
        prefix_n[n] = numbers.setdefault(prefix, len(numbers))
    if not numbers:
        raise DataError(f"None of {len(text)} completions has the block '{last}'; there is nothing to re-roll.")
    reread = roller.continued(rows, list(numbers), rerolls=rerolls, seed=seed + 1)
    return Rerolls(
        confidence_xs=stated_confidences(text, last, layout).reshape(-1, samples),
        outcome_xs=roller.rewards(rows, text, row_n.tolist()).reshape(-1, samples),
        prefix_xs=prefix_n.reshape(-1, samples),
        again_dm=stated_confidences(reread, last, layout).reshape(-1, rerolls),
    )


def collect_tokens(
    roller: Roller,
    rows: Any,
    *,
    samples: int = 4,
    rerolls: int = 48,
    sets: int = 2,
    most: int = MOST,
    seed: int = 0,
) -> tuple[FirstBlocks, Trajectories, Float[Tensor, "n t m"]]:
    """Sample first blocks, and re-roll them before each token, or before the tokens that `picked` chooses in long blocks."""
    seeds = make_seeds(seed)
    blocks = roller.blocks(rows, samples=samples, seed=next(seeds))
    mask_nt = blocks.mask_nt
    if not bool(mask_nt.any()):
        raise DataError(
            f"None of {len(blocks.heads)} completions has the block '{roller.task.layout.names[0]}'; there is nothing to re-roll."
        )
    logp_nt, reroll_seed = roller.logp(blocks), next(seeds)
    weight_nt = picked(logp_nt, mask_nt, most=most, seed=reroll_seed)
    if sets > 1 and bool((mask_nt & (weight_nt == 0)).any()):
        raise DataError(
            f"Completions of up to {int(mask_nt.sum(dim=1).max())} tokens are re-rolled at some of them; the critic 'mc' "
            "needs all. Use the other critics: --critics own, or --critics fitted."
        )
    latest_nt = torch.where(mask_nt, torch.arange(mask_nt.shape[1]), -1).cummax(dim=1).values
    # The last trainable token before each; -1: none.
    before_nt = torch.nn.functional.pad(latest_nt[:, :-1], (1, 0), value=-1)
    after_nt = (before_nt < 0) | (weight_nt > 0).gather(1, before_nt.clamp(min=0))
    numbers: dict[Prefix, int] = {}
    place_nt = torch.full(blocks.ids_nt.shape, -1)  # index -1 is the last row, which holds NaN for tokens without a prefix
    for n, t in (mask_nt & ((weight_nt > 0) | after_nt)).nonzero().tolist():
        prefix = int(blocks.prompt_n[n]), tuple(blocks.ids_nt[n, :t].tolist())
        place_nt[n, t] = numbers.setdefault(prefix, len(numbers))
    reward_dm = roller.rewards_from(rows, list(numbers), rerolls=sets * rerolls, seed=reroll_seed)
    reward_dm = torch.cat([reward_dm, torch.full((1, sets * rerolls), torch.nan)])
    value_d, noise_d = mean_and_noise(reward_dm[:, :rerolls])
    # The mean over the second set of re-rolls, the last result, serves as a critic with independent noise.
    trajectories = Trajectories(
        blocks.prompt_n, blocks.reward_n, value_d[place_nt], noise_d[place_nt], logp_nt, mask_nt, weight_nt
    )
    return blocks, trajectories, reward_dm[:, rerolls:][place_nt]


def picked(logp_nt: Float[Tensor, "n t"], mask_nt: Bool[Tensor, "n t"], *, most: int, seed: int = 0) -> Float[Tensor, "n t"]:
    """Choose the tokens with Monte Carlo values on both sides; return how many tokens each represents, 0 if not chosen."""
    draw_nt = torch.rand(mask_nt.shape, generator=torch.Generator().manual_seed(seed))
    p_nt = logp_nt.exp()
    # All unlikely tokens, because SAE cuts there; `most` random ones of the other decisions and of the other tokens.
    weight_nt = (mask_nt & (p_nt < UNLIKELY)).double()
    for low, high in ((UNLIKELY, DECISION), (DECISION, math.inf)):
        kind_nt = mask_nt & (p_nt >= low) & (p_nt < high)
        rank_nt = draw_nt.masked_fill(~kind_nt, math.inf).argsort(dim=1).argsort(dim=1)
        count_n1 = kind_nt.sum(dim=1, keepdim=True)
        weight_nt += torch.where(kind_nt & (rank_nt < most), count_n1 / count_n1.clamp(min=1, max=most), 0.0)
    return weight_nt


def make_seeds(seed: int) -> Iterator[int]:
    """Yield seeds for everything that is sampled, one after the other."""
    generator = torch.Generator().manual_seed(seed)
    while True:
        yield int(torch.randint(2**31, (1,), generator=generator))


def own_critic_folder(model_folder: Path) -> Path | None:
    """Return the folder of the critic that was saved with a model, in a checkpoint or beside the checkpoint, or None."""
    places = [model_folder / "critic", *([model_folder.parent / "critic"] if model_folder.name == "model" else [])]
    return next((place for place in places if (place / ABOUT).is_file()), None)


def own_critic(place: Path, tokenizer: Any, objectives: Sequence[str]) -> tuple[ValueModel, int]:
    """Load a saved critic, and find its value for a right answer."""
    saved = Saved.of(place)
    if saved is None:
        raise DataError(f"There is no {ABOUT} in '{place}'.")
    names = saved.names
    objective = names[0] if len(names) == len(objectives) == 1 else "correct"
    if objective not in names:
        of = " + ".join(objectives) if len(names) == 1 else ", ".join(names)
        raise RecipeError(
            f"The critic '{place}' gives the value of {of}, but only the reward 'correct' is re-rolled. Train with "
            "values: objective, or look at other critics: --critics fitted,mc."
        )
    return ValueModel.load(str(place), names, saved.config, tokenizer).eval(), names.index(objective)


@torch.no_grad()
def values(critic: ValueModel, blocks: FirstBlocks, *, stream: int = 0) -> Float[Tensor, "n t"]:
    """Return a critic's value before each token."""
    device = next(critic.parameters()).device
    return critic.value(critic(blocks.sequences(device)))[:, :-1, stream].cpu().double()


def fitted_critics(roller: Roller, rows: Any, *, steps: Sequence[int], seed: int) -> Iterator[tuple[int, ValueModel]]:
    """Fit one critic to the rewards of fresh completions, and yield the same critic after each number of steps."""
    batches = _batches(roller, rows, make_seeds(seed))
    first = next(batches)
    critic = ValueModel.of_policy(roller.model, ("return",), CriticConfig())
    trunk = {id(parameter) for parameter in critic.model.base_model.parameters()}
    for parameter in critic.model.parameters():
        if id(parameter) not in trunk and parameter.dim() == 1:
            torch.nn.init.constant_(parameter, float(first.reward_n.nanmean().nan_to_num(nan=0.0)))
    optimizer = torch.optim.AdamW(critic.parameters(), lr=LEARNING_RATE, weight_decay=0.0)
    for step, batch in zip(range(1, max(steps) + 1), chain([first], batches), strict=False):
        use_nt = batch.mask_nt & ~batch.reward_n.isnan()[:, None]
        if bool(use_nt.any()):
            value_nt = critic(batch.sequences(roller.model.device))[:, :-1, 0]
            error_nt = value_nt - batch.reward_n.float()[:, None].to(value_nt.device)
            error_nt[use_nt.to(value_nt.device)].square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
        if step in steps:
            yield step, critic


def _batches(roller: Roller, rows: Any, seeds: Iterator[int]) -> Iterator[FirstBlocks]:
    """Yield batches of fresh completions without end; two are sampled at a time, because large batches cost less."""
    for first in count(0, 2 * CRITIC_BATCH):
        picked = [x % len(rows) for x in range(first, first + 2 * CRITIC_BATCH)]
        blocks = roller.blocks(rows.select(picked), samples=1, seed=next(seeds))
        yield blocks.take(slice(0, CRITIC_BATCH))
        yield blocks.take(slice(CRITIC_BATCH, None))
