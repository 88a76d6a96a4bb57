"""Commands in processes of their own, forked from one that has imported what they all import: an import costs more than they do.

Each command has its own arguments, environment, folder, output and exit status.
"""

import atexit
import gc
import json
import os
import subprocess
import sys
import traceback
from pathlib import Path

_SERVERS: dict[tuple[tuple[str, str], ...], subprocess.Popen] = {}


def run(words, *, environment, scratch):
    """Run `spanwise` with these words; what `subprocess.run` gives.

    Args:
        words: of the command line.
        environment: of the process. Packages read theirs when they are imported, so a server serves one environment: only
            PYTHONPATH (put first on `sys.path`) and SPANWISE_CACHE may differ from call to call.
        scratch: a folder for the output.
    """
    fixed = {k: v for k, v in environment.items() if k not in ("PYTHONPATH", "SPANWISE_CACHE", "PYTEST_CURRENT_TEST")}
    key = tuple(sorted(fixed.items()))
    if key not in _SERVERS or _SERVERS[key].poll() is not None:
        _SERVERS[key] = subprocess.Popen(
            [sys.executable, str(Path(__file__))], env=environment, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )
        atexit.register(_SERVERS[key].kill)
    server = _SERVERS[key]
    out, err = scratch / "stdout", scratch / "stderr"
    asked = {
        "words": [str(word) for word in words], "environment": environment, "folder": str(Path.cwd()), "out": str(out),
        "err": str(err),
    }  # fmt: skip
    print(json.dumps(asked), file=server.stdin, flush=True)
    status = int(server.stdout.readline())
    return subprocess.CompletedProcess(words, status, out.read_text(), err.read_text())


def serve():
    """Answer each line of JSON with the exit status of a fork that ran the command."""
    import spanwise.commands.train.train
    import spanwise.report  # noqa: F401
    from spanwise.cli import main

    gc.freeze()

    for line in sys.stdin:
        child = os.fork()
        if child == 0:
            asked = json.loads(line)
            become(asked)
            ended(main, asked["words"])
        print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]), flush=True)


def ended(main, words):
    """Run it and end as a process does, but for taking every imported module apart, which takes seconds."""
    status = 0
    try:
        main(words)
    except SystemExit as error:
        status = error.code if isinstance(error.code, int) else int(error.code is not None)
        if isinstance(error.code, str):
            print(error.code, file=sys.stderr)
    except BaseException:
        traceback.print_exc()
        status = 1
    atexit._run_exitfuncs()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(status)


def become(asked):
    """Take the environment, the folder and the output that were asked for."""
    os.environ.clear()
    os.environ.update(asked["environment"])
    os.chdir(asked["folder"])
    sys.argv = ["spanwise", *asked["words"]]
    sys.path[:0] = [part for part in asked["environment"].get("PYTHONPATH", "").split(os.pathsep) if part not in sys.path]
    for number, (name, flags) in enumerate(
        [(os.devnull, os.O_RDONLY), *((asked[one], os.O_WRONLY | os.O_CREAT | os.O_TRUNC) for one in ("out", "err"))]
    ):
        os.dup2(os.open(name, flags, 0o644), number)


if __name__ == "__main__":
    serve()
