"""`module:function` in recipes: found here, beside the recipe or installed, and what is said where it is not."""

import sys
from math import sqrt
from unittest.mock import patch

import pytest

from spanwise import Layout, RecipeError
from spanwise.recipe import load, resolved, scheme_of
from spanwise.registry import imported

LAYOUT = Layout({"solution": ["answer"], "confidence": ["confidence"]})
REWARD = "def paid(blocks):\n    return [{value} for _ in blocks]\n"


@pytest.fixture(autouse=True)
def as_before():
    """Forget the modules that a test imports, and any module `train` of other test files."""
    path = list(sys.path)
    with patch.dict(sys.modules):
        sys.modules.pop("train", None)
        yield
    assert sys.path == path


def find(path):
    return imported(path, what="The reward")


def write(folder, files):
    for path, code in files.items():
        (folder / path).parent.mkdir(parents=True, exist_ok=True)
        (folder / path).write_text(code)
    return folder


def test_a_part_of_an_installed_module_and_of_a_package_here(tmp_path, monkeypatch):
    code = "from . import __name__ as pack\n\n\nclass Kind:\n    def at(self):\n        return pack\n"
    monkeypatch.chdir(write(tmp_path, {"my_pack/__init__.py": "", "my_pack/parts.py": code}))
    assert find("math:sqrt") is sqrt
    assert find("my_pack.parts:Kind.at")(None) == "my_pack"
    assert find(f"{__name__}:find") is find, "a module that runs already is not run again"


def test_a_file_here_goes_before_an_installed_module_of_its_name(tmp_path, monkeypatch):
    files = {"colorsys.py": REWARD.format(value=3.0), "tabnanny.py": REWARD.format(value=4.0)}
    monkeypatch.chdir(write(tmp_path, {**files, "train.py": "from tabnanny import paid\n"}))
    assert find("colorsys:paid")(["a"]) == [3.0]
    assert find("train:paid")(["a", "b"]) == [4.0, 4.0], "and so does what lies beside it"
    assert find("train:paid") is find("train:paid")


@pytest.mark.parametrize("beside", ["", "shared_bits.py", "shared_bits/__init__.py", "shared_bits/of_reward.py"])
def test_files_of_one_name_in_two_folders_are_two(tmp_path, monkeypatch, beside):
    module = beside.removesuffix(".py").removesuffix("/__init__").replace("/", ".")
    for folder, value in (("one", 1.0), ("two", 2.0), ("three", 3.0)):
        train = f"from {module} import paid\n"
        write(tmp_path / folder, {"train.py": train, beside or "train.py": REWARD.format(value=value)})
    monkeypatch.chdir(tmp_path / "one")
    first = find("train:paid")
    for folder, value in (("two", 2.0), ("three", 3.0), ("one", 1.0)):
        monkeypatch.chdir(tmp_path / folder)
        assert find("train:paid")(["a"]) == [value]
    assert find("train:paid") is first
    monkeypatch.chdir(tmp_path)
    with pytest.raises(RecipeError, match="there is no module 'train' in the current folder"):
        find("train:paid")


def test_two_files_of_the_second_folder_share_their_neighbour(tmp_path, monkeypatch):
    calls = {}
    for folder in ("one", "two"):
        rewards = f"from shared_bits import calls, of_{folder}\n"
        bits = {"shared_bits/__init__.py": "calls = []\n", f"shared_bits/of_{folder}.py": f"folder = {folder!r}\n"}
        write(tmp_path / folder, {**bits, "first_reward.py": rewards, "second_reward.py": rewards})
    for folder in ("one", "two"):
        monkeypatch.chdir(tmp_path / folder)
        calls[folder] = find("first_reward:calls")
        assert find("second_reward:calls") is calls[folder]
        assert find(f"second_reward:of_{folder}.folder") == folder
    assert calls["one"] is not calls["two"]


