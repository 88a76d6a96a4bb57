"""Warn about likely mistakes: missing tags, absent rewards, blocks that a completion can omit unpunished."""

from __future__ import annotations

import math
from collections import Counter, deque
from collections.abc import Callable, Hashable, Mapping
from typing import Any

from jaxtyping import Bool, Float, Int
from torch import Tensor

from spanwise.credit import length_adaptive_lambda
from spanwise.explain.alarms import IN_A_ROW, habits, later_elements
from spanwise.objective import Objective
from spanwise.pipeline import Reading
from spanwise.scheme import Scheme
from spanwise.score import REWARDS
from spanwise.segment.census import census_of
from spanwise.types import Fault, Status, whole_text

#: The sentences that explain how the tokens of a block share the block's credit.
SHARING = (
    "The number at a token is the token's share of its block's credit. Some methods treat the whole completion as one block. "
    "GRPO's own code does not share credit: every token gets the whole advantage, and the loss divides by the number of tokens."
)
#: The last sentences of the warning about a block that completions can leave out at no cost.
_DRIFT = (
    "A completion loses nothing if it leaves the block out or writes it unreadably, so the policy may learn to do so. Set "
    "if_missing, the reward for such a completion: Objective(..., if_missing=-1.0)."
)


def setup_warnings(reading: Reading, scheme: Scheme) -> dict[str, str]:
    """Warn if completions lack the layout's tags, get no reward, or leave out blocks without losing reward.

    An engine says each sentence once (`Watch`): the keys stay the same, the numbers in a sentence do not.

    Args:
        reading: of completions that were read here, with their text.
        scheme: what they were read under.

    Returns:
        Key -> sentence: `tags`; `scored/<objective>`, no completion has a reward; `unused/<objective>`, a number came for a block
        that is not there; `dear/<objective>`, `if_missing` is far from all rewards; `free/<objective>`, a block is left out and
        `if_missing` is None; `lambda`, an adaptive lambda is 0 for most completions. Nothing where there is nothing to say.

    Example:
        >>> from spanwise import Batch, Layout, Objective, Vocabulary, read
        >>> vocabulary = Vocabulary((b"<answer>", b"4", b"</answer>", b"<plan>"))
        >>> batch = Batch.jagged([[3, 1], [3, 1]], [0, 0], columns={"answer": ["4", "4"]})
        >>> scheme = Scheme.preset("grpo", Layout({"all": ["answer"]}))
        >>> print(setup_warnings(read(batch, scheme, vocabulary), scheme)["tags"])
        <answer> is in 0 of 2 completions. Instead, the completions contain <plan> (in 2). The layout in use...
    """
    return _setup_warnings(reading, reading, scheme)


def _setup_warnings(reading: Reading, everyone: Reading, scheme: Scheme) -> dict[str, str]:
    """Build `setup_warnings` from the completions of all processes (`everyone`). This process has read only `reading`."""
    if not len(reading):
        return {}
    warning_of_key = {"tags": _warn_missing_tags(reading, everyone, scheme)}
    later_names = later_elements(scheme.names)
    for m, objective in enumerate(scheme.objectives):
        status_codes = set(everyone.scores.status_nm[:, m].tolist())
        has_reward = bool(status_codes & {Status.OK, Status.BROKE})
        if warning_of_key["tags"] and not has_reward and Status.ERROR not in status_codes:
            continue  # the warning about missing tags already explains why the objective has no reward
        if Status.ABSENT in status_codes and objective.name in later_names:
            continue
        for warning_kind, check in (_REWARD_CHECKS if has_reward else {"scored": _warn_unscored}).items():
            # Rewards of missing blocks (`unused`) are known only in the process that read the completion.
            if sentence := check(objective, reading if warning_kind == "unused" else everyone, scheme, m):
                warning_of_key[f"{warning_kind}/{objective.name}"] = sentence
                break
    warning_of_key = _merge_free_omissions(warning_of_key, everyone, scheme)
    warning_of_key["lambda"] = _warn_zero_lambda(everyone, scheme)
    return {key: sentence for key, sentence in warning_of_key.items() if sentence}


