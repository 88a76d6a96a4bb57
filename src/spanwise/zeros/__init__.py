"""Why a token trains with exactly 0: one reason for every such token, so that the counts add up."""

from spanwise.types import Zero
from spanwise.zeros.reasons import recorded_reasons, zero_reasons
from spanwise.zeros.tally import Count, Zeros, tally_zeros

__all__ = ["Count", "Zero", "Zeros", "recorded_reasons", "tally_zeros", "zero_reasons"]
