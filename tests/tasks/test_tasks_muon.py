"""The optimiser of the warm start's matrices, against torch's own."""

import pytest
import torch

from spanwise.tasks.warm_start import Float32Muon, matrix_optimizer


@pytest.mark.parametrize("shape", [(16, 16), (16, 48), (48, 16)])
def test_steps_are_those_of_torchs_muon(shape):
    draw = torch.Generator().manual_seed(0)
    start, grads = torch.randn(shape, generator=draw), [torch.randn(shape, generator=draw) for _ in range(4)]
    ended = []
    for make in (Float32Muon, torch.optim.Muon):
        weight = torch.nn.Parameter(start.clone())
        optimizer = make([weight], lr=0.1, weight_decay=0.01)
        for grad in grads:
            weight.grad = grad.clone()
            optimizer.step()
        ended.append(weight.detach() - start)
    ours, theirs = ended
    assert (ours - theirs).norm() < 0.02 * theirs.norm()  # bfloat16 has 8 bits
    assert theirs.norm() > 0.5


def test_a_processor_without_bfloat16_gets_float32(monkeypatch):
    weight = torch.nn.Parameter(torch.eye(2))
    for capability, kind in (("AVX2", Float32Muon), ("DEFAULT", Float32Muon), ("AVX512", torch.optim.Muon)):
        monkeypatch.setattr(torch.backends.cpu, "get_cpu_capability", lambda name=capability: name)
        assert type(matrix_optimizer([weight], lr=0.1)) is kind
