"""Monte Carlo values before the tokens of the first block of completions: before all of them, or before a sample of long ones."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from spanwise.commands.fidelity.fidelity import joined
from spanwise.engines.sample import continue_ids, prompt_ids, sample
from spanwise.engines.value_model import Sequences
from spanwise.errors import DataError
from spanwise.measure.token_reference import place_before
from spanwise.measure.trajectories import Trajectories
from spanwise.objective import Objective
from spanwise.score import score_all
from spanwise.segment import Vocabulary, find_blocks
from spanwise.tasks import Task

#: Decisions, and tokens that are none, of each completion that are re-rolled on both sides; those of the embedded task all are.
MOST = 16
#: Continuations sampled at a time, and their tokens: the cache of more long ones than that is slower to move than to compute.
ROWS, TOKENS = 512, 32_768


@dataclass(frozen=True)
class Blocks:
    """First blocks of N completions.

    Attributes:
        prompt_n: the prompt of each completion.
        heads: the token ids of each completion's prompt.
        ids_nt: the tokens of the completions, as far as the longest first block.
        mask_nt: the trainable tokens of the first block.
        reward_n: whether the block is right; NaN where the completion has none.
    """

    prompt_n: Int[Tensor, " n"]
    heads: Sequence[Sequence[int]]
    ids_nt: Int[Tensor, "n t"]
    mask_nt: Bool[Tensor, "n t"]
    reward_n: Float[Tensor, " n"]

    def take(self, rows: slice) -> Blocks:
        """Some of the completions."""
        return Blocks(self.prompt_n[rows], self.heads[rows], self.ids_nt[rows], self.mask_nt[rows], self.reward_n[rows])

    def sequences(self, device: Any = "cpu") -> Sequences:
        """Prompts and tokens as a model reads them."""
        longest = max(map(len, self.heads))
        head_nl = torch.zeros(len(self.heads), longest, dtype=torch.long)
        for n, head in enumerate(self.heads):
            head_nl[n, longest - len(head) :] = torch.tensor(head)
        length_n = torch.tensor([len(head) for head in self.heads])
        there_nl = torch.arange(longest) >= longest - length_n[:, None]
        attention_nl = torch.cat([there_nl, torch.ones_like(self.mask_nt)], dim=1).long()
        ids_nl = torch.cat([head_nl, self.ids_nt], dim=1)
        return Sequences(ids_nl.to(device), attention_nl.to(device), self.ids_nt.shape[1])


@dataclass(frozen=True)
class Roller:
    """What samples first blocks of a task, goes on from the middle of them, and judges the result.

    Attributes:
        model, tokenizer: as `from_pretrained` gives them.
        task: whose first block is judged by its answer.
        temperature: of sampling.
        limit: the longest completion, in tokens.
    """

    model: Any
    tokenizer: Any
    task: Task
    temperature: float
    limit: int

    @cached_property
    def vocabulary(self) -> Vocabulary:
        """The bytes of every id the model can sample."""
        return Vocabulary.of(self.tokenizer, self.model)

    def blocks(self, rows: Any, *, samples: int, seed: int) -> Blocks:
        """The first blocks of `samples` completions of each dataset row."""
        with self._stopping():
            ids_nt, mask_nt = sample(
            self.model, self.tokenizer, rows["prompt"][:], samples=samples, max_new_tokens=self.limit,
            temperature=self.temperature, seed=seed,
        )  # fmt: skip
        prompt_n = torch.arange(len(rows)).repeat_interleave(samples)
        reward_n, block_nt = self.judge(rows, ids_nt, mask_nt, prompt_n.tolist())
        inside_nt = block_nt == 0
        width = int(inside_nt.any(dim=0).nonzero().max()) + 1 if bool(inside_nt.any()) else 1
        heads = [head for head in prompt_ids(self.tokenizer, rows["prompt"][:]) for _ in range(samples)]
        return Blocks(prompt_n, heads, ids_nt[:, :width], inside_nt[:, :width], reward_n)

    def judge(self, rows: Any, ids_nt: Tensor, mask_nt: Tensor, prompts: Sequence[int]) -> tuple[Tensor, Tensor]:
        """Rewards of whole completions, NaN where they have no first block, and the block of each token."""
        spans, text = find_blocks(ids_nt, mask_nt, layout=self.task.layout, vocabulary=self.vocabulary)
        columns = {name: rows[name][:] for name in rows.column_names if name != "prompt"}
        by_row = {name: [column[x] for x in prompts] for name, column in columns.items()}
        objective = Objective("correct", pays=(self.task.layout.names[0],))
        return score_all([objective], text, columns=by_row).reward_nm[:, 0], spans.block_nt

    def rewards_from(
        self, rows: Any, prefixes: Sequence[tuple[int, tuple[int, ...]]], *, rerolls: int, seed: int
    ) -> Float[Tensor, "d m"]:
        """Rewards of fresh continuations of each prefix: the number of its row, and the tokens of the completion so far."""
        heads = prompt_ids(self.tokenizer, rows["prompt"][:])
        reward_dm = torch.full((len(prefixes), rerolls), torch.nan, dtype=torch.float64)
        # The shortest first, so that those that run together have about as far to go.
        order = sorted(range(len(prefixes)), key=lambda d: len(prefixes[d][1]))
        room = min(ROWS, TOKENS // self.limit)
        together = max(1, room // rerolls)
        for number, members in enumerate(order[first : first + together] for first in range(0, len(order), together)):
            length = len(prefixes[members[0]][1])
            with self._stopping():
                more_nt, more_mask_nt = continue_ids(
                self.model, self.tokenizer, [[*heads[prefixes[d][0]], *prefixes[d][1]] for d in members], samples=rerolls,
                max_new_tokens=max(1, self.limit - length), temperature=self.temperature, seed=seed + number,
                batch_size=max(room, rerolls),
            )  # fmt: skip
            befores = [prefixes[d][1] for d in members for _ in range(rerolls)]
            ids_nt, mask_nt = joined(befores, more_nt, more_mask_nt, self.limit)
            prompts = [prefixes[d][0] for d in members for _ in range(rerolls)]
            reward_dm[members] = self.judge(rows, ids_nt, mask_nt, prompts)[0].reshape(-1, rerolls)
        return reward_dm

    @contextmanager
    def _stopping(self) -> Iterator[None]:
        """End a completion where a later block opens: the first one is over and its reward settled. For one-token tags only."""
        config, vocabulary = self.model.generation_config, self.tokenizer.get_vocab()
        (_, own), *later = self.task.layout.blocks
        opening = [f"<{tag}>" for _, tags in later for tag in tags if tag not in own]
        ends = config.eos_token_id
        known = ends if isinstance(ends, list) else [self.tokenizer.eos_token_id if ends is None else ends]
        try:
            config.eos_token_id = [*known, *(vocabulary[tag] for tag in opening if tag in vocabulary)]
            yield
        finally:
            config.eos_token_id = ends

    @torch.no_grad()
    def logp(self, blocks: Blocks) -> Float[Tensor, "n t"]:
        """Log-probability of each token at the temperature of sampling."""
        rows = blocks.sequences(self.model.device)
        place_nl = (rows.attention_nl.cumsum(dim=1) - 1).clamp(min=0)
        logits_nlv = self.model(input_ids=rows.ids_nl, attention_mask=rows.attention_nl, position_ids=place_nl).logits
        logp_ntv = (logits_nlv[:, -rows.width - 1 : -1].double() / self.temperature).log_softmax(dim=-1)
        return logp_ntv.gather(2, blocks.ids_nt.to(logp_ntv.device)[..., None]).squeeze(-1).cpu()


def collect_tokens(
    roller: Roller,
    rows: Any,
    *,
    samples: int = 4,
    rerolls: int = 48,
    sets: int = 2,
    most: int = MOST,
    threshold: float = 0.2,
    seed: int = 0,
) -> tuple[Blocks, Trajectories, Float[Tensor, "n t m"]]:
    """Sample first blocks, and re-roll from before their tokens.

    Equal prefixes of one prompt are re-rolled once. A value is the mean reward of the re-rolls, absent ones left out; its noise is
    their variance over their number. Of long blocks a sample of tokens is picked, see `picked`, and re-rolled on both sides.

    Args:
        roller: samples and judges.
        rows: prompts and answers.
        samples: completions of each.
        rerolls: in each set.
        sets: how many sets of re-rolls, 1 or 2.
        most, threshold: see `picked`.
        seed: of sampling.

    Returns:
        The blocks; their trajectories with the values of the first set; the rewards of the second set, NaN where there are none:
        their mean is a critic whose noise is its own.

    Raises:
        DataError: no completion has a first block; two sets where a sample of tokens is picked.
    """
    seeds = make_seeds(seed)
    blocks = roller.blocks(rows, samples=samples, seed=next(seeds))
    mask_nt = blocks.mask_nt
    if not bool(mask_nt.any()):
        raise DataError(
            f"None of {len(blocks.heads)} completions has the block '{roller.task.layout.names[0]}'; there is nothing to re-roll."
        )
    logp_nt, rolling = roller.logp(blocks), next(seeds)
    weight_nt = picked(logp_nt, mask_nt, most=most, threshold=threshold, seed=rolling)
    if sets > 1 and bool((mask_nt & (weight_nt == 0)).any()):
        raise DataError(
            f"Completions of up to {int(mask_nt.sum(dim=1).max())} tokens are re-rolled at a sample of them, and a critic made of "
            "re-rolls would need all. Ask for the other critics: --critics own, or --critics fitted."
        )
    before_nt = place_before(mask_nt)
    after_nt = (before_nt < 0) | (weight_nt > 0).gather(1, before_nt.clamp(min=0))
    found: dict[tuple[int, tuple[int, ...]], int] = {}
    place_nt = torch.full(blocks.ids_nt.shape, -1)  # a last row of NaN serves the tokens that have no prefix
    for n, t in (mask_nt & ((weight_nt > 0) | after_nt)).nonzero().tolist():
        key = (int(blocks.prompt_n[n]), tuple(blocks.ids_nt[n, :t].tolist()))
        place_nt[n, t] = found.setdefault(key, len(found))
    reward_dm = roller.rewards_from(rows, list(found), rerolls=sets * rerolls, seed=rolling)
    reward_dm = torch.cat([reward_dm, torch.full((1, sets * rerolls), torch.nan)])
    value_d, noise_d = _mean_and_noise(reward_dm[:, :rerolls])
    trajectories = Trajectories(
        blocks.prompt_n, blocks.reward_n, value_d[place_nt], noise_d[place_nt], logp_nt, mask_nt, weight_nt
    )
    return blocks, trajectories, reward_dm[:, rerolls:][place_nt]


def picked(
    logp_nt: Float[Tensor, "n t"],
    mask_nt: Bool[Tensor, "n t"],
    *,
    most: int = MOST,
    threshold: float = 0.2,
    decision: float = 0.97,
    seed: int = 0,
) -> Float[Tensor, "n t"]:
    """Which tokens get Monte Carlo values on both sides, and how many tokens each of them stands for.

    All tokens less probable than `threshold`, so that the values at both ends of every segment are known; of each completion's
    other decisions, and of its tokens that are none, `most` at random each, which stand for the rest.

    Args:
        logp_nt: log-probability of each token.
        mask_nt: the tokens that count.
        most: of each of the two kinds, in each completion.
        threshold: of the segments.
        decision: tokens less probable than this are decisions.
        seed: of the choice.

    Returns:
        (N, T); 0 at tokens that are not picked. The weights of a completion add up to its tokens.

    Example:
        >>> picked(torch.tensor([[0.1, 0.9, 0.9, 0.9, 0.99]]).log(), torch.ones(1, 5, dtype=torch.bool), most=1)
        tensor([[1., 0., 3., 0., 1.]], dtype=torch.float64)
    """
    draw_nt = torch.rand(mask_nt.shape, generator=torch.Generator().manual_seed(seed))
    p_nt = logp_nt.exp()
    weight_nt = (mask_nt & (p_nt < threshold)).double()
    for low, high in ((threshold, decision), (max(threshold, decision), math.inf)):
        here_nt = mask_nt & (p_nt >= low) & (p_nt < high)
        rank_nt = draw_nt.masked_fill(~here_nt, math.inf).argsort(dim=1).argsort(dim=1)
        there_n1 = here_nt.sum(dim=1, keepdim=True)
        weight_nt += torch.where(here_nt & (rank_nt < most), there_n1 / there_n1.clamp(min=1, max=most), 0.0)
    return weight_nt


def _mean_and_noise(reward_dm: Tensor) -> tuple[Tensor, Tensor]:
    """Mean of the known rewards of each row, and the variance of that mean; NaN for fewer than two."""
    count_d = (~reward_dm.isnan()).sum(dim=1)
    value_d = reward_dm.nanmean(dim=1)
    noise_d = (reward_dm - value_d[:, None]).square().nansum(dim=1) / (count_d - 1) / count_d
    return value_d, torch.where(count_d > 1, noise_d, torch.nan)


def make_seeds(seed: int) -> Iterator[int]:
    """Seeds for whatever is sampled, one after the other."""
    generator = torch.Generator().manual_seed(seed)
    while True:
        yield int(torch.randint(2**31, (1,), generator=generator))
