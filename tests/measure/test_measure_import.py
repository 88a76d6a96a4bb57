"""What importing `spanwise.measure` needs and loads, in fresh processes."""

from forked import module, run

WITHOUT_SCIPY = "import sys; sys.modules['scipy'] = None\n"


def test_without_scipy_the_rest_works_and_one_sentence_says_what_to_install(tmp_path):
    codes = [
        WITHOUT_SCIPY + "import spanwise, spanwise.credit, spanwise.segment, spanwise.score, spanwise.losses\n"
        "print('so far'); import spanwise.measure",
        WITHOUT_SCIPY + module("spanwise", "report", tmp_path),
        "import sys, spanwise.report; print('scipy.stats' in sys.modules)",
    ]  # fmt: skip
    imported, command, report = map(run, codes)
    assert (imported.returncode, imported.stdout) == (1, "so far\n")
    last = imported.stderr.strip().splitlines()[-1]
    assert last == "ModuleNotFoundError: spanwise.measure needs 'scipy'. Install it with: pip install 'spanwise[measure]'"
    sentence = "Error: spanwise report needs 'scipy'. Install it with: pip install 'spanwise[report]'\n"
    assert (command.returncode, command.stderr) == (1, sentence)
    assert (report.stdout, report.stderr) == ("False\n", "")  # loaded only when it is used
