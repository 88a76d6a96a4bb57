"""What a `CriticConfig` refuses: values that cannot work, unknown names, options that would change nothing."""

import math

import pytest

from spanwise import CriticConfig, RecipeError

pytestmark = pytest.mark.usefixtures("unchecked_shapes")
GAUSS = {"head": "hl_gauss"}


@pytest.mark.parametrize(
    "fields",  # the last is the one that cannot be
    [
        {"head": "gauss"}, {"truncated": "cut"}, {"learning_rate": 0.0}, {"learning_rate": math.nan}, {"learning_rate": "1e-5"},
        {"weight_decay": -0.1}, {"max_grad_norm": 0.0}, {"gae_lambda_value": 1.5}, {"epochs": 0}, {"epochs": True},
        {"mini_batches": 1.5}, {"micro_batch": 0}, {"policy_training_start_step": -1},
        {"bins": 101}, {"value_range": (0.0, 2.0)},  # the scalar head has no bins
        {"value_clip": 0.2},  # fitted once, no value differs from the old one
        {"epochs": 2, "value_clip": 0.0}, {"epochs": 2, **GAUSS, "value_clip": 0.2}, {**GAUSS, "bins": 1},
        {**GAUSS, "value_range": (1.0, 0.0)}, {**GAUSS, "value_range": 3}, {**GAUSS, "value_range": (0.0, math.inf)},
    ],
)  # fmt: skip
def test_a_field_that_cannot_be_is_refused(fields):
    for make in (lambda fields: CriticConfig(**fields), CriticConfig.of):
        with pytest.raises(RecipeError, match=rf"critic\.{[*fields][-1]}"):
            make(fields)


def test_a_recipe_has_the_names_of_the_fields():
    config = CriticConfig.of({"head": "hl_gauss", "value_range": [0, 2], "epochs": 2, "gae_lambda_value": 0.95})
    assert config == CriticConfig(head="hl_gauss", value_range=(0.0, 2.0), epochs=2, gae_lambda_value=0.95)
    with pytest.raises(RecipeError, match=r"critic\.length_adaptive_alpha"):
        CriticConfig.of({"length_adaptive_alpha": 0.05})
