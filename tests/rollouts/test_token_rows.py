"""The tokens of a file's completions in temporary files: what was added, NaN where a completion lacks a stream, no memory."""

import gc
import tracemalloc
import warnings

import numpy as np

from spanwise.rollouts.token_rows import DiskArray, TokenRows, disk_zeros


def test_streams_that_begin_late_or_end_early_are_nan_where_a_completion_lacks_them():
    rows = TokenRows()
    rows.append([5, 6], [True, False], {"logprobs": [-0.5, -1.0], "advantages": None})
    rows.append([], [], {})
    rows.append([7], [True], {"advantages": [1e-9]})
    assert rows.offsets.tolist() == [0, 2, 2, 3]
    assert (rows.ids.read().tolist(), rows.trainable.read().tolist()) == ([5, 6, 7], [True, False, True])
    np.testing.assert_array_equal(rows.numbers("logprobs"), np.float32([-0.5, -1.0, np.nan]))
    np.testing.assert_array_equal(rows.numbers("advantages"), [np.nan, np.nan, 1e-9])
    assert rows.numbers("values") is None


def test_numbers_take_no_memory_and_leave_no_open_file():
    with warnings.catch_warnings(action="error"):
        tracemalloc.start()
        numbers = DiskArray(np.float64)
        for _ in range(100):
            numbers.extend(np.ones(10_000))
        kept, credit = numbers.read(), disk_zeros(1_000_000, np.float32)
        size = tracemalloc.get_traced_memory()[0]
        tracemalloc.stop()
        assert kept.sum() == 1_000_000
        credit[5] = 1.0
        assert (credit[5], credit.sum()) == (1.0, 1.0)
        kept[0] = 0.0  # in memory alone
        assert size < 200_000
        del numbers
        gc.collect()
    assert kept[-1] == 1.0
