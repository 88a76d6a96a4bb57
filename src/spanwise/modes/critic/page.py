"""What the page of a run shows of a critic: how much of what was earned it knew, and where it was wrong."""

from __future__ import annotations

from spanwise.metric import Alarm, Metric
from spanwise.mode import Chart, Page

#: What is said at the end of a run whose critic knows nothing.
EXPLAINED = Metric(
    "critic/[value/]explained_variance",
    at_end=Alarm(
        "at most",
        0.0,
        "The critic{of} knows nothing: its explained variance is {value:.2f} at the end (mean of {over}).",
        unknown="The critic{of} cannot be judged: no batch has an explained variance, as everything in it earned the same.",
    ),
)
#: Its section.
PAGE = Page(
    "Critic",
    "GAE and SAE credit a token with what the critic expects after it minus what it expected before: they are worth what its "
    "values are.",
    "Does the critic know anything?",
    (
        Chart(
            "Explained variance",
            {"explained_variance": "critic"},
            "share of the variance",
            "1 - variance of (earned - expected) / variance of earned, over the tokens of a batch: 1 knows all, 0 says the same "
            "everywhere, below 0 is worse than that.",
            floor=-1.0,  # one that starts from nothing may begin at -1,000
        ),
        Chart(
            "Error of the critic",
            {"error_mean": "of a completion's mean", "error_within": "within a completion"},
            "squared error",
            "Together they are the error of a token: how far a completion's mean value is off, and how far the course of its "
            "values is. Where all reward comes at the end, what was earned has no course: a flat critic then has no error within, "
            "which is no merit.",
        ),
        Chart(
            "Expected and earned",
            {"value_mean": "expected", "target_mean": "earned"},
            "mean",
            "Means over the tokens of a batch: where they part, the critic lags behind the policy.",
        ),
    ),
    headline=("explained_variance", "explained variance", "the critic knows nothing"),
)
