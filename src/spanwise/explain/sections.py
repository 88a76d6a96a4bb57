"""What each section of a page answers, and how it is read; `{}` is filled in by the page."""

from __future__ import annotations

from collections.abc import Mapping

#: Title -> the question, and a sentence or two.
SECTIONS: Mapping[str, tuple[str, str]] = {
    "Learning": (
        "Did it learn? Did it collapse?",
        "{seeds}Calibration never stands alone: a policy that refuses everything, or always says one number, can have a beautiful "
        "ECE.",
    ),
    "Reliability": (
        "Is the confidence honest?",
        "Accuracy of the completions that say the same {kinds}. On the dashed line a policy knows what it knows; below it, it "
        "claims too much. Whiskers are 95 % intervals; the bars count completions.{score}",
    ),
    "Voting": (
        "What are more samples of a prompt worth?",
        "Accuracy when one answer is chosen among n samples of a prompt; bands are 95 % intervals over {over}. pass@k: at least "
        "one is right. {note}",
    ),
    "Attempts": (
        "Is the second attempt better?",
        "Accuracy of the majority of a later attempt minus that of the first one, over the same samples; bands are 95 % intervals "
        "over prompts. Above 0 the later attempt is better.",
    ),
    "Rewards": (
        "Which part of the answer improves?",
        "Means over the completions of a training batch that have the reward; the table compares the first tenth of the batches "
        "with the last.",
    ),
    "Dropped": (
        "What was dropped: failed, missing, cut off?",
        "Rewards that do not exist join no comparison, and they are not 0. Cut off: at the longest length.",
    ),
    "Credit": ("Why this number?", "What the blocks of a training batch are paid."),
    "Dead strata": (
        "Why is this advantage zero?",
        "Where all rewards of a comparison are equal, or there is only one, nothing can be learned about the objective.",
    ),
    "Optimiser": ("Did it collapse?", ""),
    "Credit by block": (
        "Which blocks does a method pay, and how much?",
        "How often a method credits a block with how much. A high bin in the middle means that the block learns little from {of}."
        "{stop}",
    ),
    "Summary": ("", "Over the completions that have the block, or a stop credit."),
    "Status of the rewards": (
        "",
        "A reward that is absent, one that failed and one that is 0 are three different things: only 'ok' goes with a number.",
    ),
    "Tokens": ("Why this number?", "What every token is credited with. {note}"),
    "Figures": (
        "Which arm is best, and in what?",
        "Mean ± half of the {level:g} % interval (Student's t) over {seeds} seeds; n where a figure exists in fewer.",
    ),
    "Differences": (
        "Is it noise?",
        "{summary} What is inside the noise is grey; the numbers say how many seeds it would take.",
    ),
    "Fidelity": (
        "Which baseline is nearest to the truth?",
        "Advantages of each baseline against Monte Carlo advantages from re-rolled last blocks; whiskers are 95 % intervals "
        "over prompts. RMSE alone rewards a baseline for including the sample itself; read it with the figures that do not "
        "depend on scale. The grey tick is what the exact advantages would reach.",
    ),
    "Paired differences": ("Is it noise?", "On the same prompts; an interval that excludes 0 is beyond the noise."),
    "The q* test": (
        "Is the confidence honest?",
        "The confidence a policy ends at if only this baseline moves it. On the dashed line it says how probable it is to be "
        "right.",
    ),
    "Token advantages": (
        "Which estimator is right at the tokens?",
        "GAE, SAE and a group mean at the tokens where the policy really chose (p < .97), for several frozen critics.",
    ),
}
