"""The process that starts programs: one JSON line with code and tests in, one JSON line out, until its input closes.

It is run by path and imports nothing of this package; `workers.py` starts it. Each program is a process of its own, in an empty
folder, in a session of its own, which is killed as a whole when the program ends, and without this process's environment.
"""

import json
import math
import os
import secrets
import signal
import subprocess
import sys
import tempfile
from contextlib import suppress
from pathlib import Path

# Code and tests are compiled one by one: what the code leaves open (a quote, a bracket) cannot swallow the tests.
_PROGRAM = """\
import os
space = {{"__name__": "__main__"}}
exec(compile({code}, "completion", "exec"), space)
exec(compile({tests}, "tests", "exec"), space)
os.write({end}, {sign})
"""
_FILE_BYTES = 2**26


def run(code: str, tests: str | None, *, deadline: float, clock: float, memory: int) -> bool:
    """Whether the code, and the tests after it, come to their end and exit with 0."""
    sign = secrets.token_bytes(8)
    read, write = os.pipe()
    try:
        with tempfile.TemporaryDirectory(prefix="spanwise-", ignore_cleanup_errors=True) as folder:
            program = Path(folder, "program.py")
            program.write_text(_PROGRAM.format(code=ascii(code), tests=ascii(tests or ""), end=write, sign=sign))
            process = subprocess.Popen(
                [sys.executable, "-I", "-B", str(program)],
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                stderr=subprocess.DEVNULL,
                cwd=folder,
                env={"PATH": os.environ.get("PATH", os.defpath), "HOME": folder, "TMPDIR": folder, "LANG": "C.UTF-8"},
                pass_fds=(write,),
                start_new_session=True,
                preexec_fn=lambda: _limit(deadline, clock, memory),
            )
            try:
                with suppress(subprocess.TimeoutExpired):
                    process.wait(clock)
            finally:
                with suppress(ProcessLookupError, PermissionError):
                    os.killpg(process.pid, signal.SIGKILL)  # what it started and left behind, too
                ended = process.wait()
        os.set_blocking(read, False)
        with suppress(BlockingIOError):
            return ended == 0 and (tests is None or sign in os.read(read, 4096))
        return False
    finally:
        os.close(read)
        os.close(write)


def _limit(deadline: float, clock: float, memory: int) -> None:
    """In the new process: what ends it even if nobody is left to watch it."""
    import resource

    seconds = math.ceil(deadline)
    limits = {resource.RLIMIT_CPU: seconds, resource.RLIMIT_FSIZE: _FILE_BYTES, resource.RLIMIT_CORE: 0}
    if memory:
        limits[resource.RLIMIT_AS] = memory
    for name, most in limits.items():
        hard = resource.getrlimit(name)[1]
        most = most if hard == resource.RLIM_INFINITY else min(most, hard)
        resource.setrlimit(name, (most, most))
    signal.setitimer(signal.ITIMER_PROF, deadline)
    signal.setitimer(signal.ITIMER_REAL, clock)


def main() -> None:
    """Start one program, say so, then answer line by line."""
    deadline, memory = float(sys.argv[1]), int(sys.argv[3])
    clock = 4 * deadline + 5.0  # less than the patience of who started this process
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    print(json.dumps({"value": run("", None, deadline=30.0, clock=60.0, memory=0)}), flush=True)
    for line in sys.stdin:
        code, tests = json.loads(line)
        try:
            reply = {"value": run(code, tests, deadline=deadline, clock=clock, memory=memory)}
        except (OSError, subprocess.SubprocessError) as error:  # no process, no folder: not the doing of the code
            reply = {"error": f"{type(error).__name__}: {error}"[:300]}
        print(json.dumps(reply), flush=True)


if __name__ == "__main__":
    main()
