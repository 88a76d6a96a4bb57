"""A run resumes from a whole checkpoint only, whatever a damaged one lacks; the memory of a method is in it."""

import json
import shutil
from pathlib import Path
from types import SimpleNamespace
from unittest.mock import Mock

import pytest
import torch

from critic_small import equal, optimizer_state, state
from spanwise.engines import checkpoints
from spanwise.engines.checkpoints import MANIFEST, checkpoint_fault, newest_checkpoint, read_manifest, write_manifest
from spanwise.engines.trl import trainer as room
from spanwise.errors import DataError, RecipeError
from spanwise.scheme import Scheme
from trl_critic_small import critic_lines, fast, with_critic
from trl_small import LAYOUT, prompts, sampling, trainer

#: All that a run with a critic and an entropy target needs to go on as if nothing had happened.
NEEDED = {
    "model.safetensors", "config.json", "optimizer.pt", "scheduler.pt", "rng_state.pth", "trainer_state.json",
    "training_args.bin", "entropy_ctrl_state.json", "critic/model.safetensors", "critic/optimizer.pt",
}  # fmt: skip
CRITIC = fast(epochs=2, mini_batches=2, warmup_steps=3, value_clip=0.5, weight_decay=0.1)


def resumable(folder, *, method="grpo", critic=None, **options):
    """TRL's own sampling, AdamW with a schedule and TRL's entropy controller."""
    usual = {
        "optim": "adamw_torch", "learning_rate": 1e-2, "max_steps": 3, "max_completion_length": 8, "shuffle_dataset": True,
        "use_adaptive_entropy": True, "entropy_target": 1.0, "save_strategy": "steps", "save_steps": 1,
        "lr_scheduler_type": "linear", **options,
    }  # fmt: skip
    if critic is not None:
        return with_critic(folder, critic, extra=sampling(), **usual)
    return trainer(folder, extra=sampling(method=method), **usual)


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    """A run with a critic that nothing interrupts; it saves each of its three steps."""
    run = resumable(tmp_path_factory.mktemp("whole"), critic=CRITIC)
    run.train()
    return run


@pytest.fixture
def copied(whole, tmp_path):
    return Path(shutil.copytree(Path(whole.args.output_dir, "checkpoint-2"), tmp_path / "checkpoint-2"))


def test_whatever_a_checkpoint_lacks_it_is_skipped_and_says_what(whole, copied):
    older = Path(shutil.copytree(Path(whole.args.output_dir, "checkpoint-1"), copied.parent / "checkpoint-1"))
    contents = {path: path.read_bytes() for path in copied.rglob("*") if path.is_file()}
    names = {path: path.relative_to(copied).as_posix() for path in contents}
    assert {*names.values()} >= NEEDED
    assert newest_checkpoint(copied.parent) == (copied, {})
    for file in contents.keys() - {copied / MANIFEST}:
        for fault, left in (("missing", None), ("damaged", b""), ("damaged", contents[file][:-1])):
            file.unlink()
            if left is not None:
                file.write_bytes(left)
            newest, faults = newest_checkpoint(copied.parent)
            assert newest == older, (file, fault)
            assert faults["checkpoint-2"].startswith(f"{names[file]} is {fault}")
            file.write_bytes(contents[file])


def test_a_list_that_is_not_one_and_a_file_of_the_right_size_that_is_not_one(copied):
    manifest = (copied / MANIFEST).read_text()
    entries = json.loads(manifest)
    unlisted = [json.dumps({**entries, name: None}) for name in ("digests", "settings")]
    unlisted += [json.dumps({key: entries[key] for key in entries if key != name}) for name in ("digests", "settings")]
    for nonsense in ("", "{", "[]", "{}", '{"files": 3, "processes": 1, "resumable": true}', *unlisted):
        (copied / MANIFEST).write_text(nonsense)
        assert checkpoint_fault(copied) is not None, nonsense
    (copied / MANIFEST).write_text(manifest)
    for name in ("model.safetensors", "optimizer.pt", "rng_state.pth", "trainer_state.json", "entropy_ctrl_state.json"):
        content = (copied / name).read_bytes()
        (copied / name).write_bytes(b"\0" * len(content))  # as a file system may leave it after a power cut
        assert checkpoint_fault(copied) == f"{name} is damaged"
        (copied / name).write_bytes(content)
    assert checkpoint_fault(copied) is None
    for left in (".spanwise.json", ".spanwise.json.4711"):  # what a kill left of a list is no part of the checkpoint
        (copied / left).write_text("{")
        write_manifest(copied, processes=1, settings={})
        (copied / left).unlink(missing_ok=True)
        assert checkpoint_fault(copied) is None


