"""The segmenter `code`: hand-worked completions, and Python's own parser for where things lie."""

import ast
import random

import pytest

from segment_small import claims_in
from spanwise.layout import Layout
from spanwise.types import Fault


def claims_of(text, blocks, most=16):
    """Return (block, claimed text, inner text) of each claim in order, and the faults."""
    layout = Layout({**blocks, "rest": []}, most=most)
    claims, fault = claims_in(layout, text)
    return [(layout.names[claim.part.block], claimed, content) for claim, claimed, content in claims], fault


FENCED = "So:\n```python\nimport os\nx = 1\n```\nand\n~~~ js\nlet y;\n~~~\n"
FENCE = "```python\nimport os\nx = 1\n```\n"


def test_fences():
    claims, fault = claims_of(FENCED, {"a": "code:fence", "b": "code:fence"})
    assert claims == [("a", FENCE, "import os\nx = 1\n"), ("b", "~~~ js\nlet y;\n~~~\n", "let y;\n")]
    assert fault == 0
    assert claims_of(FENCED, {"a": "code:fence"}) == (claims[:1], Fault.DUPLICATE)
    assert claims_of(FENCED, {"a[*]": "code:fence"}, most=1)[1] == Fault.MORE
    assert [block for block, _, _ in claims_of(FENCED, {"a": "code:fence[*]"})[0]] == ["a", "a"]
    assert claims_of("```\nx = (\n``\n", {"a": "code:fence"}) == ([("a", "```\nx = (\n``\n", None)], Fault.TRUNCATED)
    text = "1. so\n   ````md\n   ```\n     x\n y\n   ```\n   ````\n"  # fences inside one in a list
    # CommonMark takes as much space from each line as stands before the fence.
    assert claims_of(text, {"a": "code:fence"})[0] == [("a", text[6:], "```\n  x\ny\n```\n")]


def test_statements_stand_in_fences_of_their_language_or_of_none():
    text = FENCED + "```\ny = 2\n```\n```c\nz = 3;\n```\n"
    assert [code for _, code, _ in claims_of(text, {"s[*]": "code:python.statement"})[0]] == ["import os", "x = 1", "y = 2"]
    statements = [("s[0]", "x = 1", "x = 1"), ("s[1]", "y = x", "y = x")]
    assert claims_of("x = 1\ny = x", {"s[*]": "code:python.statement"}) == (statements, Fault.NONE)
    assert claims_of("So:\n```c\nint x;\n```", {"s[*]": "code:python.statement"}) == ([], Fault.NONE)
    loop = "for x in y: z()"  # a node type of the grammar
    assert [code for _, code, _ in claims_of(loop, {"a": "code:python.for_statement"})[0]] == [loop]


def test_the_mark_that_is_named_first_has_what_two_match():
    text = "def f(): pass\nx = 1"
    blocks = {"f[*]": "code:python.function", "s[*]": "code:python.statement"}
    assert [block for block, _, _ in claims_of(text, blocks)[0]] == ["f[0]", "s[0]"]
    assert [block for block, _, _ in claims_of(text, dict(reversed(blocks.items())))[0]] == ["s[0]", "s[1]"]


@pytest.mark.parametrize(
    ("text", "fault"),
    [
        ("x = 1\ny = (2 +", Fault.TRUNCATED), ("x = 'abc", Fault.TRUNCATED), ("x = 1 2 )\ny = 2\nz = 3\n", Fault.NESTED),
        ("x = 1", Fault.NONE), ("", Fault.NONE),
    ],
)  # fmt: skip
def test_broken_code_has_a_fault(text, fault):
    assert claims_of(text, {"s[*]": "code:python.statement"})[1] == fault


def test_a_broken_function_says_nothing():
    broken, whole = "def f():\n    return 1 +", "def g():\n    return 2"
    claims, fault = claims_of(f"{broken}\n\n{whole}\n", {"f[*]": "code:python.function"})
    assert (claims, fault) == ([("f[0]", broken, None), ("f[1]", whole, whole)], Fault.NESTED)


LINES = [
    "x = 1", "import os, sys", "from é import ü as x", "def f(a, b=2):\n    return a", "s = '''\ndef no(): pass\n'''",
    "@d(1)\n@e\nasync def g():\n    'doc'\n    await h()", "# 日本", "", "a = 1; b = 2", "for i in x:\n    import z",
    "class A(B):\n    '''é'''\n    x: int = 0\n    @p\n    def m(self):\n        # so\n        def inner(): pass\n        return 1",
    "if x:\n    def k(): return 2\nelse:\n    class C: pass", "try:\n    pass\nexcept E:\n    raise", "x = f'{y}é'", "match = 3",
    "def q():\n    \"\"\"d\"\"\"", "lambda: 0", "with a as b, c:\n    pass",
]  # fmt: skip


def place(node, starts, data):
    decorators = getattr(node, "decorator_list", None)
    first = decorators[0] if decorators else node
    begin = starts[first.lineno - 1] + first.col_offset
    return data.rindex(b"@", 0, begin) if decorators else begin, starts[node.end_lineno - 1] + node.end_col_offset


def outermost(node, kinds):
    for child in ast.iter_child_nodes(node):
        if isinstance(child, kinds):
            yield child
        else:
            yield from outermost(child, kinds)


def docstrings(tree):
    owners = (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)
    return [node.body[0] for node in ast.walk(tree) if isinstance(node, owners) and ast.get_docstring(node) is not None]


def test_agrees_with_the_parser_of_python():
    draw = random.Random(0)
    layout = Layout({kind: f"code:python.{kind}[*]" for kind in ("function", "class", "import", "docstring")})
    statements = Layout({"statement": "code:python.statement[*]"})
    functions, imports = (ast.FunctionDef, ast.AsyncFunctionDef), (ast.Import, ast.ImportFrom)
    kinds = {"function": functions, "class": (ast.ClassDef,), "import": imports}
    for _ in range(25):
        data = "\n".join(draw.choices(LINES, k=draw.randint(1, 7))).encode() + b"\n"
        tree = ast.parse(data)
        starts = [0, *(at + 1 for at, byte in enumerate(data) if byte == 10)]
        nodes = {kind: outermost(tree, types) for kind, types in kinds.items()}
        nodes |= {"docstring": docstrings(tree), "statement": tree.body}
        for candidate in (layout, statements):
            claims, fault = claims_in(candidate, data)
            assert fault == 0, data
            for block, name in enumerate(candidate.names):
                expected = sorted(place(node, starts, data) for node in nodes[name])
                places = [(claim.start, claim.stop) for claim, *_ in claims if claim.part.block == block]
                assert places == expected, (data, name)