class Watch:
    """Collects the warnings of a training run, and returns each only once."""

    def __init__(self, scheme: Scheme) -> None:
        self.scheme = scheme
        self._given_keys = set[str]()
        self._batches: deque[Mapping[str, Any]] = deque(maxlen=IN_A_ROW)

    def of_reading(self, reading: Reading, everyone: Reading | None = None) -> tuple[list[str], bool]:
        """Return a batch's new warnings, and whether some objective has nothing to train on. See `_setup_warnings`."""
        everyone = reading if everyone is None else everyone
        warnings = _setup_warnings(reading, everyone, self.scheme)
        new_warning_keys = warnings.keys() - self._given_keys
        new_sentences = self._take_new(warnings)
        absent_shares = everyone.scores.reward_nm.isnan().double().mean(dim=0).tolist()
        # If a metric of the batch is alarming because of the same problem, do not warn again about that metric.
        for warning_kind, _, name in (key.partition("/") for key in new_warning_keys):
            if warning_kind == "tags":
                self._given_keys.add("credit/malformed")
            elif warning_kind in ("scored", "free"):
                for objective_name, absent_share in zip(self.scheme.names, absent_shares, strict=True):
                    if objective_name == name or objective_name.startswith(f"{name}."):
                        shown_metrics = {f"credit/{objective_name}/reward_absent": absent_share}
                        self._given_keys |= {f"free/{objective_name}", *habits([shown_metrics] * IN_A_ROW)}
        return new_sentences, any(key.startswith(("tags", "scored/")) for key in warnings)

    def of_turns(self, reading: Reading, worth_sm: Float[Tensor, "s m"], trajectory_s: Int[Tensor, " s"]) -> list[str]:
        """Warn if an earlier turn has a higher reward than the turn whose reward counts for the rollout (`worth_sm`)."""
        turn_warnings = {}
        for m, objective in enumerate(self.scheme.objectives):
            is_higher_s = reading.scores.reward_nm[:, m] > worth_sm[:, m]
            if is_higher_s.any() and (objective.scope or self.scheme.default_scope) == "rollout":
                turn_warnings[f"turns/{objective.name}"] = (
                    f"In {len(trajectory_s[is_higher_s].unique())} of {len(trajectory_s.unique())} rollouts, an earlier turn has a "
                    f"higher reward '{objective.name}' than the turn that counts. Only the last turn with a reward counts for a "
                    "rollout. To pay each turn its own reward, set scope: turn. To score the whole conversation, write a reward "
                    "function of 'completions'."
                )
        return self._take_new(turn_warnings)

    def of_batch(self, batch_metrics: Mapping[str, float], *, step: int | None = None) -> list[str]:
        """Record a batch's metrics, and return new warnings about problems that last several batches."""
        self._batches.append({**({} if step is None else {"step": step}), **batch_metrics})
        return self._take_new(habits(self._batches))

    def _take_new(self, warnings: Mapping[str, str]) -> list[str]:
        """Return the warnings that were not given before, and remember their keys."""
        new_sentences = [sentence for key, sentence in warnings.items() if key not in self._given_keys]
        self._given_keys.update(warnings)
        return new_sentences


def _warn_missing_tags(reading: Reading, everyone: Reading, scheme: Scheme) -> str:
    """Warn if over 99 % of the completions lack some tags of the layout. Other markers count too."""
    lacks_parts_n, pooled_lacks_parts_n = ((r.fault_n & int(Fault.MISSING | Fault.EMPTY)) != 0 for r in (reading, everyone))
    if reading.text is None or float(pooled_lacks_parts_n.double().mean()) <= 0.99:
        return ""
    texts = [whole_text(blocks) for blocks in reading.text]
    part_counts = next((counts for counts in census_of(scheme.layout, texts) if counts.lacking), None)
    if part_counts is None:
        return ""
    parts_text = "these tags" if part_counts.segmenter == "tags" else "these parts"
    advice_text = f"Ask for {parts_text} in the prompt, or change the layout to what the model writes."
    length_n = reading.length_nk.sum(dim=1)
    cut_off_count, cut_sentence = cut_off(reading.fault_n, length_n, texts.__getitem__, among_n=lacks_parts_n)
    if cut_off_count * 2 >= len(reading):
        advice_text = (
            f"{cut_sentence} If these completions were cut off, raise the token limit of a completion (max_completion_length, in "
            f"verl data.max_response_length), or ask for shorter completions. If not, ask for {parts_text} in the prompt."
        )
    layout_sentence = f"The layout in use contains {part_counts.lacking_text}. Rewards cannot read missing parts."
    return f"{part_counts.sentence} {layout_sentence} {advice_text}"


