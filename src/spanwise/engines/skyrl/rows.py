"""Convert a generator's output to rows of spanwise, and back to the rows that SkyRL trains on."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import accumulate, groupby, pairwise
from typing import Any

import torch
from skyrl.train.generators.base import GeneratorOutput  # pyright: ignore[reportMissingImports]

from spanwise.batch import Batch, Steps
from spanwise.credit.trajectories.turns import Turns

#: SkyRL's own fields of a generator's output; a list of any other name with one value per row is a column for rewards.
_KNOWN = frozenset(GeneratorOutput.__annotations__)


@dataclass(frozen=True)
class SampledRows:
    """The rows of a generator's output, and the place of each row in the rows that SkyRL trains on."""

    output: Mapping[str, Any]  # the generator's output, before SkyRL merged it
    uids: Sequence[str]  # the prompt of each row of the output
    place_s: Sequence[tuple[int, int]]  # the row of the training batch and the response token where each row begins
    length_n: Sequence[int]  # response tokens of each row of the training batch
    stepwise: bool  # whether a row is one turn instead of a whole conversation

    @staticmethod
    def of(output: Mapping[str, Any], uids: Sequence[str], trained: Mapping[str, Any], *, stepwise: bool) -> "SampledRows":
        """Find each row of a generator in the merged rows of `postprocess_generator_output`."""
        lengths = [len(response) for response in trained["response_ids"]]
        if len(lengths) == len(output["response_ids"]):
            return SampledRows(output, uids, [(n, 0) for n in range(len(lengths))], lengths, stepwise)
        turns = list(zip(output["prompt_token_ids"], output["response_ids"], output["trajectory_ids"], strict=True))
        place_s: list[tuple[int, int]] = []
        for n, (prompt, response) in enumerate(zip(trained["prompt_token_ids"], trained["response_ids"], strict=True)):
            whole, end, trajectory = [*prompt, *response], len(prompt), turns[len(place_s)][2]
            while len(place_s) < len(turns):
                context, sampled, rollout = turns[len(place_s)]
                if (
                    rollout != trajectory
                    or len(context) < end
                    or whole[: len(context) + len(sampled)] != [*context, *sampled]
                ):
                    break
                place_s.append((n, len(context) - len(prompt)))
                end = len(context) + len(sampled)
        return SampledRows(output, uids, place_s, lengths, stepwise)

    @cached_property
    def last_n(self) -> list[int]:
        """The index of the last generator row in each row of the training batch."""
        return list({n: s for s, (n, _) in enumerate(self.place_s)}.values())

    @cached_property
    def extra(self) -> dict[str, list[Any]]:
        """The generator's per-row columns beyond SkyRL's fields."""
        size = len(self.uids)
        more = {name: values for name, values in self.output.items() if name not in _KNOWN}
        return {name: values for name, values in more.items() if isinstance(values, list) and len(values) == size}

    @cached_property
    def trajectory_s(self) -> list[int]:
        """The rollout number of each generator row."""
        if not self.stepwise:
            return list(range(len(self.uids)))
        return [0, *accumulate(int(last) for last in self.output["is_last_step"])][:-1]

    def whole(self, columns: Callable[[Sequence[str]], dict[str, list[Any]]], data: Mapping[str, Any]) -> Batch:
        """Build a batch of the rows that SkyRL trains on, right-aligned; the reward of a row is that of its last turn."""
        taken = self.last_n
        paid = [float(sum(reward) if isinstance(reward, list) else reward) for reward in self.output["rewards"]]
        extra = {**self.extra, "environment": paid}
        uids, size, width = [self.uids[s] for s in taken], len(taken), data["loss_mask"].shape[1]
        trained_nt = data["loss_mask"][:size] > 0
        values, logp = data.get("values"), data.get("action_log_probs")
        # Some losses start from the sampler's log-probabilities.
        logp = data.get("rollout_logprobs") if logp is None else logp
        left_out_n1 = ~trained_nt.any(dim=1, keepdim=True)
        steps = torch.tensor([self.trajectory_s[s] for s in taken]), torch.arange(size)
        return Batch(
            uids,
            data["sequences"][:size, -width:],
            trained_nt | (left_out_n1 & data["response_mask"][:size].bool()),
            columns={**columns(uids), **{name: [values[s] for s in taken] for name, values in extra.items()}},
            steps=Steps(*steps) if self.stepwise else None,
            value_nt=None if values is None else values[:size],
            logp_nt=None if logp is None else logp[:size],
        )

    def turns(
        self, columns: Callable[[Sequence[str]], dict[str, list[Any]]], *, width: int, anchored: bool = False
    ) -> tuple[Batch, Turns]:
        """Build a batch with one row per turn, and the way back; the turns of a whole conversation are its sampled runs."""
        prompts, responses, masks = (self.output[name] for name in ("prompt_token_ids", "response_ids", "loss_masks"))
        rows = zip(responses, masks, strict=True)
        parts_s = [[(0, len(response))] if self.stepwise else _runs(mask) for response, mask in rows]
        turns = [(s, k, *part) for s, parts in enumerate(parts_s) for k, part in enumerate(parts)]

        def said(values: Sequence[Any], s: int, k: int) -> Any:
            """Return the generator's value for a turn, or for the turn's row."""
            each = not self.stepwise and isinstance(values[s], list) and len(values[s]) == len(parts_s[s])
            return values[s][k] if each else values[s]

        extra: dict[str, Any] = {name: [said(values, s, k) for s, k, _, _ in turns] for name, values in self.extra.items()}
        contexts = None
        if anchored and "anchors" not in extra:  # then the state of a turn is all that the model saw
            contexts = [(*prompts[s], *responses[s][:start]) for s, _, start, _ in turns]
        row_s, step_s = [s for s, *_ in turns], torch.arange(len(turns))
        steps = Steps(torch.tensor([self.trajectory_s[s] for s in row_s]), step_s, extra.pop("anchors", contexts))
        extra["environment"] = [self._paid(s, parts_s[s], k) for s, k, _, _ in turns]
        uids = [self.uids[s] for s in row_s]
        # Turns that the generator left out of the loss are read and compared all the same.
        batch = Batch.jagged(
            [responses[s][start:end] for s, _, start, end in turns],
            uids,
            sampled=[masks[s][start:end] if any(masks[s][start:end]) else [1] * (end - start) for s, _, start, end in turns],
            columns={**columns(uids), **extra},
            steps=steps,
        )
        row_n = torch.tensor([self.place_s[s][0] for s in row_s])
        first = [width - self.length_n[self.place_s[s][0]] + self.place_s[s][1] + start for s, _, start, _ in turns]
        length_s1 = torch.tensor([end - start for *_, start, end in turns])[:, None]
        inside_u = torch.arange(int(length_s1.max()))
        place_su = torch.where(inside_u < length_s1, torch.tensor(first)[:, None] + inside_u, -1)
        return batch, Turns(row_n, step_s, place_su, width)

    def _paid(self, s: int, parts: Sequence[tuple[int, int]], k: int) -> float | None:
        """Return the environment's reward of one turn: the sum from its first token to the next turn."""
        reward, last = self.output["rewards"][s], k == len(parts) - 1
        if not isinstance(reward, list):
            return float(reward) if last else None
        return float(sum(reward[parts[k][0] if k else 0 : None if last else parts[k + 1][0]]))


def _runs(mask: Sequence[int]) -> list[tuple[int, int]]:
    """Return the ranges of the model's own tokens; one range of all tokens if the mask has none."""
    ends = [0, *accumulate(len(list(group)) for _, group in groupby(bool(sampled) for sampled in mask))]
    runs = [(start, end) for start, end in pairwise(ends) if mask[start]]
    return runs or [(0, len(mask))]
