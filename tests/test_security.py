"""What is not trusted is never run: models, checkpoints, recipes; and what is run is shown first."""

import json
import os
import pickle
import shutil
import subprocess
import sys
from contextlib import suppress
from pathlib import Path

import pytest
import torch

from rollout_files import own_run, write_lines
from spanwise import CriticConfig, DataError, Layout, Objective, RecipeError, Scheme
from spanwise.cli import main
from spanwise.commands.shared.folder import read_fields
from spanwise.commands.shared.task import load_model
from spanwise.engines.checkpoints import read_manifest, write_manifest
from spanwise.engines.recipe_run import RecipeRun
from spanwise.modes.critic.value_model import ValueModel
from spanwise.recipe import Recipe, RecipeRule, load, scheme_of
from spanwise.tasks.hub import load_task
from tokenizers_small import byte_model
from trl_small import THIRD_PARTY, policy, prompts, trainer

pytestmark = THIRD_PARTY
LAYOUT = Layout({"solution": ["answer"], "confidence": ["confidence"]})


class Payload:
    """Unpickled, it leaves a file."""

    def __init__(self, mark):
        self.mark = mark

    def __reduce__(self):
        return (os.mkdir, (str(self.mark),))


def test_code_in_a_models_folder_is_never_run_and_nobody_is_asked(tmp_path, monkeypatch):
    folder, mark = byte_model(tmp_path / "hostile"), tmp_path / "ran"
    (folder / "own.py").write_text(f"import os\nos.mkdir({str(mark)!r})\n")
    config = json.loads((folder / "config.json").read_text())
    config |= {"model_type": "own", "auto_map": {"AutoConfig": "own.C", "AutoModelForCausalLM": "own.M"}}
    (folder / "config.json").write_text(json.dumps(config))
    monkeypatch.setattr("builtins.input", lambda *_: "y")  # what transformers would ask
    rows = write_lines(tmp_path / "rows.jsonl", [{"question": "1+1?", "answer": "2"}] * 4)
    for load_it, more in ((load_model, ()), (ValueModel.load, (("return",), CriticConfig())), (load_task, (str(rows),))):
        with pytest.raises(DataError, match="contains custom code"):
            load_it(str(folder), *more)
    RecipeRun.of(RecipeRule(Recipe(), Scheme.preset("bae", LAYOUT)), model=str(folder))  # slime, NeMo-RL and prime-rl
    assert not mark.exists()


def test_weights_that_are_pickles_of_something_else_are_never_unpickled(tmp_path):
    folder, mark = byte_model(tmp_path / "model"), tmp_path / "ran"
    (folder / "model.safetensors").unlink()
    torch.save({"lm_head.weight": Payload(mark)}, folder / "pytorch_model.bin")
    with pytest.raises(DataError, match="holds no readable model and tokenizer"):
        load_model(folder)
    assert not mark.exists()
    pickle.loads(pickle.dumps(Payload(mark)))
    assert mark.exists()  # the payload works: unpickled, it makes the folder


def short_training(folder, **options):
    """A trainer of completions of four tokens, which writes a checkpoint after every step."""
    long = Objective(lambda completions, **_: [float(len(text)) for text in completions], pays="all", name="long")
    extra = {"model": policy(), "rollout_func": None, "train_dataset": prompts(6), "layout": Layout({"all": []})}
    usual = {"optim": "adamw_torch", "max_completion_length": 4, "save_strategy": "steps", "save_steps": 1}
    return trainer(folder, extra={**extra, "objectives": [long]}, **usual, **options)


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory):
    folder = tmp_path_factory.mktemp("trained")
    short_training(folder).train()
    return folder / "checkpoint-1"


@pytest.mark.parametrize("name", ["optimizer.pt", "scheduler.pt", "rng_state.pth", "training_args.bin"])
def test_a_checkpoint_that_somebody_changed_is_never_unpickled(checkpoint, tmp_path, name):
    place, mark = shutil.copytree(checkpoint, tmp_path / "checkpoint-1"), tmp_path / "ran"
    torch.save({"state": Payload(mark)}, place / name)
    write_manifest(place, processes=1, settings=read_manifest(checkpoint)["settings"])
    resumed = short_training(tmp_path, max_steps=2)
    if name == "training_args.bin":  # nobody reads it
        resumed.train(resume_from_checkpoint=str(place))
    else:
        with pytest.raises(DataError, match=r"checkpoint-1' was not loaded, because its objects could run code"):
            resumed.train(resume_from_checkpoint=str(place))
    assert not mark.exists()


def test_a_recipe_is_data_and_nested_without_end_it_is_one_sentence(tmp_path):
    recipe = tmp_path / "recipe.yaml"
    recipe.write_text(f"method: !!python/object/apply:os.mkdir ['{tmp_path / 'ran'}']\n")
    with pytest.raises(RecipeError, match="is not valid YAML"):
        load(recipe)
    assert not (tmp_path / "ran").exists()
    recipe.write_text("options: " + "[" * 20_000)
    with pytest.raises(RecipeError, match="is nested too deeply to be read"):
        load(recipe)
    with pytest.raises(DataError, match="is not YAML"):
        read_fields(recipe)


