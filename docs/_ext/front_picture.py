"""The picture of the README, light and dark: `python docs/_ext/front_picture.py` writes it to docs/images.

The second completion of the JSON example in docs/howto/without_a_trainer.md: the city is right, the year is wrong.
"""

from __future__ import annotations

import html
from collections.abc import Mapping, Sequence
from pathlib import Path

FOLDER = Path(__file__).resolve().parent.parent / "images"
_INKS = ("paper", "ink", "quiet", "praise", "blame", "hard")
THEMES: Mapping[str, Mapping[str, str]] = {
    "": dict(zip(_INKS, ("#ffffff", "#1d2430", "#5b6675", "#bcd8f5", "#fbdcb4", "#f0a150"), strict=True)),
    "-dark": dict(zip(_INKS, ("#131416", "#eceff4", "#a9b3c1", "#234a75", "#6f4a17", "#b4600e"), strict=True)),
}
#: Text, part, how the part is coloured on the right.
PIECES = (
    ('{"city": ', "form", "blame"), ('"Rome"', "city", "praise"), (', "year": ', "form", "blame"),
    ("1952", "year", "hard"), ("}", "form", "blame"),
)  # fmt: skip
WIDTH, HEIGHT, CELL = 650, 132, 9.0
Theme = Mapping[str, str]


def words(theme: Theme, x: float, y: float, said: str, *, ink: str = "ink", at: str = "middle", bold: bool = False) -> str:
    """Words, their baseline at y."""
    weight = ' font-weight="600"' if bold else ""
    return f'<text x="{x:g}" y="{y:g}" text-anchor="{at}" fill="{theme[ink]}"{weight}>{said}</text>'


def completion(theme: Theme, x: float, colours: Sequence[str]) -> str:
    """The completion, a cell behind each of its pieces."""
    shapes = []
    for (piece, _, _), colour in zip(PIECES, colours, strict=True):
        width = len(piece) * CELL
        label = html.escape(piece).replace(" ", "&#160;")
        shapes.append(
            f'<rect x="{x:g}" y="40" width="{width:g}" height="34" fill="{theme[colour]}"/>'
            f'<text x="{x:g}" y="62" class="code" textLength="{width:g}" fill="{theme["ink"]}">{label}</text>'
        )
        x += width
    return "".join(shapes)


def picture(theme: Theme) -> str:
    """One colour on the left, three on the right, and what they stand for."""
    left, right = 20.0, 350.0
    sizes = [len(piece) for piece, _, _ in PIECES]
    middle = [right + CELL * (sum(sizes[:n]) + size / 2) for n, size in enumerate(sizes)]
    whole = left + CELL * sum(sizes) / 2
    body = [
        words(theme, left, 26, "one number", ink="quiet", at="start"),
        words(theme, right, 26, "a number for each part", ink="quiet", at="start"),
        completion(theme, left, ["blame"] * len(PIECES)),
        completion(theme, right, [colour for _, _, colour in PIECES]),
        words(theme, whole, 98, "\u22120.25", bold=True),
        words(theme, whole, 118, "everything is blamed", ink="quiet"),
    ]
    for n, number in ((0, "\u22120.25"), (1, "+0.50"), (3, "\u22120.75")):
        body += [words(theme, middle[n], 98, number, bold=True), words(theme, middle[n], 118, PIECES[n][1], ink="quiet")]
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {HEIGHT}" width="{WIDTH}" height="{HEIGHT}" '
        'font-family="system-ui, sans-serif" font-size="15">'
        "<style>.code{font-family:ui-monospace,Menlo,Consolas,monospace}</style>"
        f'<rect width="{WIDTH}" height="{HEIGHT}" fill="{theme["paper"]}"/>{"".join(body)}</svg>\n'
    )


if __name__ == "__main__":
    for suffix, theme in THEMES.items():
        (FOLDER / f"front{suffix}.svg").write_text(picture(theme), encoding="utf-8")
