"""Train the warm starts that the package brings, and put them into `src/spanwise/tasks/starts` in place of those there.

    python benchmarks/starts.py

Another processor rounds differently: its weights differ in the last digits, and a run from them is another run.
"""

import argparse
import shutil
import tempfile
from pathlib import Path

from spanwise.tasks import warm_start
from spanwise.tasks.warm_start import SHIPPED


def main():
    """Train, replace, and say how large it is."""
    argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter).parse_args()
    with tempfile.TemporaryDirectory() as scratch:
        trained = warm_start("invoices", cache_folder=Path(scratch))
        shutil.rmtree(SHIPPED, ignore_errors=True)
        folder = Path(shutil.copytree(trained, SHIPPED / trained.name))
    for file in folder.iterdir():
        file.chmod(0o644)
    print(f"{folder}: {sum(file.stat().st_size for file in folder.iterdir()) / 1e6:.1f} MB")


if __name__ == "__main__":
    main()
