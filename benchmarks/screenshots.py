"""The pictures of the README, docs/report.md and docs/report_album.md: small fixed runs, their pages in headless Chromium.

    make screenshots            # trains what is missing under runs/screenshots, then writes docs/images
    python benchmarks/screenshots.py --only report-compare-dark token-view-dark
    python benchmarks/screenshots.py --only --before f0575393   # the album: each page of that commit and of now

Everything is seeded: the same versions give the same pictures. The runs are kept, so a second call takes minutes only. Two arms of
two dozen steps are enough for a comparison in which one of them collapses. The pictures are no evidence of anything else.
"""

from __future__ import annotations

import argparse
import io
import os
import shutil
import subprocess
import sys
import tarfile
import time
from dataclasses import dataclass, replace
from pathlib import Path

from PIL import Image

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT / "tests"))  # the browser of the tests: one way to open a page

RUNS, IMAGES = Path("runs/screenshots"), ROOT / "docs" / "images"
SMALL = ("prompts=16", "group_size=8", "keep_rollouts=1")
#: Folder -> the command that makes it.
MADE: dict[str, list[str]] = {
    "train": ["train", "--seed", "0", "--steps", "60", "--eval-every", "20"],
    "compare": ["compare", "--arms", "outcome,rlcr", "--seeds", "0,1,2", "--processes", "1"]
    + [
        part
        for field in ("start=hard", "calibration=log_score", "steps=24", "eval_every=12", *SMALL)
        for part in ("--set", field)
    ],
    "fidelity": ["fidelity", str(RUNS / "train"), "--prompts", "64", "--samples", "16", "--rerolls", "16"],
    "credit": ["credit", str(RUNS / "train")],
    "letters": ["train", "--method", "bae", "--steps", "24", "--eval-every", "0"]
    + [
        part
        for field in (
            "task=invoices",
            "learning_rate=0.0003",
            "warmup_steps=0",
            "entropy=0.0",
            "entropy_target=null",
            "prompts=8",
            "group_size=8",
            "keep_rollouts=24",
            "eval_prompts=16",
            "eval_samples=1",
        )
        for part in ("--set", field)
    ],
}
COLOURS = 224


@dataclass(frozen=True)
class Shot:
    """One picture.

    Attributes:
        name: of the file, without its ending.
        run: whose page.
        width: of the window in CSS pixels.
        height: how much of the page.
        dark: the colour scheme.
        at: the id of the section to show, or a completion (token-49); the top of the page by default.
    """

    name: str
    run: str
    width: int = 1440
    height: int = 900
    dark: bool = False
    at: str = ""


SHOTS = (
    Shot("report-train", "train", height=1150),
    Shot("report-train-phone", "train", width=375, height=1000),
    Shot("report-compare-dark", "compare", height=1000, dark=True),
    Shot("report-compare-phone-dark", "compare", width=375, height=1000, dark=True),
    Shot("report-fidelity", "fidelity", height=1000),
    Shot("token-view-dark", "train", height=1000, dark=True, at="tokens"),
    Shot("letter", "letters", width=1060, height=900, at="token-49"),
    Shot("letter-dark", "letters", width=1060, height=900, dark=True, at="token-49"),
)
#: The pages of the album and how they are shown: at a desk and on a phone, light and dark.
ALBUM = (
    Shot("train", "train"),
    Shot("compare", "compare"),
    Shot("fidelity", "fidelity"),
    Shot("credit", "credit", at="tokens"),
)
DESK, PHONE, GAP = (1440, 1300), (375, 1000), 20


def make_runs(wanted: set[str]) -> None:
    """Train, compare and measure what is wanted and not there yet; a page older than the code of the reports is written anew."""
    changed = max(
        file.stat().st_mtime
        for file in (ROOT / "src" / "spanwise" / "report").rglob("*")
        if "__pycache__" not in str(file) and file.is_file()
    )
    if wanted & {"fidelity", "credit"}:
        wanted = wanted | {"train"}
    for name, command in MADE.items():
        if name not in wanted:
            continue
        folder, spanwise = RUNS / name, [sys.executable, "-m", "spanwise.cli"]
        page = folder / "report.html"
        if not page.is_file():
            subprocess.run([*spanwise, *command, "--output", str(folder)], check=True)
        elif page.stat().st_mtime < changed:
            subprocess.run([*spanwise, "report", str(folder)], check=True)


def take(shots: tuple[Shot, ...]) -> None:
    """Open each page and write its picture."""
    import tempfile

    from browser import opened

    with tempfile.TemporaryDirectory() as folder, opened(Path(folder)) as browser:
        for shot in shots:
            path = IMAGES / f"{shot.name}.png"
            path.write_bytes(squeezed(picture(browser, shot)))
            print(f"{path.relative_to(ROOT)}  {path.stat().st_size / 1000:.0f} kB")


