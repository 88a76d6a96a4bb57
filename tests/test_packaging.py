"""What is handed to an index: the contents of wheel and sdist, and the long description as it will be shown."""

import re
import subprocess
import sys
import tarfile
import tomllib
import zipfile
from email import message_from_string
from pathlib import Path

import pytest
import yaml

import spanwise
from installed import installed
from pages import ROOT

PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
TOOLS = ("build", "hatch-fancy-pypi-readme", "twine")
tools = pytest.mark.skipif(not all(map(installed, TOOLS)), reason="they are of the group dist")


def built(source, out, *kinds):
    command = [sys.executable, "-m", "build", "--no-isolation", *kinds, "--outdir", str(out), str(source)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    return out


@pytest.fixture(scope="module")
def dist(tmp_path_factory):
    return built(ROOT, tmp_path_factory.mktemp("dist"), "--wheel", "--sdist")


def contents(path):
    with zipfile.ZipFile(path) as archive:
        return {name: archive.read(name) for name in archive.namelist()}


@pytest.fixture(scope="module")
def wheel(dist):
    return contents(*dist.glob("*.whl"))


@tools
@pytest.mark.long
def test_the_wheel_holds_the_package_and_nothing_else(wheel):
    info, source = f"spanwise-{spanwise.__version__}.dist-info/", ROOT / "src"
    files = [path for path in (source / "spanwise").rglob("*") if path.is_file() and "__pycache__" not in path.parts]
    package = {path.relative_to(source).as_posix() for path in files}
    assert {name for name in wheel if not name.startswith(info)} == package
    assert {name.removeprefix(info) for name in wheel if name.startswith(info)} == {
        "METADATA", "WHEEL", "RECORD", "entry_points.txt", "licenses/LICENSE",
    }  # fmt: skip
    # What is not Python, by kind: were one left out of the sources as well, the comparison above would not see it.
    assert {"spanwise/py.typed", "spanwise/.agents/skills/spanwise/SKILL.md"} <= set(wheel)
    assert {Path(name).suffix for name in package} >= {".py", ".typed", ".md", ".css", ".js", ".j2"}
    assert sum(len(content) for name, content in wheel.items() if "/tasks/starts/" not in name) < 4_000_000


@tools
@pytest.mark.long
def test_the_sdist_holds_what_the_repository_holds_and_builds_the_same_wheel(dist, wheel, tmp_path):
    (path,) = dist.glob("*.tar.gz")
    with tarfile.open(path) as archive:
        sdist = {member.name.partition("/")[2] for member in archive if member.isfile()}
        archive.extractall(tmp_path, filter="data")
    assert contents(*built(next(tmp_path.iterdir()), tmp_path / "dist", "--wheel").glob("*.whl")) == wheel
    listed = ["git", "ls-files", "--cached", "--others", "--exclude-standard"]
    git = subprocess.run(listed, cwd=ROOT, capture_output=True, text=True, check=False)
    if git.returncode:
        pytest.skip(f"there is no repository to compare with: {git.stderr}")
    assert sdist - set(git.stdout.split("\n")) == {"PKG-INFO"}
    assert {"LICENSE", "README.md", "CHANGELOG.md", "pyproject.toml", "tests/test_packaging.py"} <= sdist
    assert not any(name.startswith(("runs/", "dist/", ".venv")) for name in sdist)


@tools
@pytest.mark.long
def test_an_index_renders_the_description_and_no_link_is_dead(dist, wheel):
    command = [sys.executable, "-m", "twine", "--no-color", "check", "--strict", *map(str, dist.iterdir())]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.count("PASSED") == 2
    metadata = message_from_string(wheel[f"spanwise-{spanwise.__version__}.dist-info/METADATA"].decode())
    text = str(metadata.get_payload())
    links = re.findall(r"\]\(([^)]*)\)|src=\"([^\"]*)\"|href=\"([^\"]*)\"", text)
    assert all("".join(link).startswith("https://") for link in links), links
    assert "# spanwise" in text
    assert metadata["License-Expression"] == "Apache-2.0"


def test_the_extras_name_each_other_and_nothing_that_is_not_there():
    extras = PROJECT["optional-dependencies"]
    needs = " ".join(need for name in extras for need in extras[name])
    assert {name for inner in re.findall(r"spanwise\[([\w,]+)\]", needs) for name in inner.split(",")} <= set(extras)


def test_the_citation_has_what_the_format_asks_for_and_our_version_and_licence():
    """The required fields of Citation File Format 1.2.0, its types, and people and entities told apart."""
    cited = yaml.safe_load((ROOT / "CITATION.cff").read_text())
    assert PROJECT["version"] == spanwise.__version__ == cited["version"]
    assert PROJECT["license"] == cited["license"]
    paper = cited["preferred-citation"]
    assert {"cff-version", "message", "title", "authors"} <= set(cited)
    assert {"type", "title", "authors"} <= set(paper)
    assert (cited["cff-version"], cited["type"], paper["type"]) == ("1.2.0", "software", "article")
    assert all(set(author) == {"name"} for author in cited["authors"])
    assert all(set(author) == {"family-names", "given-names"} for author in paper["authors"])
    assert paper["url"].endswith(paper["identifiers"][0]["value"].removeprefix("arXiv:"))
