"""Our own rollout files: a status each."""

import pytest

from rollout_files import ABSENT, ERROR, OK, own_run
from spanwise.errors import DataError
from spanwise.rollouts import read_rollouts
from spanwise.types import Status


def test_statuses_of_our_own_files(tmp_path):
    rewards = [1.0, None, None, 0.0]
    kept = read_rollouts(own_run(tmp_path / "a", rewards=rewards, status=["ok", "timeout", "absent", "ok"]))
    assert kept.rewards["correct"].status_n.tolist() == [OK, int(Status.TIMEOUT), ABSENT, OK]
    bare = read_rollouts(own_run(tmp_path / "b", rewards=rewards))
    assert bare.rewards["correct"].status_n.tolist() == [OK, ERROR, ERROR, OK]
    with pytest.raises(DataError, match=r"Completion 1 of .* has 'late' as 'status/correct', which is none of ok, absent"):
        read_rollouts(own_run(tmp_path / "c", rewards=rewards, status=["ok", "late", "ok", "ok"]))
