"""What importing `spanwise.measure` loads, in a fresh process."""

from forked import run


def test_scipy_is_loaded_only_when_it_is_used():
    done = run("import sys, spanwise.report; print('scipy.stats' in sys.modules)")
    assert (done.stdout, done.stderr) == ("False\n", "")
