"""Every framework's own numbers, by docs/compat.md. Literals were printed by the frameworks' own functions on this batch."""

import pytest
import torch

from credit_batches import GAE_MASK, GAE_REWARD, GAE_VALUE
from framework_numbers import COMPAT, compatible
from helpers import NAN, assert_close, double
from spanwise.credit import grpo, reinforce_plus_plus, reinforce_plus_plus_baseline

# A group of one (5), a group of three in any order (0), a group of two (1); tool tokens inside, padding on both sides.
GROUP = torch.tensor([5, 0, 1, 0, 0, 1])
THREES = torch.tensor([0, 0, 0, 1, 1, 1])  # fixed sizes, for frameworks that reshape
REWARD = double([0.7, 1, 0.25, 0, 0.5, 1])
MASK = torch.tensor([[1, 1, 0, 0], [1, 0, 1, 0], [1, 1, 1, 1], [0, 1, 0, 0], [1, 1, 1, 0], [1, 0, 0, 1]]).bool()
LENGTH = MASK.sum(dim=1)
DENSE = double([[0, 0.5, 1, 0], [0.25, 1, 0, 0], [0, 0, 0, 1], [1, -0.5, 2, 0], [0, 0.5, 0, 0], [0, 1, 0, 0.75]])
REWARDS = double([[1, 0], [1, 0.5], [0, 0], [0, 0.25], [1, 1], [1, 1]])
WEIGHTS = torch.tensor([1.0, 0.5])


@pytest.mark.parametrize(
    ("framework", "name", "group", "expected"),
    [
        ("verl", "grpo", GROUP, [0.699999, 0.999998, -0.707105, -0.999998, 0.0, 0.707105]),
        ("verl", "dr_grpo", GROUP, [0.7, 0.5, -0.375, -0.5, 0.0, 0.375]),
        ("verl", "rloo", GROUP, [0.7, 0.75, -0.75, -0.75, 0.0, 0.75]),
        ("verl", "opo", GROUP, [0.7, 0.416667, -0.25, -0.583333, -0.083333, 0.5]),
        ("verl", "reinforce++-baseline", GROUP, [1.414805, 0.956833, -1.046792, -1.333024, -0.188095, 0.670601]),
        ("skyrl", "grpo", GROUP, [0.699999, 0.999998, -0.707105, -0.999998, 0.0, 0.707105]),
        ("skyrl", "dr_grpo", GROUP, [0.7, 0.5, -0.375, -0.5, 0.0, 0.375]),
        ("skyrl", "rloo", GROUP, [0.0, 0.75, -0.75, -0.75, 0.0, 0.75]),
        ("skyrl", "maxrl", GROUP, [0.7, 0.999998, -0.599999, -0.999998, 0.0, 0.599999]),
        ("trl", "grpo", THREES, [0.132418, 0.926927, -1.059345, -0.9998, 0.0, 0.9998]),
        ("trl", "dr_grpo", THREES, [0.05, 0.35, -0.4, -0.5, 0.0, 0.5]),
        ("trl", "rloo", THREES, [0.075, 0.525, -0.6, -0.75, 0.0, 0.75]),
        ("openrlhf", "grpo", THREES, [0.132453, 0.927173, -1.059626, -1.0, 0.0, 1.0]),
        ("openrlhf", "dr_grpo", THREES, [0.05, 0.35, -0.4, -0.5, 0.0, 0.5]),
        ("openrlhf", "rloo", THREES, [0.075, 0.525, -0.6, -0.75, 0.0, 0.75]),
        ("openrlhf", "reinforce++-baseline", THREES, [0.209106, 1.087352, -1.108263, -1.401012, 0.062732, 1.526475]),
    ],
)
def test_a_batch_with_a_group_of_one_and_groups_of_three(framework, name, group, expected):
    assert_close(compatible(name, framework)(REWARD, group, length_n=LENGTH), expected, 2e-6)