def cut_off(
    fault_n: Int[Tensor, " n"],
    length_n: Int[Tensor, " n"],
    text_of: Callable[[int], Hashable],
    *,
    among_n: Bool[Tensor, " n"],
) -> tuple[int, str]:
    """Count the completions that seem cut off, and describe the evidence in a sentence."""
    unclosed_count = int((among_n & ((fault_n & int(Fault.TRUNCATED)) != 0)).sum())
    largest_length = int(length_n.max())
    is_longest_n = among_n & (length_n == largest_length)
    longest_rows = is_longest_n.nonzero().flatten().tolist() if largest_length else []
    distinct_text_count = len({text_of(row) for row in longest_rows})
    longest_count = distinct_text_count if distinct_text_count > 1 else 0
    longest_text_sentence = (
        f"{longest_count} malformed completions with different texts are {largest_length} tokens long, the largest length."
    )
    unclosed_sentence = f"{unclosed_count} malformed completions ended inside a part (such as a tag) that they left open."
    return max((unclosed_count, unclosed_sentence), (longest_count, longest_text_sentence))


def _warn_unscored(objective: Objective, reading: Reading, scheme: Scheme, m: int) -> str:
    """Warn that an objective trains nothing, because no completion has its reward."""
    count_of_status = Counter(map(Status, sorted(reading.scores.status_nm[:, m].tolist())))
    counts_text = ", ".join(f"{count} {status.name.lower()}" for status, count in count_of_status.items())
    cause_text = "Absent means that the reward function returned None, or that a part or column that it reads is missing."
    if count_of_status.keys() & {Status.TIMEOUT, Status.ERROR}:
        cause_text = "The check itself failed."
    reward = objective.reward
    reward_options = {**REWARDS.find(reward).options, **objective.options} if isinstance(reward, str) else {}
    if "column" in reward_options and Status.ERROR in count_of_status:
        tag_text = f" for '{reward_options['tag']}'" if reward_options.get("tag") else ""
        cause_text = f"The column '{reward_options['column']}' holds no readable value{tag_text}."
    if (column := reward_options.get("tests")) and Status.ERROR in count_of_status:
        cause_text = f"The column '{column}' holds no test code, or its code only defines tests and calls none."
    return (
        f"Objective '{objective.name}' has no reward for any of {len(reading)} completions ({counts_text}), so it trains nothing. "
        f"{cause_text} Look at one completion and its columns."
    )


def _warn_unused(objective: Objective, reading: Reading, scheme: Scheme, m: int) -> str:
    """Warn about rewards given for missing blocks. They are ignored, because the objective's `if_missing` replaces them."""
    if reading.scores.unused_nm is None:
        return ""
    if_missing = objective.if_missing
    numbered_rewards = enumerate(reading.scores.unused_nm[:, m].tolist())
    ignored_rewards = {n: reward for n, reward in numbered_rewards if not math.isnan(reward) and reward != if_missing}
    if not ignored_rewards:
        return ""
    first_index = min(ignored_rewards)
    min_reward, max_reward = min(ignored_rewards.values()), max(ignored_rewards.values())
    rewards_text = f"{min_reward:g}" if min_reward == max_reward else f"{min_reward:g} to {max_reward:g}"
    source_text = "recorded in the file" if objective.name in scheme.recorded else "from its reward function"
    blocks_text = " and ".join(objective.pays)
    omission_reward = "no reward and loses nothing" if if_missing is None else f"the reward {if_missing:g} (if_missing)"
    omission_text = f"Without {blocks_text}, a completion gets {omission_reward}."
    remedy = f"To use rewards of completions without {blocks_text}, let 'pays' name a block that every completion has."
    if min_reward == max_reward:
        remedy = f"To give completions without the block a reward of {min_reward:g}, set if_missing={min_reward:g}."
    return (
        f"{len(ignored_rewards)} of {len(reading)} completions have no block {blocks_text}, but have a reward of objective "
        f"'{objective.name}': {rewards_text} ({source_text}). The first of these completions is completion {first_index}. "
        f"spanwise ignores rewards of completions without the block. {omission_text} {remedy}"
    )


def _warn_large_if_missing(objective: Objective, reading: Reading, scheme: Scheme, m: int) -> str:
    """Warn if `if_missing`, the reward of a missing block, is over ten times any other reward."""
    reward_n = reading.scores.reward_nm[:, m]
    min_reward, max_reward = map(float, reward_n[~reward_n.isnan()].aminmax())
    if_missing = objective.if_missing
    if if_missing is None or objective.scale == "std" or abs(if_missing) <= 10 * max(1.0, abs(min_reward), abs(max_reward)):
        return ""
    return (
        f"Objective '{objective.name}' gives a completion without its block the reward {if_missing:g} (if_missing). All other "
        f"rewards of the objective lie between {min_reward:g} and {max_reward:g}. So one completion without the block outweighs "
        "all others in the gradient. Set if_missing to the lowest possible reward. Or set scale: std, which divides by the "
        "rewards' standard deviation."
    )


