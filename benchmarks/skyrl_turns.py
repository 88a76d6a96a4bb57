"""Credit by turns beside one number for the whole conversation, in SkyRL's real trainer on the CPU with a stub for its workers.

    .venv-skyrl/bin/python benchmarks/skyrl_turns.py --seeds 5

The task is that of tests/engines/skyrl/skyrl_small.py: in every turn a sign is shown and one of six answers is right;
conversations of `--turns` turns. All arms start from the same weights and see the same prompts of a seed; rows are merged before
training.
"""

import argparse
import statistics
import sys
import tempfile
import warnings
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1] / "tests" / "engines" / "skyrl"))
warnings.simplefilter("ignore")

import skyrl_small as small  # noqa: E402

TURN = "layout: {turn: []}\n"
_RIGHT = "objectives: [{reward: environment, pays: turn, scope: turn, options: {column: right}}]"
_WHOLE = "method: rloo\nper: completion\nobjectives: [{reward: environment, pays: turn"
ARMS = {
    "outcome: all right, broadcast": f"{_WHOLE}, options: {{column: solved}}}}]",
    "outcome: share right, broadcast": f"{_WHOLE}}}]",
    "turns, bae": f"method: bae\n{_RIGHT}",
    "turns, gigpo, no outcome": f"method: gigpo\noptions: {{episode_weight: 0.0, gamma: 0.0}}\n{_RIGHT}",
    "turns, gigpo": f"method: gigpo\n{_RIGHT}",
}
#: Half the width of a 95 % interval of a mean of n, in standard errors (Student's t).
_T = {2: 12.706, 3: 4.303, 4: 3.182, 5: 2.776, 6: 2.571, 8: 2.365, 10: 2.262}


def curve(data: str, recipe: str, seed: int, steps: int, lr: float) -> list[float]:
    """The share of right answers of every step."""
    cfg = small.config(data, recipe=TURN + recipe, layout="merged", steps=steps, lr=lr, **{"trainer.seed": seed})
    return small.run(small.trainer(cfg, dp=2, seed=seed), seed=seed).generator.curve


def interval(values: list[float]) -> str:
    """A mean with its 95 % interval."""
    half = _T[len(values)] * statistics.stdev(values) / len(values) ** 0.5
    return f"{statistics.mean(values):+.3f} ({statistics.mean(values) - half:+.3f}, {statistics.mean(values) + half:+.3f})"


def main() -> None:
    """Run all arms and print the table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seeds", type=int, default=5)
    parser.add_argument("--steps", type=int, default=40)
    parser.add_argument("--lr", type=float, default=0.01)
    parser.add_argument("--turns", default="4,6,8")
    options = parser.parse_args()
    lengths = tuple(map(int, options.turns.split(",")))
    data = small.write_dataset(Path(tempfile.mkdtemp()) / "signs.jsonl", size=48, turns=lengths)
    curves = {
        name: [curve(data, recipe, seed, options.steps, options.lr) for seed in range(options.seeds)]
        for name, recipe in ARMS.items()
    }
    first = next(iter(ARMS))
    second = list(ARMS)[1]
    print(
        f"share of right answers, conversations of {options.turns} turns, {options.steps} steps, {options.seeds} seeds, "
        f"lr {options.lr}"
    )
    for name, runs in curves.items():
        mean = [statistics.mean(one) for one in runs]
        end = [statistics.mean(one[-5:]) for one in runs]
        print(f"{name:34s} over the run {statistics.mean(mean):.3f}   last five steps {statistics.mean(end):.3f}", end="   ")
        print(
            "every tenth step:",
            " ".join(f"{statistics.mean(one[n] for one in runs):.2f}" for n in range(0, options.steps, 10)),
        )
        for other in (first, second):
            if name != other:
                pairs = [a - statistics.mean(b) for a, b in zip(mean, curves[other], strict=True)]
                print(f"{'':34s}   over the run, less '{other}': {interval(pairs)}")


if __name__ == "__main__":
    main()
