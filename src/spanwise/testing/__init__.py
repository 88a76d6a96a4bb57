"""Check that your own or built-in estimators, segmenters and rewards have the required properties.

`check_estimator`, `check_segmenter` and `check_reward` search for counter-examples and describe one in a sentence. Needs
`pip install 'spanwise[testing]'`.
"""

from spanwise.errors import lacking

try:
    import hypothesis as _hypothesis  # noqa: F401
except ModuleNotFoundError as error:  # hypothesis is an optional dependency
    raise lacking("spanwise.testing", error) from error

from spanwise.testing.estimators import check_estimator
from spanwise.testing.rewards import HOSTILE, REWARD_PROPERTIES, check_reward
from spanwise.testing.search import ConformanceError
from spanwise.testing.segmenters import SEGMENTER_PROPERTIES, check_segmenter, small_vocabulary, texts, token_rows

__all__ = [
    "HOSTILE",
    "REWARD_PROPERTIES",
    "SEGMENTER_PROPERTIES",
    "ConformanceError",
    "check_estimator",
    "check_reward",
    "check_segmenter",
    "small_vocabulary",
    "texts",
    "token_rows",
]
