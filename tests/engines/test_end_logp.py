"""The log-probability after an end is that of the row by itself: padding moves no position, and dropout is off."""

import pytest
import torch

from critic_small import TRUNKS, policy
from spanwise.modes.laser.logps import end_logp

ROWS = [[5, 6, 7, 8, 9, 1], [5, 1], [3, 4, 1]]


@pytest.mark.parametrize("name", TRUNKS)
@pytest.mark.parametrize("temperature", [1.0, 0.5])
def test_padding_changes_nothing(name, temperature):
    model = policy(name).eval()
    unpadded = []
    for row in ROWS:
        logits = model(input_ids=torch.tensor([row])).logits[0, -1].detach()
        unpadded.append(float(temperature * (logits / temperature).log_softmax(dim=0)[2]))
    model.train()
    found_n = end_logp(model, ROWS, 2, pad=0, temperature=temperature, batch_size=2)
    assert model.training
    assert found_n.tolist() == pytest.approx(unpadded, abs=1e-5)
    assert len(set(unpadded)) == 3


@pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing` is deprecated:FutureWarning")
def test_an_adapter_does_not_hide_positions():
    peft = pytest.importorskip("peft")
    model = policy("gpt2")
    with torch.no_grad():
        model.transformer.wpe.weight.normal_()
    unpadded = [float(end_logp(model, [row], 2, pad=0)) for row in ROWS]
    config = peft.LoraConfig(target_modules=["c_attn"], r=2, fan_in_fan_out=True)
    assert end_logp(peft.get_peft_model(model, config), ROWS, 2, pad=0).tolist() == pytest.approx(unpadded, abs=1e-5)
