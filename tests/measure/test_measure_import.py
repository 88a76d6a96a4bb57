"""What importing `spanwise.measure` needs and loads, in fresh processes."""

import subprocess
import sys

WITHOUT_SCIPY = "import sys; sys.modules['scipy'] = None; "


def python(code):
    return subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)


def test_without_scipy_the_rest_works_and_one_sentence_says_what_to_install():
    done = python(
        WITHOUT_SCIPY + "import spanwise, spanwise.credit, spanwise.segment, spanwise.score, spanwise.losses\n"
        "print('so far'); import spanwise.measure"
    )
    assert (done.returncode, done.stdout) == (1, "so far\n")
    last = done.stderr.strip().splitlines()[-1]
    assert last == "ModuleNotFoundError: spanwise.measure needs 'scipy'. Install it with: pip install 'spanwise[measure]'"


def test_a_command_without_scipy_names_it(tmp_path):
    code = f"sys.argv = ['spanwise', 'report', {str(tmp_path)!r}]; from spanwise.cli import main; main()"
    done = python(WITHOUT_SCIPY + code)
    assert done.returncode == 1
    assert done.stderr == "Error: spanwise report needs 'scipy'. Install it with: pip install 'spanwise[report]'\n"


def test_commands_load_scipys_statistics_only_when_they_use_them():
    done = python("import sys, spanwise.report; print('scipy.stats' in sys.modules)")
    assert (done.stdout, done.stderr) == ("False\n", "")
