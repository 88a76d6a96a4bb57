"""Train with TRL: `SpanGRPOTrainer` gives every span of a completion its own advantage."""

from spanwise.errors import lacking

try:
    import trl as _trl  # noqa: F401
except ModuleNotFoundError as error:  # trl is an optional dependency
    raise lacking("spanwise.engines.trl", error) from error

from spanwise.engines.trl.config import SpanGRPOConfig
from spanwise.engines.trl.trainer import SpanGRPOTrainer

__all__ = ["SpanGRPOConfig", "SpanGRPOTrainer"]
