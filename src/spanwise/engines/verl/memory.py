"""What a method remembers of earlier batches, in verl's checkpoints."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from spanwise.disk import whole_file
from spanwise.errors import DataError
from spanwise.scheme import Scheme

#: The file of a checkpoint that holds it.
MEMORY = "spanwise_memory.json"


def save_memory(scheme: Scheme, config: Any, step: int) -> None:
    """Write what the method remembers into the folder of the checkpoint that verl is about to write.

    Args:
        scheme: the rule; nothing is written for a method that remembers nothing.
        config: verl's.
        step: verl's number of the checkpoint.
    """
    if not scheme.entry.stateful:
        return
    estimator: Any = scheme.entry.estimator
    folder = Path(config.trainer.default_local_dir) / f"global_step_{step}"
    folder.mkdir(parents=True, exist_ok=True)
    with whole_file(folder / MEMORY) as beside:
        Path(beside).write_text(json.dumps(estimator.state_dict()), encoding="utf-8")


def load_memory(scheme: Scheme, config: Any, step: int) -> None:
    """Give the method what it remembered when the checkpoint was written that verl has just read.

    Raises:
        DataError: the checkpoint holds no memory.
    """
    if step == 0 or not scheme.entry.stateful:
        return
    named = config.trainer.resume_mode == "resume_path"
    folder = Path(config.trainer.resume_from_path if named else f"{config.trainer.default_local_dir}/global_step_{step}")
    if not (folder / MEMORY).is_file():
        raise DataError(
            f"'{folder}' has no {MEMORY}, the state of the method '{scheme.method}', which remembers earlier batches; start anew."
        )
    estimator: Any = scheme.entry.estimator
    estimator.load_state_dict(json.loads((folder / MEMORY).read_text(encoding="utf-8")))
