"""Runs a script of this folder in two real processes, quietly and with one thread each."""

import os
import subprocess
import sys
from pathlib import Path


def launched(script, folder, *arguments, timeout=200):
    """Give the folder that the processes have written to."""
    # accelerate's own launcher starts several CPU processes only through mpirun; torchrun sets the same variables.
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc_per_node", "2"]
    command += [str(Path(__file__).with_name(script)), str(folder), *arguments]
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "ACCELERATE_USE_CPU": "true", "PYTHONWARNINGS": "ignore"}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=timeout)
    assert done.returncode == 0, done.stderr[-4000:]
    return folder


def end(run):
    """End a process of a trainer once all have come so far."""
    run.accelerator.wait_for_everyone()
    run.accelerator.end_training()
    sys.stdout.flush()
    os._exit(0)  # gloo's threads now and then abort a process that takes itself apart in the ordinary way