def picture(browser, shot: Shot, runs: Path = RUNS) -> bytes:
    """The page of a run at a place, drawn."""
    browser.show(runs / shot.run / "report.html", width=shot.width, height=shot.height, dark=shot.dark)
    if shot.at.startswith("token-"):
        browser.run("location.hash = arguments[0]", shot.at)
        browser.wait("return document.querySelector('.token-headline').innerText")
        browser.run("document.querySelector('nav').style.display = 'none'")
        browser.run("document.querySelector('.token-headline').scrollIntoView({behavior: 'instant'})")
    elif shot.at:
        browser.run("document.getElementById(arguments[0]).scrollIntoView({behavior: 'instant'})", shot.at)
    browser.wait(
        "return [...document.querySelectorAll('.chart')].every(e => { const r = e.getBoundingClientRect();"
        " return r.top > innerHeight || r.bottom < 0 || e.querySelector('svg path, svg rect'); })",
        seconds=60,
    )
    time.sleep(0.5)  # transitions
    target = Path(browser.folder) / "shot.png"
    browser.picture(target)
    return target.read_bytes()


def squeezed(png: bytes) -> bytes:
    """The same picture with few colours, which is what a page has."""
    with Image.open(io.BytesIO(png)) as image:
        small = image.convert("RGB").quantize(COLOURS, dither=Image.Dither.NONE)
    out = io.BytesIO()
    small.save(out, "PNG", optimize=True)
    return out.getvalue()


def older_pages(commit: str) -> Path:
    """The pages of the same runs as an older commit writes them."""
    place, code = RUNS / "before" / commit, RUNS / "code" / commit
    if not code.is_dir():
        packed = subprocess.run(["git", "archive", "--format=tar", commit, "src"], check=True, capture_output=True, cwd=ROOT)
        with tarfile.open(fileobj=io.BytesIO(packed.stdout)) as archive:
            archive.extractall(code, filter="data")
    spanwise, environment = [sys.executable, "-m", "spanwise.cli"], {**os.environ, "PYTHONPATH": str(code.resolve() / "src")}
    for name in ("train", "compare", "fidelity"):
        if not (place / name).is_dir():
            shutil.copytree(RUNS / name, place / name)
            subprocess.run([*spanwise, "report", str(place / name)], check=True, env=environment)
    if not (place / "credit").is_dir():
        command = ["credit", str(place / "train"), "--output", str(place / "credit")]
        subprocess.run([*spanwise, *command], check=True, env=environment)
    return place


def album(commit: str) -> None:
    """A sheet for each page and width: before and after, light above dark."""
    import tempfile

    from browser import opened

    older = older_pages(commit)
    with tempfile.TemporaryDirectory() as folder, opened(Path(folder)) as browser:
        for shot in ALBUM:
            for name, (width, height), scale in (("desk", DESK, 0.5), ("phone", PHONE, 0.8)):
                at = replace(shot, width=width, height=height)
                pictures = [
                    picture(browser, replace(at, dark=dark), runs) for dark in (False, True) for runs in (older, RUNS)
                ]
                path = IMAGES / "album" / f"{shot.name}-{name}.webp"
                path.parent.mkdir(exist_ok=True)
                sheet(pictures, columns=2 if name == "desk" else 4, scale=scale).save(path, "WEBP", quality=80, method=6)
                print(f"{path.relative_to(ROOT)}  {path.stat().st_size / 1000:.0f} kB")


def sheet(pngs: list[bytes], *, columns: int, scale: float) -> Image.Image:
    """Pictures of one size beside and below each other."""
    pictures = [Image.open(io.BytesIO(png)).convert("RGB") for png in pngs]
    width, height = (round(size * scale) for size in pictures[0].size)
    rows = -(-len(pictures) // columns)
    canvas = Image.new("RGB", (columns * (width + GAP) - GAP, rows * (height + GAP) - GAP), "#808080")
    for i, one in enumerate(pictures):
        small = one.resize((width, height), Image.Resampling.LANCZOS)
        canvas.paste(small, (i % columns * (width + GAP), i // columns * (height + GAP)))
    return canvas


def main() -> None:
    """Read the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", nargs="*", default=[shot.name for shot in SHOTS], help="names of pictures, without .png")
    parser.add_argument("--before", metavar="COMMIT", help="also the album: the pages of this commit beside those of now")
    options = parser.parse_args()
    wanted = options.only
    if unknown := set(wanted) - {shot.name for shot in SHOTS}:
        parser.error(f"there is no picture {', '.join(sorted(unknown))}; there are {', '.join(shot.name for shot in SHOTS)}")
    shots = tuple(shot for shot in SHOTS if shot.name in wanted)
    make_runs({shot.run for shot in (*shots, *(ALBUM if options.before else ()))})
    take(shots)
    if options.before:
        album(options.before)


if __name__ == "__main__":
    main()
