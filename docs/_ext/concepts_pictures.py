"""The pictures of docs/concepts.md, light and dark: `python docs/_ext/concepts_pictures.py` writes them to docs/images."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path

FOLDER = Path(__file__).resolve().parent.parent / "images"
#: Paper, ink, quiet ink, line, solution, confidence, nobody's.
_INKS = ("paper", "ink", "quiet", "line", "a", "b", "no")
THEMES: Mapping[str, Mapping[str, str]] = {
    "": dict(zip(_INKS, ("#ffffff", "#1d2430", "#5b6675", "#9aa4b2", "#cfe2f7", "#fbdcb4", "#e9ecf0"), strict=True)),
    "-dark": dict(zip(_INKS, ("#131416", "#eceff4", "#a9b3c1", "#6d7887", "#234a75", "#6f4a17", "#2a2e35"), strict=True)),
}
WIDTH = 640
Theme = Mapping[str, str]


def box(theme: Theme, x: float, y: float, width: float, words: str, fill: str, height: float = 34) -> str:
    """A part of a completion, with words in it."""
    return (
        f'<rect x="{x}" y="{y}" width="{width}" height="{height}" rx="5" fill="{theme[fill]}"/>'
        + text(theme, x + width / 2, y + height / 2 + 5, words)
    )  # fmt: skip


def text(theme: Theme, x: float, y: float, words: str, *, at: str = "middle", ink: str = "ink", bold: bool = False) -> str:
    """Words, their baseline at y."""
    weight = ' font-weight="600"' if bold else ""
    return f'<text x="{x}" y="{y}" text-anchor="{at}" fill="{theme[ink]}"{weight}>{words}</text>'


def arrow(theme: Theme, x1: float, y1: float, x2: float, y2: float) -> str:
    """A line with a head."""
    return f'<path d="M{x1} {y1} L{x2} {y2}" stroke="{theme["ink"]}" stroke-width="1.6" marker-end="url(#head)"/>'


def line(theme: Theme, x1: float, y1: float, x2: float, y2: float, *, dashed: bool = False) -> str:
    """A thin line."""
    dash = ' stroke-dasharray="5 4"' if dashed else ""
    return f'<path d="M{x1} {y1} L{x2} {y2}" stroke="{theme["line"]}" stroke-width="1.4"{dash}/>'


def dot(theme: Theme, x: float, y: float, fill: str) -> str:
    """A reward on a scale."""
    return f'<circle cx="{x}" cy="{y}" r="7" fill="{theme[fill]}" stroke="{theme["ink"]}" stroke-width="1.3"/>'


def block(t: Theme) -> tuple[int, str]:
    """One number for the whole, then one for each block."""
    return 150, (
        text(t, 20, 38, "one number", at="start", ink="quiet")
        + box(t, 130, 16, 380, "reasoning, answer 42, confidence 0.9", "no") + text(t, 575, 38, "+0.68", bold=True)
        + text(t, 20, 98, "by block", at="start", ink="quiet")
        + box(t, 130, 76, 250, "reasoning, answer 42", "a") + box(t, 384, 76, 126, "confidence 0.9", "b")
        + text(t, 255, 132, "+0.50", bold=True) + text(t, 447, 132, "+0.04", bold=True)
    )  # fmt: skip


def objective(t: Theme) -> tuple[int, str]:
    """Two rewards, each with an arrow to the block it pays."""
    return 140, (
        text(t, 20, 32, "rewards", at="start", ink="quiet") + text(t, 255, 32, "correct: 1", bold=True)
        + text(t, 447, 32, "brier: -0.01", bold=True)
        + arrow(t, 255, 42, 255, 86) + arrow(t, 447, 42, 447, 86)
        + text(t, 20, 114, "blocks", at="start", ink="quiet")
        + box(t, 130, 92, 250, "solution", "a") + box(t, 384, 92, 126, "confidence", "b")
    )  # fmt: skip


def _scale(t: Theme, y: float, name: str, rewards: Mapping[float, str], mean: float) -> str:
    """Rewards from -1 to 0 on a line, and their mean."""

    def place(reward: float) -> float:
        return 170 + (reward + 1) * 420

    dots = "".join(dot(t, place(reward), y, fill) for reward, fill in rewards.items())
    return (
        text(t, 20, y + 5, name, at="start", ink="quiet") + line(t, 150, y, 600, y)
        + line(t, place(mean), y - 26, place(mean), y + 20, dashed=True) + text(t, place(mean), y - 32, f"mean {mean:g}") + dots
    )  # fmt: skip


def baseline(t: Theme) -> tuple[int, str]:
    """Rewards on a scale, their mean, and the distance that is the credit."""
    return 118, (
        _scale(t, 62, "rewards", {-0.64: "b", -0.09: "a", -0.01: "a"}, -0.19)
        + arrow(t, 510, 84, 328, 84) + text(t, 419, 106, "credit = -0.64 - (-0.19) = -0.45")
    )  # fmt: skip


def given(t: Theme) -> tuple[int, str]:
    """Right and wrong answers, each compared among themselves."""
    return 158, (
        _scale(t, 52, "answer right", {-0.09: "a", -0.01: "a"}, -0.05)
        + _scale(t, 128, "answer wrong", {-0.64: "b", -0.01: "b"}, -0.325)
    )  # fmt: skip


def stratum(t: Theme) -> tuple[int, str]:
    """A group of four, cut by an outcome; one is alone."""
    boxes = [("right, 0.9", "a"), ("right, 0.7", "a"), ("right, 0.6", "a"), ("wrong, 0.1", "b")]
    return 140, (
        text(t, 20, 44, "one prompt", at="start", ink="quiet")
        + "".join(box(t, 130 + 122 * n, 22, 114, words, fill) for n, (words, fill) in enumerate(boxes))
        + line(t, 130, 76, 488, 76) + line(t, 496, 76, 610, 76)
        + text(t, 309, 102, "stratum of three:") + text(t, 309, 124, "compared with each other")
        + text(t, 553, 102, "stratum of one:") + text(t, 553, 124, "credit 0, counted")
    )  # fmt: skip


def stop_credit(t: Theme) -> tuple[int, str]:
    """A completion that ends without its confidence; its last token pays."""
    return 138, (
        text(t, 20, 38, "as asked", at="start", ink="quiet")
        + box(t, 130, 16, 250, "reasoning, answer 42", "a") + box(t, 384, 16, 126, "confidence 0.9", "b")
        + box(t, 514, 16, 46, "end", "b")
        + text(t, 20, 98, "left out", at="start", ink="quiet")
        + box(t, 130, 76, 250, "reasoning, answer 42", "a") + box(t, 384, 76, 46, "end", "b")
        + text(t, 440, 98, "-0.75 on this one token", at="start", bold=True)
    )  # fmt: skip


def step(t: Theme) -> tuple[int, str]:
    """A conversation: prompts and tool output are not trained, what the model samples is."""
    return 124, (
        box(t, 20, 20, 100, "prompt", "no") + box(t, 124, 20, 130, "step 0: search", "a")
        + box(t, 258, 20, 116, "tool output", "no")
        + box(t, 378, 20, 130, "step 1: answer", "a")
        + text(t, 189, 84, "trained", bold=True) + text(t, 443, 84, "trained", bold=True)
        + text(t, 70, 84, "masked", ink="quiet") + text(t, 316, 84, "masked", ink="quiet")
        + text(t, 20, 112, "A step is what the model samples at one go.", at="start", ink="quiet")
    )  # fmt: skip


def trajectory(t: Theme) -> tuple[int, str]:
    """Two trajectories of one prompt: three steps and two, a reward at the end of each."""

    def row(y: float, steps: int, reward: str) -> str:
        boxes = [box(t, 140 + 104 * n, y, 84, f"step {n}", "a") for n in range(steps)]
        arrows = [arrow(t, 226 + 104 * n, y + 17, 240 + 104 * n, y + 17) for n in range(steps)]
        return (
            "".join(boxes)
            + "".join(arrows)
            + text(t, 250 + 104 * (steps - 1), y + 22, f"reward {reward}", at="start", bold=True)
        )

    return 124, (
        text(t, 20, 38, "trajectory 0", at="start", ink="quiet") + row(16, 3, "1")
        + text(t, 20, 98, "trajectory 1", at="start", ink="quiet") + row(76, 2, "0")
    )  # fmt: skip


PICTURES: Mapping[str, Callable[[Theme], tuple[int, str]]] = {
    "block": block, "objective": objective, "baseline": baseline, "given": given, "stratum": stratum,
    "stop-credit": stop_credit, "step": step, "trajectory": trajectory,
}  # fmt: skip


def pictures() -> dict[str, str]:
    """Every picture by the name of its file."""
    svg_by_name = {}
    for name, draw in PICTURES.items():
        for suffix, theme in THEMES.items():
            height, body = draw(theme)
            svg_by_name[f"concepts-{name}{suffix}.svg"] = (
                f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {height}" width="{WIDTH}" height="{height}" '
                'font-family="system-ui, sans-serif" font-size="15">'
                f'<defs><marker id="head" markerWidth="8" markerHeight="8" refX="6" refY="3" orient="auto">'
                f'<path d="M0 0 L7 3 L0 6 z" fill="{theme["ink"]}"/></marker></defs>'
                f'<rect width="{WIDTH}" height="{height}" rx="8" fill="{theme["paper"]}"/>{body}</svg>\n'
            )
    return svg_by_name


if __name__ == "__main__":
    for file, picture in pictures().items():
        (FOLDER / file).write_text(picture, encoding="utf-8")
