"""The factor against SkyRL's own `_normalize_advantages`: under every loss reduction the same mean over rollouts of sums."""

from itertools import product

import pytest
import skyrl_small as small
import torch
from skyrl.backends.skyrl_train.training_batch import TrainingInputBatch
from skyrl.train.dataset.preprocess import compute_prompt_boundaries, compute_prompt_mini_batch_boundaries

from spanwise.engines.skyrl.config import REDUCTIONS
from spanwise.engines.skyrl.trainer import fold_factor

WIDTH = 10


def ragged(seed, *, stepwise):
    """Rows of turns of different lengths, right-aligned, one of them left out of the loss, and SkyRL's padding behind them."""
    output = small.ragged(seed, turns=6 if stepwise else 1)
    uids, samples = zip(*((t.instance_id, t.repetition_id) for t in output["trajectory_ids"]), strict=True)
    lengths = [*map(len, output["response_ids"]), 0, 0]
    lengths[3] = 0
    mask_nt = (torch.arange(WIDTH) >= WIDTH - torch.tensor(lengths)[:, None]).float()
    mini = compute_prompt_mini_batch_boundaries(list(uids), 2, 4, stepwise, 3)
    adv_nt = torch.randn(mask_nt.shape, generator=torch.Generator().manual_seed(seed)) * mask_nt
    rollouts = [3 * int(uid) + sample for uid, sample in zip(uids, samples, strict=True)]
    return adv_nt, mask_nt, torch.tensor([*rollouts, -1, -1]), mini, compute_prompt_boundaries(list(uids))


def reduced(data, name, adv_nt, mask_nt, mini, prompts):
    """The advantages after SkyRL's normalisation, before its loss sums them up."""
    changes = {"trainer.algorithm.loss_reduction": name, "trainer.algorithm.max_seq_len": 7}
    trainer = small.trainer(small.config(data, **changes, **{"trainer.micro_train_batch_size_per_gpu": 2}))
    batch = TrainingInputBatch({"advantages": adv_nt, "loss_mask": mask_nt, "response_mask": mask_nt})
    batch.metadata = {}
    return trainer._normalize_advantages(batch, mini, prompts)["advantages"]


# SkyRL itself refuses token_mean_legacy over turns.
CASES = {*product(REDUCTIONS, (False, True))} - {("token_mean_legacy", True)}


@pytest.mark.parametrize(("name", "stepwise"), sorted(CASES))
def test_the_loss_is_the_mean_over_rollouts_of_the_sum_over_tokens(data, name, stepwise):
    for seed in range(3):
        adv_nt, mask_nt, rollout_n, mini, prompts = ragged(seed, stepwise=stepwise)
        sizes = {"max_seq_len": 7, "micro_batch_size": 2}
        factor_n1 = fold_factor(mask_nt, rollout_n, loss_reduction=name, mini_batches=mini, prompts=prompts, **sizes)
        surrogate_nt = torch.randn(mask_nt.shape, generator=torch.Generator().manual_seed(seed + 10))
        found_nt = reduced(data, name, adv_nt * factor_n1, mask_nt, mini, prompts) * surrogate_nt * mask_nt
        assert len(mini) == 2
        sum_n = (adv_nt * surrogate_nt * mask_nt).sum(dim=1)
        for start, end in mini:
            assert len(set(rollout_n[start:end].tolist())) == 6
            assert float(found_nt[start:end].sum()) == pytest.approx(float(sum_n[start:end].sum()) / 6, abs=1e-5)
        bare_nt = reduced(data, name, adv_nt, mask_nt, mini, prompts) * surrogate_nt * mask_nt
        assert float(bare_nt.sum()) != pytest.approx(float(found_nt.sum()), abs=1e-3)
