"""What a `CriticConfig` refuses: values that cannot work, unknown names, options that would change nothing."""

import math

import pytest

from spanwise.errors import RecipeError
from spanwise.modes.critic.config import CriticConfig

pytestmark = pytest.mark.usefixtures("unchecked_shapes")


@pytest.mark.parametrize(
    ("field", "values"),
    [
        ("head", ["gauss"]), ("truncated", ["cut"]), ("learning_rate", [0.0, math.nan, "1e-5"]), ("weight_decay", [-0.1]),
        ("max_grad_norm", [0.0]), ("gae_lambda_value", [1.5]), ("epochs", [0, True]), ("mini_batches", [1.5]),
        ("micro_batch", [0]), ("policy_training_start_step", [-1]), ("bins", [101]), ("value_range", [(0.0, 2.0)]),
        ("value_clip", [0.2]),  # the scalar head has no bins; fitted once, no value differs from the old one
    ],
)  # fmt: skip
def test_a_field_that_cannot_be_is_refused(field, values):
    for value in values:
        for make in (lambda fields: CriticConfig(**fields), CriticConfig.of):
            with pytest.raises(RecipeError, match=rf"critic\.{field}"):
                make({field: value})


@pytest.mark.parametrize(
    "fields",
    [
        {"head": "hl_gauss", "value_range": (1.0, 0.0)},
        {"head": "hl_gauss", "value_range": 3},
        {"head": "hl_gauss", "value_range": (0.0, math.inf)},
        {"head": "hl_gauss", "bins": 1},
        {"value_clip": 0.0, "epochs": 2},
        {"value_clip": 0.2, "epochs": 2, "head": "hl_gauss"},
    ],
)
def test_fields_that_do_not_fit_are_refused(fields):
    with pytest.raises(RecipeError):
        CriticConfig.of(fields)


def test_a_recipe_has_the_names_of_the_fields():
    written = {"head": "hl_gauss", "value_range": [0, 2], "epochs": 2, "gae_lambda_value": 0.95}
    config = CriticConfig.of(written)
    assert config == CriticConfig(head="hl_gauss", value_range=(0.0, 2.0), epochs=2, gae_lambda_value=0.95)
    with pytest.raises(RecipeError, match=r"critic\.length_adaptive_alpha"):
        CriticConfig.of({"length_adaptive_alpha": 0.05})