def test_a_neighbour_of_a_linked_file_is_that_of_its_folder(tmp_path, monkeypatch):
    for folder, value in (("real", 1.0), ("one", 2.0), ("two", 3.0)):
        write(tmp_path / folder, {"shared_bits.py": REWARD.format(value=value)})
    for folder in ("real", "two"):
        write(tmp_path / folder, {"rewards.py": "from shared_bits import paid\n"})
    (tmp_path / "one" / "rewards.py").symlink_to(tmp_path / "real" / "rewards.py")
    for folder, value in (("one", 2.0), ("two", 3.0)):
        monkeypatch.chdir(tmp_path / folder)
        assert find("rewards:paid")(["a"]) == [value]


def test_what_failed_is_not_kept(tmp_path, monkeypatch):
    monkeypatch.chdir(write(tmp_path, {"train.py": "raise SystemExit(2)"}))
    with pytest.raises(RecipeError, match="SystemExit"):
        find("train:f")
    assert "train" not in sys.modules


def written(folder, text):
    return write(folder, {"recipe.yaml": text}) / "recipe.yaml"


def test_what_a_recipe_names_is_looked_for_here_then_beside_it(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    path = written(tmp_path / "project", "model: base\ndataset: d.jsonl\n")
    assert (load("project/recipe.yaml").model, load(path).dataset) == ("base", "d.jsonl"), "not there: names of a hub"
    (tmp_path / "project" / "base").mkdir()
    (tmp_path / "project" / "d.jsonl").write_text("")
    assert (load("project/recipe.yaml").model, load("project/recipe.yaml").dataset) == ("project/base", "project/d.jsonl")
    assert load(path, {"dataset": "d.jsonl"}).dataset == "d.jsonl", "what the command line says is as seen from here"
    (tmp_path / "base").mkdir()
    assert load("project/recipe.yaml").model == "base"
    path = written(tmp_path / "run", "model: model\ndataset: d\n")
    (tmp_path / "run" / "model").mkdir()
    (tmp_path / "run" / "metrics.jsonl").write_text("")
    assert load(path).model == "model", "the model that a run wrote is not what it started from"
    for odd in ("objectives: [{reward: 'x:f', pays: a}, 5]", "objectives: {a: 1}", "model: 5"):  # still gets its sentence
        with pytest.raises(RecipeError, match="but must be"):
            load(written(tmp_path / "odd", odd))


def test_functions_beside_the_recipe_stay_found(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    rewards = {"shared_bits.py": REWARD.format(value=0.5), "more.py": REWARD.format(value=0.25)}
    facts = "def known(text, *, columns):\n    return [1] * len(text)\n"
    write(tmp_path / "project", {**rewards, "train.py": "from shared_bits import paid\n", "facts.py": facts})
    path = written(
        tmp_path / "project",
        "objectives:\n"
        "- {reward: 'train:paid', pays: solution}\n"
        "- {reward: brier, pays: confidence, given: ['facts:known', 'complete'], baseline: outcome, options: {of: paid}}\n"
        "- {reward: 'more:paid', pays: solution, name: more}\n",
    )
    recipe = load("project/recipe.yaml")
    assert recipe.objectives[0]["reward"] == "project/train.py:paid"
    assert load(path).objectives[0]["reward"] == f"{tmp_path}/project/train.py:paid"
    scheme = scheme_of(recipe, LAYOUT, 32)
    assert [scheme.objectives[n].reward(["a"]) for n in (0, 2)] == [[0.5], [0.25]]
    assert scheme.objectives[1].given == ("project/facts.py:known", "complete")
    plain = resolved(recipe, scheme)["objectives"]
    # As they are found: one comes from another module, and another one has its name.
    assert [plain[0]["reward"], plain[2]["reward"]] == ["project/train.py:paid", "project/more.py:paid"]
    assert scheme_of(load(None, {"objectives": plain}), LAYOUT, 32).objectives == scheme.objectives
    monkeypatch.chdir(tmp_path / "project")
    assert load("recipe.yaml").objectives[0]["reward"] == "train:paid", "as it is written"
