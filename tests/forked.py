"""Pieces of Python in processes of their own that share one import of torch, which takes longer than all of them."""

import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path

SERVER = """
import json, os, sys, traceback
import torch

def run(code):
    try:
        exec(compile(code, "<string>", "exec"), {"__name__": "__main__"})
    except SystemExit as error:
        if isinstance(error.code, str):
            print(error.code, file=sys.stderr)
        return error.code if isinstance(error.code, int) else int(error.code is not None)
    except BaseException:
        traceback.print_exc()
        return 1
    return 0

folder, *codes = json.load(sys.stdin)
for number, code in enumerate(codes):
    child = os.fork()
    if child == 0:
        for stream, name in ((1, "out"), (2, "err")):
            os.dup2(os.open(f"{folder}/{number}.{name}", os.O_WRONLY | os.O_CREAT), stream)
        status = run(code)
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(status)
    with open(f"{folder}/{number}.status", "w") as file:
        file.write(str(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])))
"""


def run_each(codes, *, python=(sys.executable,), env=None, cwd=None):
    """Run `python -c CODE` for each of the codes; return what `subprocess.run` would."""
    with tempfile.TemporaryDirectory() as folder:
        asked = json.dumps([folder, *codes])
        subprocess.run([*python, "-c", SERVER], input=asked, text=True, env=env or {**os.environ}, cwd=cwd, check=True)
        results = [[Path(folder, f"{n}.{end}").read_text() for end in ("status", "out", "err")] for n in range(len(codes))]
    return [
        subprocess.CompletedProcess(code, int(status), *said) for code, (status, *said) in zip(codes, results, strict=True)
    ]


def module(name, *words):
    """The code of `python -m NAME WORDS`."""
    words = [name, *map(str, words)]
    return f"import runpy, sys\nsys.argv = {words!r}\nrunpy.run_module({name!r}, run_name='__main__', alter_sys=True)"
