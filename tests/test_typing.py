"""What a type checker says of users' code: the types that are promised, and the mistakes that must be reported."""

import json
import re
import subprocess
import sys
from pathlib import Path

import pytest

from installed import installed

ROOT = Path(__file__).resolve().parents[1]
CODE = Path(__file__).with_name("typed") / "user_code.py"
# The test module is called as the thing it tests, not as the standard library's.
pytestmark = pytest.mark.skipif(not installed("pyright"), reason="pyright is of the dev group")


def pyright(folder, text):
    """The rules that pyright reports of a file with this text, with their lines."""
    (folder / "user_code.py").write_text(text)
    settings = {
        "extraPaths": [str(ROOT / "src")],
        "reportUnnecessaryTypeIgnoreComment": "error",
        "typeCheckingMode": "standard",
    }
    (folder / "pyrightconfig.json").write_text(json.dumps(settings))
    command = [sys.executable, "-m", "pyright", "--outputjson", "--pythonpath", sys.executable, "-p", str(folder)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    found = json.loads(done.stdout)["generalDiagnostics"]
    return [(one["range"]["start"]["line"], one.get("rule", one["message"])) for one in found if one["severity"] == "error"]


def test_right_code_passes_and_every_mistake_is_reported(tmp_path):
    assert pyright(tmp_path, CODE.read_text()) == []


def test_without_the_comments_each_mistake_is_an_error(tmp_path):
    text = CODE.read_text()
    wrong = [number for number, line in enumerate(text.splitlines()) if "pyright: ignore" in line]
    found = {line for line, _ in pyright(tmp_path, re.sub(r"  # pyright: ignore.*", "", text))}
    assert found == set(wrong)
    assert len(wrong) >= 10
