"""SkyRL's real `RayPPOTrainer.train()` on the CPU, with the recipe's credit: flat, step-wise and merged."""

import pytest
import skyrl_small as small
import torch


@pytest.mark.parametrize("recipe", [small.BROADCAST, small.BY_TURN, small.GIGPO], ids=["broadcast", "by_turn", "gigpo"])
def test_it_learns_and_every_layout_gives_the_same_curve(data, recipe):
    curves, logged = {}, {}
    for layout in ("flat", "stepwise", "merged"):
        cfg = small.config(data, recipe=recipe, layout=layout, steps=20)
        trainer = small.trainer(cfg, dp=2 if layout == "flat" else 3)
        before = [weight.clone() for weight in trainer.dispatch.model.parameters()]
        small.run(trainer)
        curves[layout], logged[layout] = trainer.generator.curve, trainer.tracker.logged
        assert not any(map(torch.equal, before, trainer.dispatch.model.parameters()))
    assert sum(curves["flat"][:3]) / 3 < 0.2
    assert sum(curves["flat"][-3:]) / 3 > 0.75
    assert curves["stepwise"] == pytest.approx(curves["merged"], abs=0.03)
    assert curves["flat"] == pytest.approx(curves["merged"], abs=0.03)
    # Merged rows of one conversation are one row, as in the flat layout: nothing differs, to the last bit of the curve.
    assert curves["flat"][:10] == curves["merged"][:10]
    for name in ("credit/no_signal", "loss/avg_raw_advantages_abs"):
        first = [lines[0][name] for lines in logged.values()]
        assert first == pytest.approx([first[0]] * 3, abs=1e-6)
    assert logged["merged"][0]["generate/num_seq_before_merge"] > logged["merged"][0]["generate/num_seq_after_merge"]
    assert all(line["loss/avg_raw_advantages_abs"] == line["loss/avg_raw_advantages_abs"] for line in logged["flat"])
