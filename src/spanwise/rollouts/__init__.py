"""Read and write rollout files: spanwise's own, those of TRL, verl and verifiers, and your own tables."""

from spanwise.errors import lacking

try:
    import pyarrow as _pyarrow  # noqa: F401
except ModuleNotFoundError as error:  # pyarrow is an optional dependency
    raise lacking("spanwise.rollouts", error) from error

from spanwise.rollouts.read import read_rollouts
from spanwise.rollouts.rows import TokenRow
from spanwise.rollouts.schema import Rollouts, rollout_table, write_rollouts
from spanwise.rollouts.table import RolloutTable
from spanwise.rollouts.traces import read_traces, write_traces

__all__ = [
    "RolloutTable",
    "Rollouts",
    "TokenRow",
    "read_rollouts",
    "read_traces",
    "rollout_table",
    "write_rollouts",
    "write_traces",
]
