"""The public face: no signature changes by accident, and names are known whatever was imported before."""

import forked
import public_face
from spanwise.credit import METHODS


def test_signatures_are_frozen():
    frozen = public_face.FILE.read_text(encoding="utf-8").splitlines()
    lines = public_face.lines()
    changed = [f"- {line}" for line in frozen if line not in lines] + [f"+ {line}" for line in lines if line not in frozen]
    assert changed == [], "say it in CHANGELOG.md, then run: python tests/public_face.py"


def test_names_are_known_whatever_was_imported_before_and_rooms_stay_beside_functions_of_their_name():
    codes = [
        "from spanwise import Layout; Layout(['price'], segmenter='json')",
        "from spanwise import Objective; Objective('correct', pays='solution')",
        "from spanwise import register; register('mine', kind='reward')(lambda text, **_: None)",
        "from spanwise import register; register('mine', kind='completion', paper='')(lambda reward_n, group_n: reward_n)",
        "import spanwise, sys; from spanwise.credit import grpo; from spanwise.segment import Vocabulary; "
        "from spanwise.score import brier; from spanwise.credit.methods._group_relative import grpo as own; assert grpo is own",
    ]  # fmt: skip
    assert [(done.returncode, done.stderr) for done in map(forked.run, codes)] == [(0, "")] * 5


def test_modules_of_methods_do_not_shadow_their_functions_and_every_method_says_where_its_formula_comes_from():
    contrib = {name for name, method in METHODS.items() if ".contrib." in method.estimator.__module__}
    assert contrib == {"ha_dw", "grpo_verif", "gagpo"}
    for name, method in METHODS.items():
        module = method.estimator.__module__
        if module.startswith("spanwise."):
            assert module.rsplit(".", 1)[1].startswith("_"), name
            assert method.source, name
            assert method.source.startswith("third-party summaries") == (name in contrib or name == "sae"), name
