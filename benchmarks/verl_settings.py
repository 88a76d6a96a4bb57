"""How many of the settings that verl's example scripts use are taken, and why the others are not.

    .venv-verl/bin/python benchmarks/verl_settings.py [--why]

Each of 110 scripts is laid over verl's own configuration with a recipe, and checked as at the start of a run. Scripts with `gae`
get a recipe with `gae`. Those with a reward manager or function of their own get one that pays its number, and those of the
asynchronous trainer its mode. Nothing is trained.
"""

import argparse
import sys
import tempfile
import warnings
from collections import Counter
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "tests"))
sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "tests" / "engines" / "verl"))


def main():
    """Print what became of each script."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--why", action="store_true", help="each refusal with its scripts")
    options = parser.parse_args()
    from settings_small import check, scripts  # needs verl

    refusals = {}
    with tempfile.TemporaryDirectory() as folder, warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for script, settings in scripts().items():
            sentence = check(Path(folder), settings)
            if sentence is not None:
                refusals[script] = sentence
    print(f"{len(scripts()) - len(refusals)} of {len(scripts())} taken")
    for sentence, count in Counter(refusals.values()).most_common():
        print(f"{count:3} {sentence}")
        for script in [name for name, other in refusals.items() if other == sentence] if options.why else ():
            print(f"      {script}")


if __name__ == "__main__":
    main()
