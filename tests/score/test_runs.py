"""Code and its tests in two processes: tests that right code passes and wrong code fails, and ways to forge their end."""

import textwrap

import pytest

from spanwise.score.rewards import CodeRunner
from spanwise.score.worker import run
from spanwise.score.workers import Verdict
from spanwise.types import Status

LIMITS = {"deadline": 5.0, "clock": 20.0, "memory": 2**30}

#: Tests, right code, and wrong code.
HONEST = {
    "asserts": ("assert f(2) == 4\nassert f(3) == 9", "f = lambda n: n * n", "f = lambda n: n + 2"),
    "a candidate": (
        "def check(candidate):\n    assert candidate([1, 2]) == [2, 3], 'wrong'\n    assert not candidate([])\ncheck(f)",
        "def f(a):\n    return [one + 1 for one in a]",
        "def f(a):\n    return a",
    ),
    "an object with a state": (
        "c = C(most=1)\nc.put(1, 2)\nassert c.get(1) == 2\nc.put(3, 4)\nassert c.get(1) is None and len(c) == 1 and 3 in c",
        "class C:\n    def __init__(self, most: int): self.most, self.all = most, {}\n"
        "    def put(self, key, value):\n        if len(self.all) >= self.most: self.all.popitem()\n        self.all[key] = value\n"
        "    def get(self, key): return self.all.get(key)\n    def __len__(self): return len(self.all)\n"
        "    def __iter__(self): return iter(self.all)",
        "class C(dict):\n    def __init__(self, most): pass\n    put = dict.__setitem__",
    ),
    "objects that lead to others": (
        "a = N([3, 2, 1])\nfound = []\nwhile a:\n    found.append(a.value)\n    a = a.next\nassert found == [3, 2, 1]",
        "class N:\n    def __init__(self, a): self.value, self.next = a[0], N(a[1:]) if a[1:] else None",
        "class N:\n    def __init__(self, a): self.value, self.next = a[0], None",
    ),
    "sorting in place": ("a = [3, 1, 2]\nf(a)\nassert a == [1, 2, 3]", "def f(a): a.sort()", "def f(a): return sorted(a)"),
    "a generator": (
        "assert list(f(3)) == [0, 1, 2]\ng = f(2)\nassert next(g) == 0 and next(g) == 1\nassert next(g, None) is None",
        "def f(n):\n    yield from range(n)",
        "def f(n):\n    yield from range(n + 1)",
    ),
    "an exception": (
        "try:\n    f(-1)\nexcept ValueError as error:\n    assert 'negative' in str(error)\nelse:\n    assert False",
        "def f(n):\n    if n < 0: raise ValueError('negative')",
        "def f(n):\n    if n < 0: raise TypeError('negative')",
    ),
    "an exception of the code": (
        "try:\n    f(5)\n    raise AssertionError\nexcept Short as error:\n    assert error.lacks == 5",
        "class Short(Exception):\n    def __init__(self, lacks):\n        self.lacks = lacks\ndef f(n): raise Short(n)",
        "class Short(Exception): pass\ndef f(n): raise KeyError(n)",
    ),
    "a module of the code": (
        "assert math.isclose(f(), math.pi)",
        "import math\nf = lambda: math.pi",
        "import math\nf = lambda: 3",
    ),
    "an array": ("assert (f([1, 2]) == [2, 4])", "import numpy\nf = lambda a: 2 * numpy.array(a)", "f = lambda a: 2 * a"),
    "functions both ways": ("assert f(lambda n: n + 1)(3) == 5", "def f(g): return lambda n: g(g(n))", "def f(g): return g"),
    "what an object says of itself": (
        "assert repr(f(1)) == 'P1' and str(f(2)) == 'P2' and f(1) == f(1) and len({f(1), f(1)}) == 1 and not callable(f(1))",
        "from dataclasses import *\n@dataclass(frozen=True)\n"
        "class P:\n    x: int\n    __repr__ = lambda self: f'P{self.x}'\nf = P",
        "class P:\n    def __init__(self, x): pass\n    __repr__ = lambda self: 'P1'\nf = P",
    ),
    "a name that Python has": ("assert sum([1, 2]) == 3 and len([1]) == 1", "", "def sum(a): return 4"),
    "private names of an object": (
        "a = f()\nassert a._connection == 'sqlite' and a._line == 'L' and a._number == 7",
        "class Db: _connection, _line, _number = 'sqlite', 'L', 7\nf = Db",
        "class Db: _connection, _line, _number = 'sqlite', 'L', 8\nf = Db",
    ),
    "unittest": (
        "import unittest\nclass T(unittest.TestCase):\n    def test(self):\n        self.assertEqual(f(2), 4)\n"
        "        with self.assertRaises(ZeroDivisionError):\n            f(0)\nunittest.main()",
        "def f(n): return 8 // n",
        "def f(n): return 4",
    ),
}


