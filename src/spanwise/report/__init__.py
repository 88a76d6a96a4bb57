"""Turn figures and rollouts into one self-contained HTML file."""

from spanwise.errors import lacking

try:
    import altair as _altair  # noqa: F401
    import jinja2 as _jinja2  # noqa: F401
except ModuleNotFoundError as error:  # altair and jinja2 are optional dependencies
    raise lacking("spanwise.report", error) from error

from spanwise.report.compare import compare_report
from spanwise.report.credit import credit_report
from spanwise.report.tokens import TokenView
from spanwise.report.train import train_report

__all__ = ["TokenView", "compare_report", "credit_report", "train_report"]
