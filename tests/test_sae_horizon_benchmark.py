"""benchmarks/sae_horizon.py: when a critic has seen a decision."""

import pytest
import torch
from sae_horizon import BATCHES, GROUP, Setting, draw, draw_chart


@pytest.mark.parametrize("delay", [0, 3, None])
def test_a_decision_is_seen_so_many_tokens_later_or_at_the_end_of_its_stretch(delay):
    drawn = draw(Setting("", 5, (2, 9), delay), 50, 0)
    for n in range(50):
        length, places = int(drawn.mask_nt[n].sum()), drawn.place_nk[n].tolist()
        for token in range(length):
            stretches = zip(drawn.effect_nk[n].tolist(), places, [*places[1:], length], strict=True)
            since = [(effect, end - 1 if delay is None else place + 1 + delay) for effect, place, end in stretches]
            assert drawn.value_nt[n, token] == sum(effect for effect, first in since if token >= first)
        assert drawn.reward_nt[n, length - 1] == drawn.effect_nk[n].sum()


def test_with_the_result_the_critic_has_seen_nothing_before_the_end_of_a_stretch():
    drawn = draw(Setting("", 2, (9, 9), None), 1, 0)
    first, second = drawn.effect_nk[0].tolist()
    assert drawn.value_nt[0].tolist() == [0.0] * 8 + [first] * 9 + [first + second]
    assert torch.equal(drawn.place_nk, torch.tensor([[0, 9]]))


def test_a_picture_may_go_into_a_new_folder(tmp_path):
    draw_chart(BATCHES * GROUP, tmp_path / "new")
    assert {file.name for file in (tmp_path / "new").iterdir()} == {"sae-horizon.png", "sae-horizon-dark.png"}
