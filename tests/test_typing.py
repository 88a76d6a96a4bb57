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


def diagnostics(folder):
    """What pyright reports of the code, and of the code without its comments: the lines and rules of each."""
    text = CODE.read_text()
    (folder / "commented.py").write_text(text)
    (folder / "bare.py").write_text(re.sub(r"  # pyright: ignore.*", "", text))
    settings = {"extraPaths": [str(ROOT / "src")], "typeCheckingMode": "standard"}
    settings |= {"reportUnnecessaryTypeIgnoreComment": "error"}
    (folder / "pyrightconfig.json").write_text(json.dumps(settings))
    command = [sys.executable, "-m", "pyright", "--outputjson", "--pythonpath", sys.executable, "-p", str(folder)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    reported = {"commented": [], "bare": []}
    for error in json.loads(done.stdout)["generalDiagnostics"]:
        if error["severity"] == "error":
            reported[Path(error["file"]).stem].append((error["range"]["start"]["line"], error.get("rule", error["message"])))
    return reported


@pytest.mark.timeout(1800)
def test_right_code_passes_and_every_mistake_is_reported(tmp_path):
    reported = diagnostics(tmp_path)
    assert reported["commented"] == []
    wrong = [number for number, line in enumerate(CODE.read_text().splitlines()) if "pyright: ignore" in line]
    assert {line for line, _ in reported["bare"]} == set(wrong)
    assert len(wrong) >= 10
