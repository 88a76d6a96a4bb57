"""No file that a run, a comparison, a report or a checkpoint leaves holds a secret."""

import os

import pytest
import yaml
from rich.console import Console

from spanwise.cli import main
from spanwise.commands.report.report import report_folder
from spanwise.commands.shared.folder import again_command, changed
from spanwise.commands.train.train import train
from spanwise.engines.trl import SpanGRPOConfig
from spanwise.errors import DataError
from spanwise.recipe import load
from spanwise.rollouts.folder import hidden

HUB, JUDGE = "hf_" + "q7Zk" * 8, "sk-" + "w3Xy" * 8
SMALL = {
    "steps": 2, "prompts": 2, "group_size": 4, "start_steps": 2, "eval_prompts": 2, "eval_samples": 2, "eval_every": 0,
    "save_every": 1, "keep_rollouts": 1,
}  # fmt: skip
pytestmark = pytest.mark.filterwarnings("ignore")  # transformers about itself
REWARD = """
def judged(completions, *, api_key, **_):
    assert api_key[::-1] == {backwards!r}, api_key
    return [float(len(text) % 3) for text in completions]
"""


def holding(place):
    """The files under a place that hold one of the secrets."""
    files = [file for file in place.rglob("*") if file.is_file()]
    assert len(files) > 10
    return [str(file) for file in files if any(secret.encode() in file.read_bytes() for secret in (HUB, JUDGE))]


@pytest.fixture
def fields(tmp_path, monkeypatch):
    """A recipe with two secrets, one of which its reward needs, in a working folder of its own."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "judge.py").write_text(REWARD.format(backwards=JUDGE[::-1]))
    judged = {"reward": "judge.py:judged", "pays": ["solution"], "options": {"api_key": JUDGE}}
    return {
        **SMALL, "objectives": [{"reward": "correct", "pays": ["solution"]}, judged],
        "trainer": {"hub_token": HUB, "max_grad_norm": 0.5},
    }  # fmt: skip


@pytest.mark.long
def test_a_run_leaves_no_secret_and_goes_on_from_what_it_leaves(fields, tmp_path, capsys):
    place = tmp_path / "run"
    train(load(None, {**fields, "output": str(place)}), console=Console(width=200))
    printed = capsys.readouterr().out
    assert not any(secret in printed for secret in (HUB, JUDGE))
    assert all((place / file).is_file() for file in ("checkpoints/checkpoint-2/training_args.bin", "report.html"))
    assert holding(place) == []
    saved = yaml.safe_load((place / "recipe.yaml").read_text())
    assert saved["trainer"] == {"hub_token": "<hidden>", "max_grad_norm": 0.5}
    assert saved["objectives"][1]["options"] == {"api_key": "<hidden>"}
    checkpoint = str(place / "checkpoints" / "checkpoint-1")
    train(load(None, {**fields, "output": str(tmp_path / "other")}), resume=checkpoint)
    assert holding(tmp_path / "other") == []
    other = {**fields, "trainer": {"hub_token": HUB, "max_grad_norm": 0.1}, "output": str(tmp_path / "third")}
    with pytest.raises(DataError, match="another recipe: trainer"):
        train(load(None, other), resume=checkpoint)
    # Without its secret the trainer goes on as before, and says so.
    recipe = load(None, {**saved, "objectives": fields["objectives"], "output": str(place)})
    train(recipe, console=Console(width=200), resume=checkpoint)
    printed = " ".join(capsys.readouterr().out.split())
    assert "Secrets are not saved, so the recipe holds <hidden> in place of trainer.hub_token" in printed


def test_settings_leave_without_secrets_whatever_form_a_tracker_asks_for(tmp_path):
    settings = {"hub_token": HUB, "model_init_kwargs": {"token": HUB, "dtype": "float32"}}
    args = SpanGRPOConfig(str(tmp_path), use_cpu=True, bf16=False, gradient_checkpointing=None, **settings)
    for sent in (args.to_dict(), args.to_json_string(), args.to_sanitized_dict()):
        assert HUB not in str(sent)
        assert "float32" in str(sent)
    assert args.model_init_kwargs["token"] == args.hub_token == HUB  # the hub gets the real token


def test_a_tracker_gets_no_secret(fields, tmp_path):
    reader = pytest.importorskip("tensorboard.backend.event_processing.event_accumulator").EventAccumulator
    settings = {"hub_token": HUB, "model_init_kwargs": {"token": HUB}, "max_grad_norm": 0.5}
    place = tmp_path / "run"
    short = {"steps": 1, "objectives": None, "report": False, "report_to": "tensorboard"}
    train(load(None, {**fields, **short, "trainer": settings, "output": str(place)}))
    (events,) = tmp_path.rglob("events.out.tfevents.*")
    (text,) = reader(str(events)).Reload().Tensors("args/text_summary")
    assert b'"max_grad_norm": 0.5' in text.tensor_proto.string_val[0]
    assert holding(tmp_path) == []


@pytest.mark.long
def test_a_comparison_hands_its_runs_the_secrets_and_leaves_none(fields, tmp_path):
    (tmp_path / "recipe.yaml").write_text(yaml.safe_dump(fields))
    command = ["compare", "recipe.yaml", "--arms", "bae", "--seeds", "0", "--output", "out"]
    main(command)
    assert holding(tmp_path / "out") == []
    assert not [name for name, value in os.environ.items() if HUB in value]
    main(command)  # everything is there, and of the same recipe
    report_folder(tmp_path / "out" / "bae-0")


def test_the_names_of_secrets_and_what_is_no_secret_and_no_printed_command_or_comparison_of_recipes_holds_one(tmp_path):
    for name in ("hub_token", "access_token", "api_key", "apiKey", "API-KEY", "password", "client_secret", "db_passwd"):
        assert hidden({"trainer": {"deep": [{name: "x"}]}}) == {"trainer": {"deep": [{name: "<hidden>"}]}}
        assert hidden({"objectives": [{"options": {name: "x"}}]}, None) == {"objectives": [{"options": {}}]}
    trainer = {"max_tokens": 3, "pad_token": "<pad>", "eos_token": "<eos>", "secret": None, "hub_token": ""}
    options = {"key": "price", "token": "<x>", "dict_key": "a"}
    layout = {"api_key": ["api_key"], "key": ["key"]}
    plain = {"laser": {"token": "<unk>"}, "layout": layout, "trainer": trainer, "objectives": [{"options": options}]}
    assert hidden(plain) == plain
    options = {"overrides": {"trainer": {"hub_token": HUB}}}
    assert HUB not in again_command("compare", folder=tmp_path, options=options)
    (tmp_path / "recipe.yaml").write_text("trainer: {hub_token: <hidden>, seed: 1}")
    for trainer in ({"hub_token": HUB, "seed": 1}, {"seed": 1}):
        assert changed(tmp_path / "recipe.yaml", {"trainer": trainer}) == []
    (sentence,) = changed(tmp_path / "recipe.yaml", {"trainer": {"hub_token": HUB, "seed": 2}})
    assert HUB not in sentence
