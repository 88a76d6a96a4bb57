"""KTAE in verl's V1 on a real TransferQueue, against loops over completions; HA-DW in V0, resumed."""

import json
from pathlib import Path

import pytest
import torch
from legacy_small import batch_of, credited
from legacy_small import trainer_of as v0_trainer_of
from queue_small import advantages_of, filled, made
from verl_small import V0, config_of, manager_of

from refined_cases import RECIPE, TEXTS, refined, rows_of
from spanwise.engines.verl.run import MEMORY
from spanwise.errors import DataError


@pytest.mark.usefixtures("queue")
def test_ktae_in_v1(tmp_path):
    """It asks for the tokens' ids, which the queue has."""
    trainer, manager = made(tmp_path, recipe=RECIPE.format(method="grpo", more="refine: ktae"))
    batch = filled(manager, [[[text] for text in group] for group in TEXTS])
    trainer._compute_advantage(batch, {})
    expected = refined(rows_of(manager.tokenizer, TEXTS), "ktae", [])
    for adv, want in zip(advantages_of(batch), expected, strict=True):
        torch.testing.assert_close(adv.double(), want, atol=1e-6, rtol=0)


class Workers:
    """verl's workers, the only part that is not real here; they save the weights after the memory."""

    def save_checkpoint(self, path, *args, **kwargs):
        assert (Path(path).parent / MEMORY).is_file()

    def load_checkpoint(self, *args, **kwargs):
        pass


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
    (tmp_path / "run" / "global_step_6" / MEMORY).unlink()
    with pytest.raises(DataError, match="ha_dw"):
        resumed._load_checkpoint()
