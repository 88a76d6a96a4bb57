"""Re-roll completions: keep their beginnings and sample their ends anew."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
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
from spanwise.modes.critic.config import CriticConfig
from spanwise.modes.critic.value_model import ABOUT, Saved, ValueModel
from spanwise.modes.sequences import Sequences, left_padded, positions
from spanwise.objective import Objective
from spanwise.score import score_all
from spanwise.segment import Vocabulary, find_blocks
from spanwise.tasks.embedded import Task, stated_confidences
from spanwise.types import BlockText, Spans

#: The largest number of improbable tokens, and also of other tokens, that are drawn per completion.
MOST = 16
#: Less probable tokens are always re-rolled (sampled anew), because the method `sae` cuts segments at such tokens.
UNLIKELY = 0.2
#: The largest numbers of continuations and of tokens in a batch. Larger batches spend too long on the KV cache.
ROWS, TOKENS = 512, 32_768
#: The numbers of optimizer steps after which the fitted critic is evaluated.
CRITIC_STEPS = (5, 25, 80)
#: The number of completions in a step of fitting a critic.
CRITIC_BATCH = 256
#: The learning rate of the fitted critic.
LEARNING_RATE = 1e-3
#: A prefix: the index of a dataset row, and the first token ids of a completion.
Prefix = tuple[int, tuple[int, ...]]


@dataclass(frozen=True)
class FirstBlocks:
    """The first blocks of N completions, their prompts, and whether each block is right."""

    prompt_n: Int[Tensor, " n"]
    heads: Sequence[Sequence[int]]  # The token ids of each completion's prompt.
    ids_nt: Int[Tensor, "n t"]  # The token ids of the completions, up to the end of the longest first block.
    mask_nt: Bool[Tensor, "n t"]  # The trainable tokens of the first block.
    reward_n: Float[Tensor, " n"]  # 1 if a completion's first block is right, 0 if it is wrong, NaN if it was not judged.

    def take(self, rows: slice) -> FirstBlocks:
        """Return the first blocks of the completions `rows`."""
        return FirstBlocks(*(column[rows] for column in vars(self).values()))

    def sequences(self, device: Any = "cpu") -> Sequences:
        """Join prompts and first blocks into the padded input of a model."""
        prompt_ids_nl, prompt_mask_nl = left_padded(self.heads, 0, device)
        ids_nt = self.ids_nt.to(device)
        ids_nl = torch.cat([prompt_ids_nl, ids_nt], dim=1)
        attention_nl = torch.cat([prompt_mask_nl, torch.ones_like(ids_nt)], dim=1)
        return Sequences(ids_nl, attention_nl, self.ids_nt.shape[1])


@dataclass(frozen=True)
class Roller:
    """Samples completions of a task, continues them from any prefix, and scores them."""

    model: Any
    tokenizer: Any
    task: Task
    temperature: float
    limit: int  # The largest number of tokens of a completion.
    generation: Mapping[str, Any] = field(default_factory=dict)  # Further options of `generate`, such as top_p.
    template: Mapping[str, Any] = field(default_factory=dict)  # Options of the chat template.
    verdict_options: Mapping[str, Any] = field(default_factory=dict)  # Options of the reward `correct`.
    confidence_tag: str = "confidence"

    @cached_property
    def vocabulary(self) -> Vocabulary:
        """The bytes of every token id that the model can sample."""
        return Vocabulary.of(self.tokenizer, self.model)

    def completions(self, rows: Any, *, samples: int, seed: int) -> tuple[Tensor, Tensor, Tensor]:
        """Sample completions of each dataset row. Return their token ids and mask, and the row of each completion."""
        ids_nt, mask_nt = sample(
            self.model, self.tokenizer, rows["prompt"][:], samples=samples, max_new_tokens=self.limit,
            temperature=self.temperature, seed=seed, generation=self.generation, template=self.template,
        )  # fmt: skip
        return ids_nt, mask_nt, torch.arange(len(rows)).repeat_interleave(samples)

    def prompt_ids(self, rows: Any) -> list[list[int]]:
        """Return the token ids of the prompt of each dataset row."""
        return prompt_ids(self.tokenizer, rows["prompt"][:], self.template)

    def continued(
        self, rows: Any, prefixes: Sequence[Prefix], *, rerolls: int, seed: int, batch_size: int = 512
    ) -> list[BlockText]:
        """Continue each prefix several times, and return the texts of all blocks of the resulting completions."""
        prompts = self.prompt_ids(rows)
        shortest_length = min(len(prefix) for _, prefix in prefixes)
        new_ids_nt, new_mask_nt = continue_ids(
            self.model, self.tokenizer, [[*prompts[row_index], *prefix] for row_index, prefix in prefixes], samples=rerolls,
            max_new_tokens=max(1, self.limit - shortest_length), temperature=self.temperature, seed=seed, batch_size=batch_size,
            generation=self.generation,
        )  # fmt: skip
        repeated_prefixes = [prefix for _, prefix in prefixes for _ in range(rerolls)]
        input_ids = [
            [*prefix, *new_ids_t[mask_t].tolist()][: self.limit]
            for prefix, new_ids_t, mask_t in zip(repeated_prefixes, new_ids_nt, new_mask_nt, strict=True)
        ]
        return self.read(*pad_tokens(input_ids))[1]

    def read(self, ids_nt: Tensor, mask_nt: Tensor) -> tuple[Spans, list[BlockText]]:
        """Find the blocks of completions, and return the spans and texts of these blocks."""
        return find_blocks(ids_nt, mask_nt, layout=self.task.layout, vocabulary=self.vocabulary)

    def rewards(
        self, rows: Any, text: list[BlockText], row_n: Sequence[int], objective: Objective | None = None
    ) -> Float[Tensor, " n"]:
        """Compute completions' rewards under an objective. By default the reward says whether the first block is right."""
        objective = objective or Objective("correct", pays=(self.task.layout.names[0],), options=self.verdict_options)
        return score_all([objective], text, columns=self.columns(rows, row_n)).reward_nm[:, 0]

    def columns(self, rows: Any, row_n: Sequence[int]) -> dict[str, list[Any]]:
        """Return the dataset's columns except the prompt, with an entry for each completion."""
        return rows.select(row_n).remove_columns("prompt")[:]

    def blocks(self, rows: Any, *, samples: int, seed: int) -> FirstBlocks:
        """Sample several completions of each dataset row, and return their first blocks."""
        with self._ending_at_later_blocks():
            ids_nt, mask_nt, row_n = self.completions(rows, samples=samples, seed=seed)
        spans, block_texts = self.read(ids_nt, mask_nt)
        is_in_first_block_nt = spans.block_nt == 0
        used_column_indices = is_in_first_block_nt.any(dim=0).nonzero()
        kept_width = int(used_column_indices.max()) + 1 if len(used_column_indices) else 1
        ids_of_prompts = [ids for ids in self.prompt_ids(rows) for _ in range(samples)]
        reward_n = self.rewards(rows, block_texts, row_n.tolist())
        return FirstBlocks(row_n, ids_of_prompts, ids_nt[:, :kept_width], is_in_first_block_nt[:, :kept_width], reward_n)

    def rewards_from(self, rows: Any, prefixes: Sequence[Prefix], *, rerolls: int, seed: int) -> Float[Tensor, "d m"]:
        """Continue each prefix several times, and return the rewards."""
        reward_dm = torch.full((len(prefixes), rerolls), torch.nan, dtype=torch.float64)
        # Sort prefixes by length, so that continuations in a batch are about equally long.
        sorted_prefix_indices = sorted(range(len(prefixes)), key=lambda d: len(prefixes[d][1]))
        max_rows = min(ROWS, TOKENS // self.limit)
        prefixes_per_batch = max(1, max_rows // rerolls)
        continue_options = {"rerolls": rerolls, "batch_size": max(max_rows, rerolls)}
        for batch_number, first_position in enumerate(range(0, len(sorted_prefix_indices), prefixes_per_batch)):
            batch_indices = sorted_prefix_indices[first_position : first_position + prefixes_per_batch]
            chosen_prefixes = [prefixes[d] for d in batch_indices]
            with self._ending_at_later_blocks():
                continued_texts = self.continued(rows, chosen_prefixes, seed=seed + batch_number, **continue_options)
            row_n = [row_index for row_index, _ in chosen_prefixes for _ in range(rerolls)]
            reward_dm[batch_indices] = self.rewards(rows, continued_texts, row_n).reshape(-1, rerolls)
        return reward_dm

    @contextmanager
    def _ending_at_later_blocks(self) -> Iterator[None]:
        """Let sampling also end after the first block: at a later block's opening tag, if it is one token."""
        generation_config = self.model.generation_config
        vocabulary = self.tokenizer.get_vocab()
        (_, first_tags), *later_blocks = self.task.layout.blocks
        later_tags = (f"<{tag}>" for _, tags in later_blocks for tag in tags if tag not in first_tags)
        old_end_ids = generation_config.eos_token_id
        try:
            usual_end_ids = end_ids(self.model, self.tokenizer)
            generation_config.eos_token_id = [*usual_end_ids, *(vocabulary[tag] for tag in later_tags if tag in vocabulary)]
            yield
        finally:
            generation_config.eos_token_id = old_end_ids

    @torch.no_grad()
    def logp(self, blocks: FirstBlocks) -> Float[Tensor, "n t"]:
        """Compute the log-probability of each token in a completion's first block, at the sampling temperature."""
        model_input = blocks.sequences(self.model.device)
        forward_options = {"attention_mask": model_input.attention_nl, **positions(self.model, model_input.attention_nl)}
        logits_nlv = self.model(input_ids=model_input.ids_nl, **forward_options).logits
        block_logits_ntv = logits_nlv[:, -model_input.width - 1 : -1].double()
        logp_ntv = (block_logits_ntv / self.temperature).log_softmax(dim=-1)
        return logp_ntv.gather(2, blocks.ids_nt.to(logp_ntv.device)[..., None]).squeeze(-1).cpu()


def collect_last_blocks(roller: Roller, rows: Any, *, samples: int = 32, rerolls: int = 32, seed: int = 0) -> Rerolls:
    """Sample completions, and sample their last blocks again (re-rolls). Equal prefixes (all before) share the re-rolls."""
    layout = roller.task.layout
    last_block, confidence_tag = layout.names[-1], roller.confidence_tag
    if confidence_tag not in layout.keys[last_block]:
        raise RecipeError(
            f"`spanwise fidelity` samples the last block and its confidence again, but the last block '{last_block}' has no "
            f"tag '{confidence_tag}'. To measure token advantages alone, add --tokens."
        )
    ids_nt, mask_nt, dataset_row_n = roller.completions(rows, samples=samples, seed=seed)
    spans, block_texts = roller.read(ids_nt, mask_nt)
    index_of_prefix: dict[Prefix, int] = {}
    prefix_index_n = torch.full((len(block_texts),), -1)
    for n in spans.present_nk[:, -1].nonzero()[:, 0].tolist():
        prompt_and_prefix = int(dataset_row_n[n]), tuple(ids_nt[n, : int(spans.start_nk[n, -1])].tolist())
        prefix_index_n[n] = index_of_prefix.setdefault(prompt_and_prefix, len(index_of_prefix))
    if not index_of_prefix:
        raise DataError(
            f"None of {len(block_texts)} completions has the block '{last_block}', which spanwise samples again. Use a model that "
            "writes the block."
        )
    rerolled_texts = roller.continued(rows, list(index_of_prefix), rerolls=rerolls, seed=seed + 1)
    return Rerolls(
        confidence_xs=stated_confidences(block_texts, last_block, layout, tag=confidence_tag).reshape(-1, samples),
        outcome_xs=roller.rewards(rows, block_texts, dataset_row_n.tolist()).reshape(-1, samples),
        prefix_xs=prefix_index_n.reshape(-1, samples),
        again_dm=stated_confidences(rerolled_texts, last_block, layout, tag=confidence_tag).reshape(-1, rerolls),
    )


def collect_tokens(
    roller: Roller, rows: Any, *, samples: int = 4, rerolls: int = 48, sets: int = 2, most: int = MOST, seed: int = 0
) -> tuple[FirstBlocks, Trajectories, Float[Tensor, "n t m"]]:
    """Sample completions' first blocks, and their rest again from each token. `choose_tokens` picks among many tokens."""
    seeds = make_seeds(seed)
    blocks = roller.blocks(rows, samples=samples, seed=next(seeds))
    mask_nt = blocks.mask_nt
    if not bool(mask_nt.any()):
        raise DataError(
            f"None of {len(blocks.heads)} completions has the block '{roller.task.layout.names[0]}', which spanwise samples again. "
            "Use a model that writes the block."
        )
    logp_nt = roller.logp(blocks)
    reroll_seed = next(seeds)
    weight_nt = choose_tokens(logp_nt, mask_nt, most=most, seed=reroll_seed)
    if sets > 1 and bool((mask_nt & (weight_nt == 0)).any()):
        raise DataError(
            "The critic 'mc' needs new samples after every token. In long completions (up to "
            f"{int(mask_nt.sum(dim=1).max())} tokens), spanwise samples only after some tokens. Use another critic: --critics own, "
            "or --critics fitted."
        )
    last_trainable_index_nt = torch.where(mask_nt, torch.arange(mask_nt.shape[1]), -1).cummax(dim=1).values
    previous_token_index_nt = torch.nn.functional.pad(last_trainable_index_nt[:, :-1], (1, 0), value=-1)
    is_chosen_nt = weight_nt > 0
    follows_chosen_token_nt = (previous_token_index_nt < 0) | is_chosen_nt.gather(1, previous_token_index_nt.clamp(min=0))
    index_of_prefix: dict[Prefix, int] = {}
    # The index -1 selects the last row of the rewards, which is NaN.
    prefix_index_nt = torch.full(blocks.ids_nt.shape, -1)
    for n, t in (mask_nt & (is_chosen_nt | follows_chosen_token_nt)).nonzero().tolist():
        prompt_and_prefix = int(blocks.prompt_n[n]), tuple(blocks.ids_nt[n, :t].tolist())
        prefix_index_nt[n, t] = index_of_prefix.setdefault(prompt_and_prefix, len(index_of_prefix))
    reward_dm = roller.rewards_from(rows, list(index_of_prefix), rerolls=sets * rerolls, seed=reroll_seed)
    reward_dm = torch.cat([reward_dm, torch.full((1, sets * rerolls), torch.nan)])
    value_d, noise_d = mean_and_noise(reward_dm[:, :rerolls])
    # A Monte Carlo critic needs a second set of re-rolls, with independent noise.
    trajectories = Trajectories(
        blocks.prompt_n, blocks.reward_n, value_d[prefix_index_nt], noise_d[prefix_index_nt], logp_nt, mask_nt, weight_nt
    )
    return blocks, trajectories, reward_dm[:, rerolls:][prefix_index_nt]


def choose_tokens(
    logp_nt: Float[Tensor, "n t"], mask_nt: Bool[Tensor, "n t"], *, most: int, seed: int = 0
) -> Float[Tensor, "n t"]:
    """Choose the tokens to re-roll. Return how many tokens each token stands for: 0 if it is not chosen."""
    random_number_nt = torch.rand(mask_nt.shape, generator=torch.Generator().manual_seed(seed))
    probability_nt = logp_nt.exp()
    # Choose all tokens with a probability below `UNLIKELY`, and up to `most` tokens in each of two higher ranges.
    weight_nt = (mask_nt & (probability_nt < UNLIKELY)).double()
    for min_probability, max_probability in ((UNLIKELY, DECISION), (DECISION, math.inf)):
        is_in_kind_nt = mask_nt & (probability_nt >= min_probability) & (probability_nt < max_probability)
        random_rank_nt = random_number_nt.masked_fill(~is_in_kind_nt, math.inf).argsort(dim=1).argsort(dim=1)
        count_n1 = is_in_kind_nt.sum(dim=1, keepdim=True)
        weight_nt += torch.where(is_in_kind_nt & (random_rank_nt < most), count_n1 / count_n1.clamp(min=1, max=most), 0.0)
    return weight_nt


def make_seeds(seed: int) -> Iterator[int]:
    """Yield random seeds without end, the same sequence for the same `seed`."""
    generator = torch.Generator().manual_seed(seed)
    while True:
        yield int(torch.randint(2**31, (1,), generator=generator))


def own_critic_folder(model_folder: Path) -> Path | None:
    """Return the folder of a policy's critic, inside or beside the policy's folder. Return None without a critic."""
    policy_folders = [model_folder, model_folder.parent] if model_folder.name == "model" else [model_folder]
    return next((folder / "critic" for folder in policy_folders if (folder / "critic" / ABOUT).is_file()), None)


def own_critic(place: Path, tokenizer: Any, objectives: Sequence[str]) -> tuple[ValueModel, int]:
    """Load a saved critic. Return it with the index of the value that predicts whether the answer is right."""
    saved_critic = Saved.of(place)
    if saved_critic is None:
        raise DataError(f"There is no {ABOUT} in '{place}', so it is no folder of a critic.")
    value_names = saved_critic.names
    objective_name = value_names[0] if len(value_names) == len(objectives) == 1 else "correct"
    if objective_name not in value_names:
        predicted_names_text = " + ".join(objectives) if len(value_names) == 1 else ", ".join(value_names)
        raise RecipeError(
            f"The critic '{place}' predicts {predicted_names_text}, but the critics are compared on the reward 'correct' alone. "
            "Write values: objective in the recipe, and train again. Or leave the recipe's critic out of the comparison: "
            "--critics fitted,mc."
        )
    return ValueModel.load(str(place), value_names, saved_critic.config, tokenizer).eval(), value_names.index(objective_name)


@torch.no_grad()
def values(critic: ValueModel, blocks: FirstBlocks, *, stream: int = 0) -> Float[Tensor, "n t"]:
    """Return the value that a critic predicts before each token in the first block of each completion."""
    device = next(critic.parameters()).device
    return critic.value(critic(blocks.sequences(device)))[:, :-1, stream].cpu().double()


def fitted_critics(roller: Roller, rows: Any, *, steps: Sequence[int], seed: int) -> Iterator[tuple[int, ValueModel]]:
    """Fit a critic to the rewards of fresh completions. Yield it (the same object) after each number of `steps`."""
    fresh_batches = _sample_batches(roller, rows, make_seeds(seed))
    first_batch = next(fresh_batches)
    critic = ValueModel.of_policy(roller.model, ("return",), CriticConfig())
    trunk_parameter_ids = {id(parameter) for parameter in critic.model.base_model.parameters()}
    for parameter in critic.model.parameters():
        if id(parameter) not in trunk_parameter_ids and parameter.dim() == 1:
            torch.nn.init.constant_(parameter, float(first_batch.reward_n.nanmean().nan_to_num(nan=0.0)))
    optimizer = torch.optim.AdamW(critic.parameters(), lr=LEARNING_RATE, weight_decay=0.0)
    for step, batch in zip(range(1, max(steps) + 1), chain([first_batch], fresh_batches), strict=False):
        is_used_nt = batch.mask_nt & ~batch.reward_n.isnan()[:, None]
        if bool(is_used_nt.any()):
            value_nt = critic(batch.sequences(roller.model.device))[:, :-1, 0]
            value_error_nt = value_nt - batch.reward_n.float()[:, None].to(value_nt.device)
            value_error_nt[is_used_nt.to(value_nt.device)].square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
        if step in steps:
            yield step, critic


def _sample_batches(roller: Roller, rows: Any, seeds: Iterator[int]) -> Iterator[FirstBlocks]:
    """Yield batches of newly sampled first blocks without end; for speed, sample two batches at once."""
    for first_draw_index in count(0, 2 * CRITIC_BATCH):
        row_indices = [draw_index % len(rows) for draw_index in range(first_draw_index, first_draw_index + 2 * CRITIC_BATCH)]
        first_blocks = roller.blocks(rows.select(row_indices), samples=1, seed=next(seeds))
        yield first_blocks.take(slice(0, CRITIC_BATCH))
        yield first_blocks.take(slice(CRITIC_BATCH, None))