def test_a_run_that_ends_before_the_list_is_written_goes_on_as_if_uninterrupted(whole, tmp_path, monkeypatch):
    def dies(place, **facts):
        if place.name == "checkpoint-2":
            raise KeyboardInterrupt
        write_manifest(place, **facts)

    monkeypatch.setattr(room, "write_manifest", dies)
    with pytest.raises(KeyboardInterrupt):
        resumable(tmp_path, critic=CRITIC, save_total_limit=1).train()
    left = {path.name for path in tmp_path.glob("checkpoint-*")}
    assert left == {"checkpoint-1", "checkpoint-2"}  # the older one stays until the newer one is whole
    monkeypatch.setattr(room, "write_manifest", write_manifest)
    resumed = resumable(tmp_path, critic=CRITIC, save_total_limit=1)
    with pytest.warns(UserWarning, match=r"resumes from checkpoint-1, .*: the folder has no spanwise\.json") as caught:
        resumed.train(resume_from_checkpoint=True)
    (place,) = (Path(warning.filename) for warning in caught if "resumes from" in str(warning.message))
    assert place != Path(checkpoints.__file__)  # the warning names the caller's line, not ours
    assert [path.name for path in tmp_path.glob("checkpoint-*")] == ["checkpoint-3"]
    assert torch.load(tmp_path / "checkpoint-3" / "training_args.bin", weights_only=False).save_total_limit == 1
    assert resumed.state.global_step == 3
    assert equal(state(resumed.model), state(whole.model))
    assert resumed.entropy_coef == whole.entropy_coef
    assert torch.equal(resumed.last_rollouts.advantages_nt, whole.last_rollouts.advantages_nt)
    assert equal(state(resumed.critic.model), state(whole.critic.model))
    assert equal(optimizer_state(resumed.critic.optimizer), optimizer_state(whole.critic.optimizer))
    assert resumed.critic.schedule.state_dict() == whole.critic.schedule.state_dict()
    assert (resumed.critic.updates, resumed.critic.batches) == (whole.critic.updates, 3)
    assert critic_lines(resumed)[-2:] == critic_lines(whole)[-2:]


def test_a_checkpoint_that_is_written_again_is_not_whole_until_it_is(tmp_path, monkeypatch):
    run = resumable(tmp_path, max_steps=1)
    run.train()
    assert newest_checkpoint(tmp_path)[0] is not None
    monkeypatch.setattr(run, "_save_rng_state", Mock(side_effect=KeyboardInterrupt))
    with pytest.raises(KeyboardInterrupt):
        run._save_checkpoint(run.model, None)
    assert newest_checkpoint(tmp_path)[0] is None


def test_only_a_model_is_nothing_to_go_on_from(tmp_path):
    resumable(tmp_path, max_steps=1, save_only_model=True).train()
    for folder, resume in ((tmp_path, True), (tmp_path / "empty", True), (tmp_path, "nowhere")):
        with pytest.raises(DataError, match=r"save_only_model|no checkpoint under|folder does not exist"):
            resumable(folder).train(resume_from_checkpoint=resume)


def test_other_settings_a_flipped_byte_and_a_lost_critic_are_refused(copied):
    def resume(match, **changes):
        with pytest.raises(DataError, match=match):
            resumable(copied.parent, critic=CRITIC, **changes).train(resume_from_checkpoint=True)

    for name, value in (("seed", 7), ("learning_rate", 1e-3), ("epsilon", 0.1)):
        resume(rf"other settings \({name} ", **{name: value})
    content = (copied / "model.safetensors").read_bytes()
    (copied / "model.safetensors").write_bytes(content[:-1] + bytes([content[-1] ^ 1]))
    resume(r"model\.safetensors")
    shutil.rmtree(copied / "critic")
    write_manifest(copied, processes=1, settings=read_manifest(copied)["settings"])
    resume("lacks the critic or its optimizer")


def test_another_number_of_processes_is_said(copied):
    (copied / MANIFEST).write_text(json.dumps({**read_manifest(copied), "processes": 2}))
    args = SimpleNamespace(world_size=1, output_dir=str(copied.parent))
    with pytest.warns(UserWarning, match="by 2 processes, but you resume with 1"):
        assert checkpoints.whole_checkpoint(args, True) == str(copied)


def memory(run):
    return run.scheme.entry.estimator.state_dict()


def test_what_a_method_remembers_is_in_the_checkpoint_and_each_run_has_its_own(tmp_path):
    whole = resumable(tmp_path, method="ha_dw")
    whole.train()
    end = memory(whole)
    whole.evaluate(prompts(2))
    assert memory(whole) == end
    assert len(end["anchors"]) == 4  # the start and three batches
    place = tmp_path / "checkpoint-1"
    assert read_manifest(place)["estimator"]["anchors"] == end["anchors"][:2]
    again = resumable(tmp_path / "again", method="ha_dw")
    assert memory(again) == {}
    again.train(resume_from_checkpoint=str(place))
    assert memory(again) == end
    assert equal(state(again.model), state(whole.model))
    write_manifest(place, processes=1, settings=read_manifest(place)["settings"])  # without what the method remembers
    with pytest.raises(DataError, match="'ha_dw'"):
        resumable(tmp_path / "never", method="ha_dw").train(resume_from_checkpoint=str(place))


def test_engines_whose_checkpoints_are_their_own_refuse_it():
    Scheme.preset("grpo", LAYOUT).check_forgets("SkyRL")
    with pytest.raises(RecipeError, match="'ha_dw'"):
        Scheme.preset("ha_dw", LAYOUT).check_forgets("SkyRL")
