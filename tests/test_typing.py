"""What a type checker says of users' code: the types that are promised, and the mistakes that must be reported."""

import json
import re
import subprocess
import sys
from pathlib import Path

import pytest

from installed import installed
from pages import ROOT

CODE = Path(__file__).with_name("typed") / "user_code.py"
pytestmark = [pytest.mark.skipif(not installed("pyright"), reason="pyright is of the dev group"), pytest.mark.long]


@pytest.mark.timeout(1800)
def test_right_code_passes_and_every_mistake_is_reported(tmp_path):
    """What pyright reports of the code, and of the code without its comments."""
    text = CODE.read_text()
    (tmp_path / "commented.py").write_text(text)
    (tmp_path / "bare.py").write_text(re.sub(r"  # pyright: ignore.*", "", text))
    settings = {"extraPaths": [str(ROOT / "src")], "typeCheckingMode": "standard"}
    settings |= {"reportUnnecessaryTypeIgnoreComment": "error"}
    (tmp_path / "pyrightconfig.json").write_text(json.dumps(settings))
    command = [sys.executable, "-m", "pyright", "--outputjson", "--pythonpath", sys.executable, "-p", str(tmp_path)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    errors = [entry for entry in json.loads(done.stdout)["generalDiagnostics"] if entry["severity"] == "error"]
    assert [error for error in errors if Path(error["file"]).stem == "commented"] == []
    wrong = {number for number, line in enumerate(text.splitlines()) if "pyright: ignore" in line}
    assert {error["range"]["start"]["line"] for error in errors} == wrong
    assert len(wrong) >= 10
