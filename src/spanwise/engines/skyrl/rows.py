"""Convert the output of SkyRL's generator to `Batch`es. Map its rows to SkyRL's training rows."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import accumulate, groupby, pairwise
from typing import Any

import torch
from skyrl.train.generators.base import GeneratorOutput  # pyright: ignore[reportMissingImports]

from spanwise.batch import Batch, Steps
from spanwise.credit.trajectories.turns import Turns

#: The fields that SkyRL defines for a generator's output. Reward functions get the lists in all other fields.
_KNOWN = frozenset(GeneratorOutput.__annotations__)


@dataclass(frozen=True)
class SampledRows:
    """The rows of SkyRL's generator, and their places in SkyRL's training rows."""

    output: Mapping[str, Any]  # The generator's output, before SkyRL merged its rows.
    uids: Sequence[str]  # The prompt id of each row of the output.
    # For each output row: its training row, and its offset in the response of that row.
    place_s: Sequence[tuple[int, int]]
    response_ids_n: Sequence[Sequence[int]]  # The response of each training row.
    stepwise: bool  # True if a row of the output is one turn instead of a whole conversation.

    @staticmethod
    def of(output: Mapping[str, Any], uids: Sequence[str], trained: Mapping[str, Any], *, stepwise: bool) -> "SampledRows":
        """Find the place of each generator row in SkyRL's merged training rows."""
        responses = trained["response_ids"]
        if len(responses) == len(output["response_ids"]):
            return SampledRows(output, uids, [(n, 0) for n in range(len(responses))], responses, stepwise)
        trajectory_ids = output["trajectory_ids"]
        sampled_turns = list(zip(output["prompt_token_ids"], output["response_ids"], trajectory_ids, strict=True))
        row_and_offset_s: list[tuple[int, int]] = []
        for n, (prompt, response) in enumerate(zip(trained["prompt_token_ids"], responses, strict=True)):
            row_token_ids = [*prompt, *response]
            matched_length = len(prompt)
            first_turn_index = len(row_and_offset_s)
            row_trajectory_id = trajectory_ids[first_turn_index]
            for s in range(first_turn_index, len(sampled_turns)):
                turn_prompt, turn_response, trajectory_id = sampled_turns[s]
                turn_token_ids = [*turn_prompt, *turn_response]
                is_next_turn = trajectory_id == row_trajectory_id and len(turn_prompt) >= matched_length
                if not is_next_turn or row_token_ids[: len(turn_token_ids)] != turn_token_ids:
                    break
                row_and_offset_s.append((n, len(turn_prompt) - len(prompt)))
                matched_length = len(turn_token_ids)
        return SampledRows(output, uids, row_and_offset_s, responses, stepwise)

    @cached_property
    def length_n(self) -> list[int]:
        """The number of response tokens of each training row."""
        return [len(response) for response in self.response_ids_n]

    @cached_property
    def source_row_n(self) -> list[int]:
        """The index of the last generator row that was merged into each training row."""
        return list({training_row: source_row for source_row, (training_row, _) in enumerate(self.place_s)}.values())

    @cached_property
    def extra(self) -> dict[str, list[Any]]:
        """Maps the generator's additional columns to their values."""
        row_count = len(self.uids)
        output_lists = {name: values for name, values in self.output.items() if isinstance(values, list)}
        return {name: values for name, values in output_lists.items() if name not in _KNOWN and len(values) == row_count}

    @cached_property
    def rollout_s(self) -> list[int]:
        """The rollout number of each generator row, from 0."""
        if not self.stepwise:
            return list(range(len(self.uids)))
        return [0, *accumulate(int(is_last) for is_last in self.output["is_last_step"])][:-1]

    @cached_property
    def turn_ranges_s(self) -> list[list[tuple[int, int]]]:
        """For each row of the generator, the start and end of each turn in it."""
        if self.stepwise:
            return [[(0, len(response))] for response in self.output["response_ids"]]
        return [_runs(mask) for mask in self.output["loss_masks"]]

    def whole(
        self, columns: Callable[[Sequence[str]], dict[str, list[Any]]], data: Mapping[str, Any] | None = None
    ) -> Batch:
        """Build a batch of SkyRL's training rows, each with the reward of its last turn.

        Without `data` (SkyRL's tables of these rows) the batch is left-aligned and only has ids, mask and columns.
        """
        source_rows = self.source_row_n
        row_rewards = [float(sum(reward) if isinstance(reward, list) else reward) for reward in self.output["rewards"]]
        row_columns: dict[str, list[Any]] = {**self.extra, "environment": row_rewards}
        uids, row_count = [self.uids[s] for s in source_rows], len(source_rows)
        trained_columns = {name: [column[s] for s in source_rows] for name, column in row_columns.items()}
        batch_columns = columns(uids) | trained_columns | {"completion_ids": list(self.response_ids_n)}
        if data is None:
            sampled_masks = [mask if any(mask) else [1] * len(mask) for mask in self.output["loss_masks"]]
            return Batch.jagged(self.output["response_ids"], uids, sampled=sampled_masks, columns=batch_columns)
        response_width = data["loss_mask"].shape[1]
        is_trained_nt = data["loss_mask"][:row_count] > 0
        value_nt, logp_nt = data.get("values"), data.get("action_log_probs")
        if logp_nt is None:  # for some losses SkyRL only has the log-probabilities from sampling
            logp_nt = data.get("rollout_logprobs")
        is_untrained_n1 = ~is_trained_nt.any(dim=1, keepdim=True)
        rollout_n = torch.tensor([self.rollout_s[s] for s in source_rows])
        return Batch(
            uids,
            data["sequences"][:row_count, -response_width:],
            is_trained_nt | (is_untrained_n1 & data["response_mask"][:row_count].bool()),
            columns=batch_columns,
            steps=Steps(rollout_n, torch.arange(row_count)) if self.stepwise else None,
            value_nt=None if value_nt is None else value_nt[:row_count],
            logp_nt=None if logp_nt is None else logp_nt[:row_count],
        )

    def turns(
        self, columns: Callable[[Sequence[str]], dict[str, list[Any]]], *, width: int, anchored: bool = False
    ) -> tuple[Batch, Turns]:
        """Build a batch with a row per turn. Also return the turns' places in SkyRL's rows."""
        prompt_ids, response_ids = self.output["prompt_token_ids"], self.output["response_ids"]
        row_ranges = self.turn_ranges_s
        turn_ranges = [(row, k, *turn_range) for row, ranges in enumerate(row_ranges) for k, turn_range in enumerate(ranges)]

        def value_of_turn(values: Sequence[Any], row: int, k: int) -> Any:
            """Return the value of turn `k` of a row, or the row's value if turns have none."""
            row_value = values[row]
            if self.stepwise or not isinstance(row_value, list) or len(row_value) != len(row_ranges[row]):
                return row_value
            return row_value[k]

        turn_columns: dict[str, Any] = {
            name: [value_of_turn(values, row, k) for row, k, _, _ in turn_ranges] for name, values in self.extra.items()
        }
        default_anchors = None
        if anchored and "anchors" not in turn_columns:  # by default, a turn's state is all tokens before the turn
            default_anchors = [(*prompt_ids[row], *response_ids[row][:start]) for row, _, start, _ in turn_ranges]
        row_of_turn = [row for row, *_ in turn_ranges]
        turn_number_s = torch.arange(len(turn_ranges))
        rollout_of_turn = torch.tensor([self.rollout_s[row] for row in row_of_turn])
        turn_anchors = turn_columns.pop("anchors", default_anchors)
        turn_columns["environment"] = [self._turn_reward(row, row_ranges[row], k) for row, k, _, _ in turn_ranges]
        turn_columns["completion_ids"] = [response_ids[row][start:end] for row, _, start, end in turn_ranges]
        uids = [self.uids[row] for row in row_of_turn]
        turn_masks = [self.output["loss_masks"][row][start:end] for row, _, start, end in turn_ranges]
        # A turn is scored even if its loss mask is all 0. So mark all tokens of the turn as sampled, to find its blocks.
        batch = Batch.jagged(
            turn_columns["completion_ids"],
            uids,
            sampled=[mask if any(mask) else [1] * len(mask) for mask in turn_masks],
            columns={**columns(uids), **turn_columns},
            steps=Steps(rollout_of_turn, turn_number_s, turn_anchors),
        )
        training_row_s = torch.tensor([self.place_s[row][0] for row in row_of_turn])
        row_start_columns = [width - self.length_n[n] + offset for n, offset in self.place_s]
        turn_start_columns = [row_start_columns[row] + start for row, _, start, _ in turn_ranges]
        turn_start_s1 = torch.tensor(turn_start_columns)[:, None]
        turn_length_s1 = torch.tensor([end - start for *_, start, end in turn_ranges])[:, None]
        token_offset_u = torch.arange(int(turn_length_s1.max()))
        token_column_su = torch.where(token_offset_u < turn_length_s1, turn_start_s1 + token_offset_u, -1)
        return batch, Turns(training_row_s, turn_number_s, token_column_su, width)

    def _turn_reward(self, s: int, ranges: Sequence[tuple[int, int]], k: int) -> float | None:
        """Return the environment's reward of a turn. Token rewards are summed up to the next turn."""
        row_reward = self.output["rewards"][s]
        is_last_turn = k == len(ranges) - 1
        if not isinstance(row_reward, list):
            return float(row_reward) if is_last_turn else None
        return float(sum(row_reward[ranges[k][0] if k else 0 : None if is_last_turn else ranges[k + 1][0]]))


def _runs(mask: Sequence[int]) -> list[tuple[int, int]]:
    """Return the start and end of each unbroken run of sampled tokens. Without sampled tokens, the whole mask is one run."""
    run_lengths = [len(list(run)) for _, run in groupby(mask, key=bool)]
    run_bounds = [0, *accumulate(run_lengths)]
    sampled_ranges = [(start, end) for start, end in pairwise(run_bounds) if mask[start]]
    return sampled_ranges or [(0, len(mask))]