@pytest.mark.parametrize("name", ["grpo", "dr_grpo", "rloo"])
def test_a_group_of_one_where_frameworks_reshape(name):
    reward_n, group_n = double([0.7, 1.0, 0.0, NAN]), torch.tensor([3, 0, 0, 3])
    for framework, expected in {"trl": 0.0, "openrlhf": 0.0 if name == "dr_grpo" else NAN}.items():
        adv_n = compatible(name, framework)(reward_n, group_n, length_n=torch.ones(4).long())
        assert_close(adv_n[[0, 3]], [expected, 0.0], 1e-12, equal_nan=True)  # absent is not alone


def test_gdpo():
    verl = compatible("gdpo", "verl")(REWARDS, GROUP, weight_m=WEIGHTS, length_n=LENGTH)
    assert_close(verl, [0.75797, 0.263304, -1.158949, -1.652421, 0.872291, 0.814398], 2e-6)
    rewards = REWARDS.clone()
    rewards[0, 1], rewards[4] = NAN, NAN
    trl = compatible("gdpo", "trl")(rewards, THREES, weight_m=WEIGHTS)
    assert_close(trl, [0.482569, 0.778049, -1.260618, -0.88655, 0.0, 0.88655], 2e-6)


def test_reinforce_plus_plus_where_there_are_tool_tokens():
    # .75 on the last row's last token is carried over its tool tokens, forgotten there, discounted; the 1 there is dropped.
    for framework, *rows in (
        ("verl", [-0.496951, -0.149085, 0.546646, 1.93811], [0, -2.23628, 0, 0], [0.19878, 0, 0, 1.242378]),
        ("skyrl", [-0.41304, -0.072889, 0.607412, 1.968014], [0, -2.113793, 0, 0], [-0.753191, 0, 0, 1.287713]),
        ("openrlhf", [-0.453223, -0.095751, 0.619192, 2.04908], [0, -2.240583, 0, 0], [-0.542591, 0, 0, 1.334136]),
    ):
        assert_close(compatible("reinforce++", framework)(DENSE, MASK, gamma=0.5)[[2, 3, 5]], rows, 2e-6)


def test_gae_where_there_are_tool_tokens():
    inputs, mask = (GAE_REWARD, GAE_VALUE, GAE_MASK), GAE_MASK
    expected = {
        "verl": [0.437962, 0.355750, 0.585, 0.3],
        "skyrl": [1.105142, 1.058044, 0.9175, 0.65],
        "openrlhf": [0.392564, 0.307962, 0.585, 0.3],
    }
    for framework, numbers in expected.items():
        raw = compatible("gae", framework)(*inputs, lam=0.95, whiten=False)
        assert_close(raw[mask], numbers, 1e-6)
        assert raw[~mask].tolist() == [0.0, 0.0]
    verl, openrlhf = (compatible("gae", framework)(*inputs, lam=0.95)[mask] for framework in ("verl", "openrlhf"))
    assert_close(verl, [0.147539, -0.515844, 1.334003, -0.965698], 1e-5)
    four = double(expected["openrlhf"])
    assert_close(openrlhf, (four - four.mean()) / four.std(correction=0), 1e-5)


def test_without_a_corner_the_frameworks_agree_with_the_library():
    for framework in COMPAT:
        eps = float(COMPAT[framework]["grpo"]["eps"])
        assert_close(compatible("grpo", framework)(REWARD, THREES), grpo(REWARD, THREES, eps=eps), 1e-12)
    mask_nt = torch.ones_like(MASK)
    plain = reinforce_plus_plus(DENSE, mask_nt, gamma=0.9)
    for framework in ("verl", "skyrl"):
        assert_close(compatible("reinforce++", framework)(DENSE, mask_nt, gamma=0.9), plain, 1e-9)
    plain = reinforce_plus_plus_baseline(REWARD, THREES, length_n=LENGTH)
    assert_close(compatible("reinforce++-baseline", "verl")(REWARD, THREES, length_n=LENGTH), plain, 1e-12)
