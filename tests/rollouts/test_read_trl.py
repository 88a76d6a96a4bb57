"""Completions that TRL logs."""

import pyarrow as pa

from rollout_files import trl_file
from spanwise.rollouts import read_rollouts


def test_null_steps_of_trl_are_no_steps(tmp_path):
    table = read_rollouts(trl_file(tmp_path / "a.parquet", ["a", "b"], step=pa.array([None, 3], pa.int64())))
    assert table.step_n.tolist() == [0, 3]