def _warn_free_omission(objective: Objective, reading: Reading, scheme: Scheme, m: int) -> str:
    """Warn that completions omit or garble a block at no cost, because `if_missing` is None."""
    if objective.if_missing is not None:
        return ""
    unparsable_count = int((reading.scores.status_nm[:, m] == int(Status.UNPARSABLE)).sum())
    count_of_clause = {
        f"completions leave out {' and '.join(objective.pays)}": _count_omitted(objective, reading, scheme),
        f"completions write {' and '.join(objective.pays)} unreadably": unparsable_count,
    }
    counted_clauses = [f"{count} of {len(reading)} {clause}" for clause, count in count_of_clause.items() if count]
    if not counted_clauses:
        return ""
    return f"{' and '.join(counted_clauses)}. Without if_missing, they get no reward '{objective.name}'. {_DRIFT}"


def _count_omitted(objective: Objective, reading: Reading, scheme: Scheme) -> int:
    """Count the completions that omit all blocks of an objective. Punished omissions count 0."""
    paid_block_indices = [scheme.layout.names.index(name) for name in objective.pays]
    has_tokens_n = reading.length_nk.sum(dim=1) > 0
    lacks_blocks_n = (reading.length_nk[:, paid_block_indices] == 0).all(dim=1)
    penalty_objectives = [other_objective for other_objective in scheme.objectives if other_objective.if_missing is not None]
    omission_has_cost = any(set(objective.pays) <= set(other_objective.pays) for other_objective in penalty_objectives)
    return 0 if omission_has_cost else int((has_tokens_n & lacks_blocks_n).sum())


def _merge_free_omissions(warnings: dict[str, str], reading: Reading, scheme: Scheme) -> dict[str, str]:
    """Merge three or more warnings about omitted blocks into one if the same reward scores these blocks."""
    is_unparsable_nm = reading.scores.status_nm == int(Status.UNPARSABLE)
    free_objectives = [
        objective
        for m, objective in enumerate(scheme.objectives)
        if f"free/{objective.name}" in warnings
        and not is_unparsable_nm[:, m].any()  # the joint warning for a reward's parts does not mention unreadable blocks
    ]
    for family in dict.fromkeys(objective.name.partition(".")[0] for objective in free_objectives if "." in objective.name):
        family_objectives = [objective for objective in free_objectives if objective.name.startswith(f"{family}.")]
        if len(family_objectives) < 3:
            continue
        omitted_counts = [_count_omitted(objective, reading, scheme) for objective in family_objectives]
        merged_warning_keys = {f"free/{objective.name}" for objective in family_objectives}
        warnings = {key: sentence for key, sentence in warnings.items() if key not in merged_warning_keys}
        omitted_blocks = dict.fromkeys(block for objective in family_objectives for block in objective.pays)
        warnings[f"free/{family}"] = (
            f"Up to {max(omitted_counts)} of {len(reading)} completions lack a block ({', '.join(omitted_blocks)}). "
            f"The objectives '{family}' set no reward for this case. {_DRIFT}"
        )
    return warnings


def _warn_zero_lambda(reading: Reading, scheme: Scheme) -> str:
    """Warn if the length-adaptive GAE lambda is 0 for most completions. Then only the last token sees the reward."""
    alpha = scheme.options.get("length_adaptive_alpha")
    if alpha is None:
        return ""
    length_n = reading.length_nk.sum(dim=1)
    length_n = length_n[length_n > 0]
    zero_lambda_count = int((length_adaptive_lambda(length_n, alpha=alpha) == 0).sum())
    if zero_lambda_count * 2 <= len(length_n):
        return ""
    return (
        f"length_adaptive_alpha={alpha:g} sets GAE's lambda to 0 in completions of at most {int(1 / alpha)} tokens. These "
        f"are {zero_lambda_count} of {len(length_n)} completions (median length: {int(length_n.median())} tokens). There, "
        f"the reward only reaches the last token. The advantages of all other tokens come from the critic's values alone. "
        f"Set a larger length_adaptive_alpha, or remove it and set lam near 1."
    )


#: The checks of an objective, in order. Only the first that finds a problem warns.
_REWARD_CHECKS = {"unused": _warn_unused, "dear": _warn_large_if_missing, "free": _warn_free_omission}
