"""Turn figures and rollouts into one self-contained HTML file."""

from spanwise.errors import lacking

try:
    import altair as _altair  # noqa: F401
    import jinja2 as _jinja2  # noqa: F401
except ModuleNotFoundError as error:  # altair and jinja2 are optional dependencies
    raise lacking("spanwise.report", error) from error

from spanwise.report.compare import compare_report
from spanwise.report.credit import credit_report
from spanwise.report.page import Headline, Panel, Section, render
from spanwise.report.sections import VOTES_BY_SCORE
from spanwise.report.tokens import TokenView, token_view
from spanwise.report.train import train_report, unmeasured_sentences
from spanwise.report.why import Rule, rule_words

__all__ = [
    "VOTES_BY_SCORE", "Headline", "Panel", "Rule", "Section", "TokenView", "compare_report", "credit_report", "render",
    "rule_words", "token_view", "train_report", "unmeasured_sentences",
]  # fmt: skip
