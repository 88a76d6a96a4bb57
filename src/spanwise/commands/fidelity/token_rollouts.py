"""Monte Carlo values before every token of the first block of completions, and critics fitted on other prompts."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from copy import deepcopy
from dataclasses import dataclass
from functools import cached_property
from itertools import count
from typing import Any

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from spanwise.commands.fidelity.fidelity import joined
from spanwise.engines.sample import continue_ids, prompt_ids, sample
from spanwise.errors import DataError
from spanwise.measure.trajectories import Trajectories
from spanwise.objective import Objective
from spanwise.score import score
from spanwise.segment import Vocabulary, segment
from spanwise.tasks import Task

#: How long the critic is fitted, in steps, each time it is looked at.
CRITIC_STEPS = (5, 25, 80)
#: Completions per step.
CRITIC_BATCH = 256


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

    def rows(self) -> tuple[Int[Tensor, "n l"], Int[Tensor, "n l"], Int[Tensor, "n t"]]:
        """Prompt and tokens in one row, padded on the right; the attention mask; the last position before each token."""
        length_n, t = torch.tensor([len(head) for head in self.heads]), self.ids_nt.shape[1]
        ids_nl = torch.zeros(len(self.heads), int(length_n.max()) + t, dtype=torch.long)
        for n, head in enumerate(self.heads):
            ids_nl[n, : len(head)] = torch.tensor(head)
            ids_nl[n, len(head) : len(head) + t] = self.ids_nt[n]
        attention_nl = (torch.arange(ids_nl.shape[1]) < length_n[:, None] + t).long()
        return ids_nl, attention_nl, length_n[:, None] + torch.arange(t) - 1


class Critic(torch.nn.Module):
    """A copy of the policy's trunk with a linear head: the value of the state before each token."""

    def __init__(self, policy: Any, *, start: float = 0.0) -> None:
        super().__init__()
        self.trunk = deepcopy(policy.base_model).float()
        self.head = torch.nn.Linear(policy.config.get_text_config().hidden_size, 1).to(policy.device)
        torch.nn.init.zeros_(self.head.weight)
        torch.nn.init.constant_(self.head.bias, start)

    def forward(self, blocks: Blocks) -> Float[Tensor, "n t"]:
        """Values before each token of each completion."""
        ids_nl, attention_nl, before_nt = (x.to(self.head.weight.device) for x in blocks.rows())
        hidden_nlh = self.trunk(input_ids=ids_nl, attention_mask=attention_nl, use_cache=False).last_hidden_state
        return self.head(hidden_nlh).squeeze(-1).gather(1, before_nt)


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
        spans, text = segment(ids_nt, mask_nt, layout=self.task.layout, vocabulary=self.vocabulary)
        columns = {name: rows[name][:] for name in rows.column_names if name != "prompt"}
        by_row = {name: [column[x] for x in prompts] for name, column in columns.items()}
        objective = Objective("correct", pays=(self.task.layout.names[0],))
        return score([objective], text, columns=by_row).reward_nm[:, 0], spans.block_nt

    def rewards_from(
        self, rows: Any, prefixes: Sequence[tuple[int, tuple[int, ...]]], *, rerolls: int, seed: int
    ) -> Float[Tensor, "d m"]:
        """Rewards of fresh continuations of each prefix: the number of its row, and the tokens of the completion so far."""
        heads = prompt_ids(self.tokenizer, rows["prompt"][:])
        reward_dm = torch.full((len(prefixes), rerolls), torch.nan, dtype=torch.float64)
        by_length: dict[int, list[int]] = {}
        for d, (_, before) in enumerate(prefixes):
            by_length.setdefault(len(before), []).append(d)
        for length, members in by_length.items():
            with self._stopping():
                more_nt, more_mask_nt = continue_ids(
                self.model, self.tokenizer, [[*heads[prefixes[d][0]], *prefixes[d][1]] for d in members], samples=rerolls,
                max_new_tokens=max(1, self.limit - length), temperature=self.temperature, seed=seed + length,
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
        ids_nl, attention_nl, before_nt = (x.to(self.model.device) for x in blocks.rows())
        logits_nlv = self.model(input_ids=ids_nl, attention_mask=attention_nl).logits.double() / self.temperature
        at_ntv = logits_nlv.log_softmax(dim=-1)[torch.arange(len(ids_nl), device=ids_nl.device)[:, None], before_nt]
        return at_ntv.gather(2, blocks.ids_nt.to(ids_nl.device)[..., None]).squeeze(-1).cpu()


def collect_tokens(
    roller: Roller, rows: Any, *, samples: int = 4, rerolls: int = 48, seed: int = 0
) -> tuple[Blocks, Trajectories, Float[Tensor, "n t m"]]:
    """Sample first blocks, and re-roll from before every one of their tokens, twice over.

    Equal prefixes of one prompt are re-rolled once. A value is the mean reward of the re-rolls, absent ones left out; its noise is
    their variance over their number.

    Args:
        roller: samples and judges.
        rows: prompts and answers.
        samples: completions of each.
        rerolls: in each of the two sets.
        seed: of sampling.

    Returns:
        The blocks; their trajectories with the values of the first set; the rewards of the
        second set, NaN where there are none: their mean is a critic whose noise is its own.

    Raises:
        DataError: no completion has a first block.
    """
    seeds = _seeds(seed)
    blocks = roller.blocks(rows, samples=samples, seed=next(seeds))
    if not bool(blocks.mask_nt.any()):
        raise DataError(
            f"None of {len(blocks.heads)} completions has the block '{roller.task.layout.names[0]}'; there is nothing to re-roll."
        )
    found: dict[tuple[int, tuple[int, ...]], int] = {}
    place_nt = torch.full(blocks.ids_nt.shape, -1)  # a last row of NaN serves the tokens that have no prefix
    for n, t in blocks.mask_nt.nonzero().tolist():
        key = (int(blocks.prompt_n[n]), tuple(blocks.ids_nt[n, :t].tolist()))
        place_nt[n, t] = found.setdefault(key, len(found))
    reward_dm = roller.rewards_from(rows, list(found), rerolls=2 * rerolls, seed=next(seeds))
    first_dm, second_dm = torch.cat([reward_dm, torch.full((1, 2 * rerolls), torch.nan)]).split(rerolls, dim=1)
    value_d, noise_d = _mean_and_noise(first_dm)
    trajectories = Trajectories(
        blocks.prompt_n, blocks.reward_n, value_d[place_nt], noise_d[place_nt], roller.logp(blocks), blocks.mask_nt
    )
    return blocks, trajectories, second_dm[place_nt]


def fitted_critics(
    roller: Roller,
    rows: Any,
    *,
    steps: Sequence[int] = CRITIC_STEPS,
    batch: int = CRITIC_BATCH,
    learning_rate: float = 1e-3,
    seed: int = 0,
) -> Iterator[tuple[int, Critic]]:
    r"""A critic fitted to the rewards of fresh completions, as it stands after each of these numbers of steps.

    Equation
        loss = mean over the tokens of the batch of (V(state before the token) - reward)^2

    The head starts at the mean reward of the first batch. It is one critic: look at it before asking for the next.

    Args:
        roller: samples and judges; its model is not changed.
        rows: prompts and answers, taken in order and from the start again when they are used up.
        steps: when to yield, in ascending order.
        batch: completions per step, each of another prompt as far as there are prompts.
        learning_rate: of AdamW.
        seed: of sampling.
    """
    critic, optimizer, seeds = None, None, _seeds(seed)
    for step, rest in zip(range(1, max(steps, default=0) + 1), _batches(roller, rows, batch, seeds), strict=False):
        if critic is None:
            critic = Critic(roller.model, start=float(rest.reward_n.nanmean().nan_to_num(nan=0.0)))
            optimizer = torch.optim.AdamW(critic.parameters(), lr=learning_rate, weight_decay=0.0)
        use_nt = rest.mask_nt & ~rest.reward_n.isnan()[:, None]
        if optimizer is not None and bool(use_nt.any()):
            error_nt = critic(rest) - rest.reward_n.float()[:, None].to(critic.head.weight.device)
            error_nt[use_nt].square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
        if step in steps:
            yield step, critic


def _batches(roller: Roller, rows: Any, batch: int, seeds: Iterator[int]) -> Iterator[Blocks]:
    """Batches of fresh completions for ever, sampled two at a time: large batches cost less each."""
    for first in count(0, 2 * batch):
        picked = [x % len(rows) for x in range(first, first + 2 * batch)]
        blocks = roller.blocks(rows.select(picked), samples=1, seed=next(seeds))
        yield blocks.take(slice(0, batch))
        yield blocks.take(slice(batch, None))


def _mean_and_noise(reward_dm: Tensor) -> tuple[Tensor, Tensor]:
    """Mean of the known rewards of each row, and the variance of that mean; NaN for fewer than two."""
    count_d = (~reward_dm.isnan()).sum(dim=1)
    value_d = reward_dm.nanmean(dim=1)
    noise_d = (reward_dm - value_d[:, None]).square().nansum(dim=1) / (count_d - 1) / count_d
    return value_d, torch.where(count_d > 1, noise_d, torch.nan)


def _seeds(seed: int) -> Iterator[int]:
    generator = torch.Generator().manual_seed(seed)
    while True:
        yield int(torch.randint(2**31, (1,), generator=generator))
