"""Run a script of NeMo-RL with `SpanEstimator`: `python -m spanwise.engines.nemo_rl examples/run_grpo.py --config ...`."""

import runpy
import sys

from spanwise.engines.nemo_rl import attach

if __name__ == "__main__":
    attach()
    sys.argv = sys.argv[1:]
    sys.path[:1] = [sys.argv[0].rpartition("/")[0] or "."]  # the script's folder, as if Python had started the script
    runpy.run_path(sys.argv[0], run_name="__main__")