def test_a_function_that_a_recipe_names_is_shown_before_it_runs(tmp_path, capfd, monkeypatch):
    (tmp_path / "mine.py").write_text("print('it ran')\ndef reward(blocks):\n    return [1.0 for _ in blocks]\n")
    monkeypatch.chdir(tmp_path)
    overrides = {"objectives": [{"reward": "mine.py:reward", "pays": ["solution"]}], "method": "bae"}
    scheme_of(load(None, overrides), LAYOUT, 32)
    out, err = capfd.readouterr()
    assert err == f"The recipe runs code: 'mine.py:reward', from the file '{tmp_path / 'mine.py'}'.\n"
    assert out == "it ran\n"
    scheme_of(load(None, overrides), LAYOUT, 32)
    assert capfd.readouterr().err == ""


#: How a folder names code, from where a command looks at it, and whether the folder is a whole run.
NAMED = [
    ("reward", "evil.py:reward", "inside", True), ("given", "evil.py:fact", "inside", True),
    ("reward", "hostile_run.evil:reward", "above", True),
    *[pytest.param("reward", *named, marks=pytest.mark.long)
      for named in [("evil.py:reward", "above", False), ("evil:reward", "above", False), ("data.evil:reward", "above", True)]],
]  # fmt: skip


def hostile_run(place, fact, name, *, whole):
    """A folder of rollouts whose recipe names code that leaves a file when it runs."""
    objective = {"reward": name, "pays": "confidence"}
    if fact == "given":
        objective = {"reward": "brier", "pays": "confidence", "given": ["correct", name], "baseline": "outcome"}
    objectives = json.dumps([{"reward": "correct", "pays": "solution"}, objective])
    recipe = f"group_size: 2\nprompts: 2\nobjectives: {objectives}\n"
    folder = own_run(place / "hostile_run", rewards=[1.0, 0.0, 1.0, 0.0], recipe=recipe)
    if whole:
        (folder / "metrics.jsonl").write_text(json.dumps({"step": 1, "rewards/correct/mean": 0.5}) + "\n")
    (place / "data").mkdir()
    for file in (folder / "evil.py", place / "data" / "evil.py"):
        file.write_text(
            f"import os\nos.mkdir({str(place / 'ran')!r})\n\ndef reward(blocks):\n    return [1.0 for _ in blocks]\n\n"
            "def fact(text, *, columns):\n    return [True for _ in text]\n"
        )
    return folder


@pytest.mark.usefixtures("unchecked_shapes")
@pytest.mark.parametrize(("fact", "name", "where", "whole"), NAMED)
def test_no_command_that_looks_runs_what_a_folder_names(fact, name, where, whole, tmp_path, monkeypatch, capfd):
    folder, output = hostile_run(tmp_path, fact, name, whole=whole), ["--output", str(tmp_path / "out")]
    monkeypatch.chdir(tmp_path if where == "above" else folder)
    commands = [["why", folder], ["report", folder], ["credit", folder, *output]]
    if name == "evil.py:reward":  # by other roads to the same recipe
        commands += [
            ["why", folder / "rollouts", "--methods", "recipe"], ["report", tmp_path / "out"],
            ["credit", next(folder.glob("rollouts/*")), "--methods", "recipe", *output],
            ["credit", folder / "rollouts", "--set", "method=grpo", *output],
        ]  # fmt: skip
    for words in commands:
        with suppress(SystemExit):
            main([*map(str, words)])
        assert not (tmp_path / "ran").exists(), words
        assert "runs code" not in capfd.readouterr().err
    with suppress(SystemExit):  # named by the user, it is shown and then runs
        main(["credit", str(folder), "--recipe", str(folder / "recipe.yaml"), *output])
    assert (tmp_path / "ran").exists()
    origin = "from the folder" if "." in name.removeprefix("evil.py") else f"from the file '{folder / 'evil.py'}'"
    assert origin in capfd.readouterr().err.partition("\n")[0]


def test_the_guard_that_the_command_line_is_tested_under_sees_a_connection(tmp_path):
    """tests/test_cli.py runs every command under it."""
    guard = Path(__file__).parent / "no_network"
    environment = {**os.environ, "PYTHONPATH": str(guard), "NETWORK_TRIED": str(tmp_path / "tried")}
    for code in (
        "import socket; socket.create_connection(('192.0.2.1', 80), 1)",
        "import urllib.request as u; u.urlopen('http://example.org')",
    ):
        done = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True, check=False)
        assert "no network in tests" in done.stderr
    assert len((tmp_path / "tried").read_text().splitlines()) == 2
