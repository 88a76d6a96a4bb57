"""Helpers that most test files need."""

import time

import torch

NAN = float("nan")


def double(rows):
    return torch.tensor(rows, dtype=torch.float64)


def assert_close(actual, expected, tolerance=1e-6, *, equal_nan=False):
    """Equal within an absolute tolerance, and of one dtype; numbers written as a list are float64."""
    expected = expected if isinstance(expected, torch.Tensor) else double(expected)
    torch.testing.assert_close(actual, expected, atol=tolerance, rtol=0, equal_nan=equal_nan)


def quickly(function, *arguments, **options):
    """Return the function's result; fail if it takes a second of CPU time, as quadratic code would."""
    start = time.process_time()
    result = function(*arguments, **options)
    assert (took := time.process_time() - start) < 1.0, f"{took:.1f} s"
    return result