#: One case of each kind; each case starts processes, so `make test-long` runs the others.
OFTEN = ("asserts", "an exception", "unittest", "f() == 5", "its frames", "its sign", "_exit", "no end", "unittest patched")


def cases(names):
    return [name if name in OFTEN else pytest.param(name, marks=pytest.mark.long) for name in names]


@pytest.mark.parametrize("case", cases(HONEST))
def test_right_code_passes_its_tests_and_wrong_code_fails_them(case):
    tests, right, wrong = HONEST[case]
    assert run(right, tests, **LIMITS) is True
    assert run(wrong, tests, **LIMITS) is False


# An object that agrees with everything, and is handed out by `f`.
FRIEND = """
class Friend:
    value = 2
    def __getattr__(self, name): return self
    def __call__(self, *a, **k): return self
    def __len__(self): return 2
    def __iter__(self): return iter((self, self))
    def __hash__(self): return 3
    def __int__(self): return 2
    __index__ = __trunc__ = __round__ = __int__
    def __float__(self): return 2.0
def yes(*a): return True
def same(self, *a): return self
for name in "eq ne lt le gt ge contains instancecheck subclasscheck".split():
    setattr(Friend, f"__{name}__", yes)
for name in "add sub mul truediv floordiv mod pow matmul and or xor lshift rshift".split():
    for kind in ("", "r", "i"):
        setattr(Friend, f"__{kind}{name}__", same)
for name in "abs neg pos invert getitem enter".split():
    setattr(Friend, f"__{name}__", same)
f = lambda *a: Friend()
"""
EVERY_END = """
import os
def everywhere(text):
    for end in range(64):
        try:
            os.set_blocking(end, False)
            os.write(end, text)
        except OSError:
            pass
"""
A_CASE = """
import unittest
class T(unittest.TestCase):
    def test(self): self.assertEqual(f(), 5)
unittest.main()
"""
#: Writes to every open file what it reads there, or finds in the frames around it.
ITS_FRAMES = """
import sys
frame = sys._getframe()
while frame:
    for value in [*frame.f_locals.values(), *frame.f_globals.values(), *frame.f_code.co_consts]:
        if isinstance(value, bytes):
            everywhere(value)
    frame = frame.f_back
f = int
"""
ITS_SIGN = """
for end in range(3, 64):
    try:
        os.set_blocking(end, False)
        everywhere(os.read(end, 64))
    except OSError:
        pass
os._exit(0)
"""
A_THREAD = """
import builtins, threading
def late():
    builtins.exec = builtins.compile = lambda *a: None
threading.Thread(target=late).start()
f = int
"""
#: Assertions about the friend, none of which it may pass.
OF_A_FRIEND = [
    "abs(f(2) - 5) < 1e-3", "abs(5 - f(2)) < 1e-3", "f() < 5", "4 <= f() <= 5", "f() == 5", "5 == f()", "not f()", "f() is True",
    "len(f()) == 3", "(lambda a: f(a) == [2 * one for one in a])([1, 2])", "f()[0] == 5", "f().value.total() == 5", "f() in (4, 5)",
    "5 in f()", "f() in {3}", "__import__('math').isclose(f(), 5)", "sorted(f()) == [4, 5]", "isinstance(f(), int)",
    "f().startswith('a')", "f().issuperset({5})",
]  # fmt: skip
#: Code that must not pass `assert f() == 5`.
NO_FIVE = {
    "an int that equals all": "class I(int):\n    __eq__ = __lt__ = lambda *a: True\nf = lambda: I(3)",
    "AssertionError": "import builtins\nclass AssertionError(Exception): pass\nbuiltins.AssertionError = SystemExit\nf = int",
    "_exit": "import os\nf = lambda: os._exit(0)",
    "_exit at the end": "import atexit, os\natexit.register(os._exit, 0)\nf = int",
    "_exit at once": "import os\nos._exit(0)",
    "excepthook": "import sys, os\nsys.excepthook = lambda *a: os._exit(0)\nf = int",
    "compile": "import builtins\nreal = compile\nbuiltins.compile = lambda *a, **k: real('', 'tests', 'exec')\nf = int",
    "names of the harness": (
        "import __main__\nfor name in list(vars(__main__)):\n    vars(__main__)[name] = lambda *a: None\nf = int"
    ),
    "its frames": EVERY_END + ITS_FRAMES,
    "its sign": EVERY_END + ITS_SIGN,
    "a thread": A_THREAD,
    "sys.exit": "import sys\nf = lambda: sys.exit(0)",
    "SystemExit of its own": "class E(SystemExit): code = 0\ndef f(): raise E(0)",
    "garbage": EVERY_END + "everywhere(b'\\xff{}[\\n' * 99)\nf = lambda: 4",
    "a reply that was not asked for": (
        EVERY_END + "everywhere(b'[\"ready\"]\\n' + b'[\"reply\", null, true, []]\\n' * 9)\nf = lambda: 4"
    ),
    "an object that was never sent": EVERY_END + 'f = lambda: everywhere(b\'["reply", null, ["yours", 1], []]\\n\')',
    "a constructor that is none": EVERY_END + 'f = lambda: everywhere(b\'["reply", null, ["eval", "5"], []]\\n\')',
    "an endless reply": "f = lambda: 'a' * 2**28",
    "no end": "def f():\n    while True: pass",
    "deep values": "def f():\n    a = []\n    for _ in range(10**5): a = [a]\n    return a",
}
#: Code, and tests that it must not pass.
FORGED = {
    **{comparison: (FRIEND, f"assert {comparison}") for comparison in OF_A_FRIEND},
    **{name: (code, "assert f() == 5") for name, code in NO_FIVE.items()},
    "unittest": (FRIEND, A_CASE),
    "nearly, in unittest": (FRIEND, A_CASE.replace("Equal", "AlmostEqual")),
    "unittest of its own": ("class unittest:\n    class TestCase: pass\n    main = print\nf = int", A_CASE),
    "SkipTest": ("import unittest\ndef f(): raise unittest.SkipTest('no')", A_CASE),
    "a text that equals all": ("class S(str):\n    __eq__ = lambda *a: True\nf = lambda: S('a')", "assert f() == 'b'"),
    "a list that equals all": ("class L(list):\n    __eq__ = lambda *a: True\nf = L", "assert f() == [1]"),
    "builtins": (
        "import builtins\nfor name in ('abs', 'all', 'len', 'isinstance', 'sorted', 'sum', 'set'):\n"
        "    setattr(builtins, name, lambda *a, **k: 0)\nabs = len = lambda *a: 0\nf = lambda n: n",
        "assert abs(f(2) - 5) < 1e-3",
    ),
    "unittest patched": (
        "import unittest\nunittest.TestCase.assertEqual = unittest.TestCase.run = unittest.main = lambda *a, **k: None\nf = int",
        A_CASE,
    ),
    "a fault that is caught": (
        "def f(check):\n    try: check(3)\n    except BaseException: pass",
        "def check(n): assert n == 5\nf(check)",
    ),
    "endless members": ("import itertools\nf = itertools.count", "assert list(f()) == [5]"),
    "deep calls": ("def f(g, n): return g(g, n)", "def g(g, n): return f(g, n + 1)\nassert f(g, 0) == 5"),
    "the tests' names": (
        "def f(g):\n    g.__globals__['f'] = g.__self__ = None\n    return 5",
        "def g(): pass\nassert f(g) == 5",
    ),
}


@pytest.mark.parametrize("case", cases(FORGED))
def test_code_cannot_judge_itself(case):
    code, tests = FORGED[case]
    assert run(code, tests, **{**LIMITS, "deadline": 1.0, "clock": 10.0}) is False


def test_a_verdict_that_the_code_writes_into_the_pipe_of_the_worker_is_none():
    code = """
    import os
    for end in os.listdir(f"/proc/{os.getppid()}/fd"):
        try:
            pipe = os.open(f"/proc/{os.getppid()}/fd/{end}", os.O_WRONLY | os.O_NONBLOCK)
            os.write(pipe, b'{"value": true}\\n')
        except OSError:
            pass
    """
    with CodeRunner(workers=1, deadline=5.0) as runner:
        forged, right = runner.check([(textwrap.dedent(code), "assert f() == 5"), ("f = lambda: 5", "assert f() == 5")])
    assert (forged.status, forged.value, right) == (Status.BROKE, 0.0, Verdict(Status.OK, 1.0))
