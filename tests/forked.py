"""Run pieces of Python in processes that are forked from one with the slow imports done.

Each has its own environment, folder, output and exit status.
"""

import atexit
import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path

SERVER = """
import atexit, gc, json, os, sys, traceback
exec(sys.argv.pop())
gc.freeze()

def become(asked):
    os.environ.clear()
    os.environ.update(asked["environment"])
    os.chdir(asked["cwd"])
    sys.path[:0] = [part for part in os.environ.get("PYTHONPATH", "").split(os.pathsep) if part not in sys.path]
    for stream, flags in ((0, os.O_RDONLY), (1, os.O_WRONLY | os.O_CREAT), (2, os.O_WRONLY | os.O_CREAT)):
        os.dup2(os.open(asked["streams"][stream], flags), stream)

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

for line in sys.stdin:
    child = os.fork()
    if child == 0:
        asked = json.loads(line)
        become(asked)
        status = run(asked["code"])
        atexit._run_exitfuncs()  # an end as a process has it, but for taking every imported module apart, which takes seconds
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(status)
    print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]), flush=True)
"""
_servers: dict[tuple, subprocess.Popen] = {}


def run(code, *, python=(sys.executable,), environment=None, varying=(), cwd=None, imports="import torch"):
    """Run `python -c CODE` where `imports` are done; return what `subprocess.run` would.

    Packages read their environment when they are imported, so a server serves one. `varying` are the variables that may
    change from call to call; PYTHONPATH among them is put first on `sys.path`.
    """
    environment = {**(environment or os.environ)}
    fixed = {name: value for name, value in environment.items() if name not in (*varying, "PYTEST_CURRENT_TEST")}
    key = (*python, imports, *sorted(fixed.items()))
    if key not in _servers or _servers[key].poll() is not None:
        command, pipe = [*python, "-c", SERVER, imports], subprocess.PIPE
        _servers[key] = subprocess.Popen(command, env=environment, stdin=pipe, stdout=pipe, text=True)
        atexit.register(_servers[key].kill)
    server = _servers[key]
    with tempfile.TemporaryDirectory() as folder:
        out, err = Path(folder, "out"), Path(folder, "err")
        streams = [os.devnull, str(out), str(err)]
        asked = {"code": code, "environment": environment, "cwd": str(cwd or Path.cwd()), "streams": streams}
        print(json.dumps(asked), file=server.stdin, flush=True)
        status = int(server.stdout.readline())
        return subprocess.CompletedProcess(code, status, out.read_text(), err.read_text())


def module(name, *words):
    words = [name, *map(str, words)]
    return f"import runpy, sys\nsys.argv = {words!r}\nrunpy.run_module({name!r}, run_name='__main__', alter_sys=True)"
