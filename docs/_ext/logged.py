"""What every number in a log is, and when to worry about it. A test holds this list against what the code can log."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass


@dataclass(frozen=True)
class Logged:
    """What a number of a log is, and when to look closer and at what; empty where no value of it is bad in itself."""

    what: str
    worry: str = ""


#: Of the credit of a batch, in every engine.
CREDIT: Mapping[str, Logged] = {
    "credit/<block>/mean_abs": Logged(
        "Mean size of the block's credit, over the completions that have the block.",
        "It falls to 0: completions no longer differ in what pays this block.",
    ),
    "credit/<block>/zero_frac": Logged(
        "Share of the completions with the block whose credit for it is exactly 0.",
        "It stays near 1: `spanwise why` counts the reasons.",
    ),
    "credit/stop/mean_abs": Logged(
        "Mean size of the credit of the last token, for the decision to stop without a block that is paid.",
        "It grows: more completions leave a block out.",
    ),
    "credit/malformed": Logged(
        "Share of completions with any fault in their tags or fields.",
        "Above 0.5 in three batches in a row there is a warning; most blocks are then read wrongly or not at all.",
    ),
    "credit/no_signal": Logged(
        "1 if every credit of the batch is 0, else 0; over several batches, their share.",
        "At 1 nothing is learned.",
    ),
    "credit/<objective>/reward_absent": Logged(
        "Share of completions without this reward, because its block is missing or cannot be read, or its check failed.",
        "Above 0.5 in three batches in a row there is a warning.",
    ),
    "credit/<objective>/broke": Logged(
        "Share of completions that broke the check of this reward, twice, and count as wrong; only where there are any.",
        "Above 0.1 in three batches in a row there is a warning: the policy may have learned to write text that crashes the check.",
    ),
    "cost/<measure>": Logged(
        "What a reward that asks a model has cost in this batch: requests, answers from the cache, failures, tokens, seconds.",
        "Failures grow: the server is overloaded or down.",
    ),
    "credit/<objective>/singletons": Logged(
        "Share of completions that have the reward and no other completion to be compared with; their credit is 0.",
        "It is large: groups are too small for what the baseline is given.",
    ),
    "credit/<objective>/coarser": Logged(
        "Share of completions compared with fewer outcomes than the objective is given, because their stratum was too small.",
        "Near 1: the last outcome is never used, so leave it out or set group_size up.",
    ),
    "credit/<comparison>/unanimous": Logged(
        "Share of the groups in which all completions that have this reward have the same one. A method that compares the "
        "sum of several rewards logs the share for the sum, too. With `baseline: batch` the batch is the only group.",
        "Near 1 for the reward of the answer: prompts are too easy or too hard.",
    ),
    "credit/unanimous": Logged(
        "Share of the groups in which every objective gives all completions the same reward, so that nothing is learned.",
        "Above 0.9 in three batches in a row there is a warning.",
    ),
    "credit/<comparison>/dead_strata": Logged(
        "Share of the strata of this comparison in which no completion gets any credit; a comparison is an objective, or "
        "all of them for a method that does not credit blocks. Methods with a critic have no strata.",
        "Above 0.95 in three batches in a row, while groups are not unanimous, there is a warning: strata are too small.",
    ),
}

#: Of a critic, for the methods that have one. With several values the name of the reward stands between.
CRITIC: Mapping[str, Logged] = {
    "critic/explained_variance": Logged(
        "How much of the variance of the returns the critic explains: 1 all, 0 no more than a constant.",
        "Below 0 after the first steps: the policy is paid noise.",
    ),
    "critic/error_point": Logged(
        "Squared error of the critic at a token, each completion counted once; the sum of `error_mean` and `error_within`.",
    ),
    "critic/error_mean": Logged("The part of the squared error that is the same along a whole completion."),
    "critic/error_within": Logged(
        "The part of the squared error that differs from token to token of a completion.",
        "It does not fall while `error_mean` does: the critic says one number for the whole completion.",
    ),
    "critic/value_mean": Logged("Mean value that the critic states.", "It stays far from `critic/target_mean`."),
    "critic/target_mean": Logged("Mean of what the critic is fitted to."),
    "critic/loss": Logged("Loss of the critic's fit, mean of its updates.", "It grows."),
    "critic/grad_norm": Logged(
        "Norm of the critic's gradient before it is clipped.", "It is above `max_grad_norm` in every step."
    ),
    "critic/seconds": Logged("Seconds that the critic took for its values and its fit, for each generation batch."),
    "critic/share": Logged(
        "Seconds of the critic divided by all other seconds of training.",
        "Above 1 it costs more than the policy: set its `epochs` down.",
    ),
}

#: Of a self-rewarding score.
LASER_LOG: Mapping[str, Logged] = {
    "laser/loss": Logged("Loss that fits the score to the verdict.", "It does not fall after `reasoning_warmup`."),
    "laser/score_right": Logged(
        "Mean score of the completions that are right (TRL).", "It is no higher than that of the wrong ones."
    ),
    "laser/score_wrong": Logged(
        "Mean score of the completions that are wrong (TRL).", "It is no lower than that of the right ones."
    ),
    "laser/accuracy": Logged(
        "How often a score above 0.5 agrees with the verdict (verl, SkyRL).",
        "It is no better than always saying what is more frequent.",
    ),
}

#: What else an engine writes, or what spanwise writes in place of an engine's own number.
ENGINES: Mapping[str, Logged] = {
    "spanwise/seconds": Logged(
        "Seconds that reading, scoring and credit took, for each generation batch (TRL).",
        "It is a large part of `step_time`: usually a slow reward.",
    ),
    "sampling/groups": Logged(
        "Groups sampled for each group of the batch, where `dynamic_sampling` is on (TRL).",
        "It is at its most, 1 + `dynamic_sampling_rounds`: most prompts teach nothing.",
    ),
    "sampling/useless": Logged(
        "Share of groups that taught nothing after the last round of `dynamic_sampling` (TRL).",
        "It is large: raise `dynamic_sampling_rounds`, or look at the prompts.",
    ),
    "kl": Logged("Mean KL to the reference policy per token, where `beta` is not 0 (TRL).", "It grows without end."),
    "loss/avg_raw_advantages": Logged("Mean advantage of the trained tokens (SkyRL, in place of its own)."),
    "loss/avg_raw_advantages_abs": Logged(
        "Mean size of the advantage of the trained tokens (SkyRL).", "It is 0: nothing is learned."
    ),
}

#: Of a run of `spanwise train`: what `metrics.jsonl` has beside the trainer's log.
RUN: Mapping[str, Logged] = {
    "step": Logged("Number of the generation batch."),
    "accuracy": Logged(
        "Share of right answers; of the batch, or of an evaluation.", "Below 0.05: no figure of calibration means anything."
    ),
    "ece": Logged(
        "Expected calibration error: mean distance between stated confidence and accuracy, in bins.",
        "It falls together with accuracy, coverage or sharpness: that is no better calibration.",
    ),
    "malformed": Logged("Share of completions of the batch with any fault in their tags."),
    "brier": Logged("Mean squared distance between stated confidence and verdict; lower is better."),
    "auroc": Logged(
        "How often a right completion states more confidence than a wrong one.", "At 0.5 confidence says nothing."
    ),
    "mean_confidence": Logged("Mean stated confidence.", "It is far from the accuracy."),
    "sharpness": Logged("Variance of the stated confidences.", "Below 1e-4 every completion says the same."),
    "coverage": Logged(
        "Share of completions that state a confidence.", "Below 0.5: figures of calibration are about few completions."
    ),
    "verdict_rate": Logged(
        "Share of answers that could be judged.", "Below 0.5: gold answers are missing, or checks run out of time."
    ),
    "format_rate": Logged("Share of completions without any fault in their tags.", "Below 0.9."),
    "refusal_rate": Logged("Share of completions that refuse to answer.", "Above 0.5: a wrong answer costs more than none."),
    "<block>_accuracy": Logged("Accuracy of a later attempt, by the name of its block."),
    "laser_<figure>": Logged("The same figure for the self-rewarding score in place of a stated confidence."),
}

#: Every group by the words that stand over it.
GROUPS: Mapping[str, Mapping[str, Logged]] = {
    "Credit": CREDIT,
    "Critic": CRITIC,
    "Self-rewarding score": LASER_LOG,
    "Engines": ENGINES,
    "Runs and evaluations": RUN,
}
