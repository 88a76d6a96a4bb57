"""Methods of other distributions: a real wheel, installed by pip, seen by real processes."""

import os
import subprocess
import sys
import zipfile

import pytest

GOOD = '''
from spanwise import register
from spanwise.credit import dr_grpo

@register("doubled", kind="completion", paper="a test")
def doubled(reward_n, group_n):
    """Give everything twice."""
    return 2 * dr_grpo(reward_n, group_n)
'''
TAKEN = GOOD.replace('"doubled"', '"grpo"')


def wheel(folder, name, code):
    """A wheel with one module and one entry point."""
    path = folder / f"{name}-1.0-py3-none-any.whl"
    info = f"{name}-1.0.dist-info"
    files = {
        f"{name}.py": code,
        f"{info}/METADATA": f"Metadata-Version: 2.1\nName: {name}\nVersion: 1.0\n",
        f"{info}/WHEEL": "Wheel-Version: 1.0\nGenerator: test\nRoot-Is-Purelib: true\nTag: py3-none-any\n",
        f"{info}/entry_points.txt": f"[spanwise.methods]\n{name}_methods = {name}\n",
    }
    files[f"{info}/RECORD"] = "".join(f"{file},,\n" for file in [*files, f"{info}/RECORD"])
    with zipfile.ZipFile(path, "w") as archive:
        for file, text in files.items():
            archive.writestr(file, text)
    return path


@pytest.fixture(scope="module")
def installed(tmp_path_factory):
    """Install the distributions asked for into a folder of their own; returns a runner of `spanwise`."""

    def install(**modules):
        folder, target = tmp_path_factory.mktemp("wheels"), tmp_path_factory.mktemp("site")
        wheels = [str(wheel(folder, name, code)) for name, code in modules.items()]
        pip = [sys.executable, "-m", "pip", "install", "-q", "--no-deps", "--no-index", "--disable-pip-version-check"]
        subprocess.run([*pip, "--target", str(target), *wheels], check=True, capture_output=True)
        environment = {**os.environ, "PYTHONPATH": str(target), "OMP_NUM_THREADS": "1", "COLUMNS": "200"}

        def spanwise(*arguments):
            command = [sys.executable, "-m", "spanwise.cli", *arguments]
            return subprocess.run(command, capture_output=True, text=True, env=environment, check=False)

        return spanwise

    return install


def test_an_installed_method_is_listed_and_found(installed):
    spanwise = installed(extra_credit=GOOD)
    listed = spanwise("methods")
    assert listed.returncode == 0, listed.stderr
    assert "doubled" in listed.stdout
    assert "Give everything twice." in listed.stdout
    shown = spanwise("methods", "doubled")
    assert shown.returncode == 0, shown.stderr
    assert "Give everything twice." in shown.stdout


@pytest.mark.parametrize(
    ("code", "says"),
    [
        ("import no_such_module_anywhere\n", "No module named 'no_such_module_anywhere'"),
        (TAKEN, "There is a method 'grpo' already (spanwise.credit.methods._grpo.grpo)"),
    ],
)
def test_a_broken_plugin_is_named(installed, code, says):
    spanwise = installed(broken_credit=code)
    done = spanwise("methods")
    assert done.returncode == 2
    assert "Traceback" not in done.stderr
    sentence = " ".join((done.stdout + done.stderr).split())
    assert "The plug-in 'broken_credit_methods' (broken_credit) cannot be loaded" in sentence
    assert says in sentence


def test_a_broken_plugin_is_in_the_way_only_of_unknown_names(installed):
    spanwise = installed(broken_credit="raise ValueError('not today')\n")
    unknown = spanwise("methods", "doubled")
    assert "(broken_credit) cannot be loaded: not today." in " ".join((unknown.stdout + unknown.stderr).split())
    assert spanwise("methods", "grpo").returncode == 0
