"""A self-rewarding score mixed into the credit of a verdict: a slow oracle, and what is left as it was."""

import statistics

import pytest
import torch

from helpers import NAN, assert_close, double
from spanwise import Batch, Laser, Layout, Objective, Scheme, Vocabulary, credit_batch, read
from spanwise.errors import AlignmentError
from spanwise.modes.laser import own_opinion

ONE = torch.zeros(4).long()


def mixed_advantage(adv_n, score_n, group_n, *, mix, threshold=0.1, scale="std"):
    share_n, own_n = own_opinion(score_n, group_n, mix=mix, threshold=threshold, scale=scale)
    return adv_n + share_n * (own_n - adv_n)


def slow_mix(adv, score, group, *, mix, threshold, scale):
    mixed = []
    for i, advantage in enumerate(adv):
        peers = [min(max(score[j], 0.0), 1.0) for j in range(len(adv)) if group[j] == group[i] and score[j] == score[j]]
        spread = statistics.stdev(peers) if len(peers) > 1 else 0.0
        if score[i] != score[i] or spread == 0 or spread < threshold:
            mixed.append(advantage)
            continue
        z = (min(max(score[i], 0.0), 1.0) - statistics.mean(peers)) / (spread if scale == "std" else 1.0)
        mixed.append((1 - mix) * advantage + mix * z)
    return mixed


@pytest.mark.parametrize("scale", ["std", "none"])
@pytest.mark.parametrize("threshold", [0.0, 0.1, 0.4])
def test_random_batches_against_loops(scale, threshold):
    generator = torch.Generator().manual_seed(1)
    for _ in range(40):
        adv_n = torch.randn(10, generator=generator).double()
        score_n = torch.rand(10, generator=generator).double() * 2 - 0.5
        score_n[torch.rand(10, generator=generator) < 0.25] = NAN
        group_n = torch.randint(-2, 2, (10,), generator=generator)
        mixed_n = mixed_advantage(adv_n, score_n, group_n, mix=0.3, threshold=threshold, scale=scale)
        rule = {"mix": 0.3, "threshold": threshold, "scale": scale}
        assert_close(mixed_n, slow_mix(adv_n.tolist(), score_n.tolist(), group_n.tolist(), **rule), 1e-12)
        order = torch.randperm(10, generator=generator)
        assert_close(mixed_advantage(adv_n[order], score_n[order], 1000 - group_n[order], **rule), mixed_n[order], 1e-12)


def test_groups_whose_scores_agree_are_not_mixed():
    adv_n = double([1, -1, 0.5, -0.5])
    for score_n in ([0.5] * 4, [-3, -2, -1, -0.1]):  # the last count as 0; test_random_batches_against_loops has the others
        assert torch.equal(mixed_advantage(adv_n, double(score_n), ONE, mix=0.5, threshold=0.0), adv_n)


VOCABULARY = Vocabulary((b"<answer>", b"4", b"5", b"</answer>", b"<confidence>", b"1", b"0", b"</confidence>"))
LAYOUT = Layout({"solution": ["answer"], "confidence": ["confidence"]})
SAID = [[0, 1, 3, 4, 5, 7], [0, 2, 3, 4, 5, 7], [0, 2, 3, 4, 6, 7], [0, 1, 3]]
SCORES = double([0.9, 0.7, 0.1, 0.3])
Z = [(score - 0.5) / statistics.stdev(SCORES.tolist()) for score in SCORES.tolist()]  # .5 is their mean


def credit_by(method, *, score_n=SCORES, objectives=None, layout=LAYOUT, **fields):
    scheme = Scheme.preset(method, layout, laser=Laser("<unk>", mix=0.25, scale="std"), objectives=objectives)
    batch = Batch.jagged(SAID, [7] * len(SAID), columns={"answer": ["4"] * len(SAID)}, score_n=score_n, **fields)
    return credit_batch(read(batch, scheme, VOCABULARY), batch, scheme)


def test_only_the_share_of_the_verdict_in_the_blocks_that_it_pays_is_mixed():
    objectives = [
        Objective("correct", pays="solution", weight=2.0),
        Objective("brier", pays="confidence", given="correct", baseline="outcome", if_missing=-1.0),
        Objective("format", pays="solution", weight=0.25),
    ]
    plain, mixed = (credit_by("bae", objectives=objectives, score_n=score_n) for score_n in (None, SCORES))
    correct = [0.5, -0.5, -0.5, 0.5]
    change = [2.0 * 0.25 * (Z[i] - correct[i]) for i in range(4)]
    assert_close(mixed.block_nk[:, 0] - plain.block_nk[:, 0], change, 1e-12)
    assert torch.equal(mixed.block_nk[:, 1], plain.block_nk[:, 1])
    assert torch.equal(mixed.stop_n, plain.stop_n)
    two_blocks = credit_by("bae", objectives=[Objective("correct", pays=("solution", "confidence"))])
    assert (two_blocks.block_nk != 0).tolist()[3] == [True, False]  # a block that is not there gets nothing


def test_the_paper_itself_is_grpo_with_its_standard_deviations():
    mixed = credit_by("grpo", layout=Layout({"all": ["answer", "confidence"]}))
    verdict = [1, 0, 0, 1]
    z_v = [(v - 0.5) / statistics.stdev(verdict) for v in verdict]
    assert_close(mixed.block_nk[:, 0], [0.75 * v + 0.25 * s for v, s in zip(z_v, Z, strict=True)], 1e-5)


def test_tokens_with_advantages_of_their_own_are_mixed_where_the_verdict_pays():
    objectives = [Objective("correct", pays="solution"), Objective("brier", pays="confidence", given="correct")]
    value_nts = torch.linspace(0.1, 0.7, 24).reshape(4, 6, 1).double().expand(-1, -1, 2)
    plain, mixed = (
        credit_by("gae", objectives=objectives, score_n=score_n, value_nt=value_nts).token_nt for score_n in (None, SCORES)
    )
    assert_close(mixed[:, :3], 0.75 * plain[:, :3] + 0.25 * double(Z)[:, None], 1e-12)
    assert_close(mixed[:, 3:], plain[:, 3:], 1e-12)


def test_no_scores_means_not_yet_and_three_are_too_few(unchecked_shapes):
    assert torch.equal(credit_by("bae", score_n=None).block_nk, credit_by("bae", score_n=double([NAN] * 4)).block_nk)
    with pytest.raises(AlignmentError):
        credit_by("bae", score_n=double([1, 0, 1]))
