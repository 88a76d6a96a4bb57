"""KTAE, OAR and HA-DW in verl, in V1 on a real TransferQueue and in V0, against loops over completions; HA-DW resumed."""

import json
import math
from pathlib import Path

import pytest
import torch
from legacy_small import batch_of, credited
from legacy_small import trainer_of as v0_trainer_of
from queue_small import advantages_of, filled, put, trainer_of
from verl_small import V0, config_of, manager_of

from refined_cases import RECIPE, TEXTS, grpo, logps_of, refined, rows_of
from spanwise.engines.verl.run import MEMORY
from spanwise.errors import DataError


@pytest.mark.usefixtures("queue")
@pytest.mark.parametrize("name", ["ktae", "oar"])
def test_v1(tmp_path, name):
    config = config_of(tmp_path, recipe=RECIPE.format(method="grpo", more=f"refine: {name}"))
    trainer, manager = trainer_of(config), manager_of(config)
    batch, metrics = filled(manager, [[[text] for text in group] for group in TEXTS]), {}
    rows = rows_of(manager.tokenizer, TEXTS)
    logps = logps_of(rows)
    put(batch, old_log_probs=logps)
    trainer._compute_advantage(batch, metrics)
    for adv, want in zip(advantages_of(batch), refined(rows, name, logps), strict=True):
        torch.testing.assert_close(adv.double(), want, atol=1e-6, rtol=0)


def history_weighted(right, anchor):
    """GRPO's advantages; for hard prompts right completions weigh more and wrong ones less."""
    diff = sum(right) / len(right) - anchor
    return [a * 1.3 * math.exp(-math.copysign(1, a) * math.copysign(1, diff) * abs(diff)) for a in grpo(right)]


class Workers:
    """verl's workers, the only part that is not real here; they save the weights after the memory."""

    def save_checkpoint(self, path, *args, **kwargs):
        assert (Path(path).parent / MEMORY).is_file()

    def load_checkpoint(self, *args, **kwargs):
        pass


@pytest.mark.usefixtures("queue")
def test_v1_ha_dw_remembers_and_resumes(tmp_path):
    config = config_of(
        tmp_path, f"trainer.default_local_dir={tmp_path / 'run'}", recipe=RECIPE.format(method="ha_dw", more="")
    )
    trainer, anchor = trainer_of(config), 0.5
    manager = manager_of(config)
    for step in range(3):
        if step == 2:  # another process resumes
            trainer.global_steps = 2
            trainer.spanwise.save_memory(2)
            trainer = trainer_of(config)
            trainer.spanwise.load_memory(2)
        batch = filled(manager, [[[text] for text in group] for group in TEXTS])
        trainer._compute_advantage(batch, {})
        rows, want = rows_of(manager.tokenizer, TEXTS), []
        for g in range(len(TEXTS)):
            want += history_weighted([right for _, right, group in rows if group == g], anchor)
        for adv, (ids, _, _), weight in zip(advantages_of(batch), rows, want, strict=True):
            torch.testing.assert_close(adv.double(), torch.full_like(adv, weight / len(ids)).double(), atol=1e-6, rtol=0)
        anchor = 0.9 * anchor + 0.1 * sum(right for _, right, _ in rows) / len(rows)
    assert abs(anchor - 0.5) > 0.005
    (tmp_path / "run" / "global_step_2" / MEMORY).unlink()
    with pytest.raises(DataError, match="ha_dw"):
        trainer.spanwise.load_memory(2)


@pytest.mark.usefixtures("loop")
def test_v0_writes_and_reads_it_with_verls_checkpoints(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    options = (*V0, f"trainer.default_local_dir={tmp_path / 'run'}")
    config = config_of(tmp_path, *options, recipe=RECIPE.format(method="ha_dw", more=""))
    trainer, manager = v0_trainer_of(config), manager_of(config)
    credited(config, batch_of(manager, [("ab"[g], text) for g, group in enumerate(TEXTS) for text in group]))
    trainer.actor_rollout_wg, trainer.use_critic, trainer.global_steps = Workers(), False, 5
    trainer._save_checkpoint()
    state = json.loads((tmp_path / "run" / "global_step_5" / MEMORY).read_text())
    assert state["anchors"] == pytest.approx([0.5, 0.9 * 0.5 + 0.1 * 3 / 7])
    resumed = v0_trainer_of(config)
    resumed.actor_rollout_wg, resumed.use_critic = Workers(), False
    resumed._load_checkpoint()
    assert resumed.global_steps == 5
    credited(config, batch_of(manager, [("a", text) for text in TEXTS[0]]))
    resumed.global_steps = 6
    resumed._save_checkpoint()
    later = json.loads((tmp_path / "run" / "global_step_6" / MEMORY).read_text())
    assert later["anchors"][:2] == state["anchors"]
    assert len(later["anchors"]) == 3
