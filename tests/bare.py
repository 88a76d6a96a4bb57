"""An environment that holds some packages and what they need, and nothing else of what is installed here."""

import os
import sys
from importlib.metadata import PackageNotFoundError, distribution
from pathlib import Path

from packaging.requirements import Requirement

from forked import run_each

SOURCE = Path(__file__).parents[1] / "src"


def closure(names):
    """The distributions of some packages and of all that they require here."""
    found, waiting = {}, list(names)
    while waiting:
        name = waiting.pop()
        if name in found:
            continue
        try:
            found[name] = distribution(name)
        except PackageNotFoundError:  # what another system would need
            continue
        for line in found[name].requires or ():
            wanted = Requirement(line)
            if wanted.marker is None or wanted.marker.evaluate({"extra": ""}):
                waiting.append(wanted.name)
    return found.values()


def environment(folder, *names):
    """A folder of links that `run` takes for all that is installed."""
    folder.mkdir(parents=True, exist_ok=True)
    for found in closure(names):
        for top in {file.parts[0] for file in found.files or () if file.parts[0] not in ("..", "__pycache__")}:
            place = folder / top
            if not place.exists():
                place.symlink_to(Path(found.locate_file(top)).resolve())
    return folder


def run(folder, codes, *, cwd):
    """Processes of Python that see the folder and spanwise: what `subprocess.run` gives for each of the codes."""
    path = os.pathsep.join((str(folder), str(SOURCE)))
    kept = {name: os.environ[name] for name in ("PATH", "HOME", "OMP_NUM_THREADS") if name in os.environ}
    return run_each(codes, python=(sys.executable, "-S"), env={**kept, "PYTHONPATH": path, "COLUMNS": "200"}, cwd=cwd)
