"""What a `CriticConfig` refuses: values that cannot work, names that are none, options that would change nothing."""

import dataclasses
import math

import pytest

from spanwise.errors import RecipeError
from spanwise.modes.critic.config import CriticConfig

pytestmark = pytest.mark.usefixtures("unchecked_shapes")


@pytest.mark.parametrize(
    ("fields", "sentence"),
    [
        ({"head": "gauss"}, r"There is no critic\.head 'gauss'\. .*hl_gauss"),
        ({"truncated": "cut"}, r"There is no critic\.truncated 'cut'"),
        ({"learning_rate": 0.0}, r"critic\.learning_rate is 0\.0; it must be a number above 0"),
        ({"learning_rate": math.nan}, r"critic\.learning_rate is nan"),
        ({"learning_rate": "1e-5"}, r"critic\.learning_rate is '1e-5'"),
        ({"weight_decay": -0.1}, r"critic\.weight_decay is -0\.1; it must be a number, at least 0"),
        ({"max_grad_norm": 0.0}, r"critic\.max_grad_norm is 0\.0"),
        ({"gae_lambda_value": 1.5}, r"critic\.gae_lambda_value is 1\.5; it must lie between 0 and 1"),
        ({"epochs": 0}, r"critic\.epochs is 0; it must be a whole number, at least 1"),
        ({"epochs": True}, r"critic\.epochs is True"),
        ({"mini_batches": 1.5}, r"critic\.mini_batches is 1\.5"),
        ({"micro_batch": 0}, r"critic\.micro_batch is 0"),
        ({"policy_training_start_step": -1}, r"critic\.policy_training_start_step is -1"),
        (
            {"head": "hl_gauss", "value_range": (1.0, 0.0)},
            r"critic\.value_range is \[1\.0, 0\.0\]; the first number must be",
        ),
        ({"head": "hl_gauss", "value_range": 3}, r"critic\.value_range is 3; write two numbers"),
        ({"head": "hl_gauss", "value_range": (0.0, math.inf)}, r"critic\.value_range is inf"),
        ({"head": "hl_gauss", "bins": 1}, r"critic\.bins is 1; it must be a whole number, at least 2"),
        ({"bins": 101}, r"critic\.bins is 101, which the scalar head does not look at; set head to hl_gauss"),
        ({"value_range": (0.0, 2.0)}, r"critic\.value_range is .*the scalar head does not look at"),
        ({"value_clip": 0.2}, r"every value is fitted once and never differs from the old one"),
        ({"value_clip": 0.0, "epochs": 2}, r"critic\.value_clip is 0\.0; it must be a number above 0"),
        ({"value_clip": 0.2, "epochs": 2, "head": "hl_gauss"}, r"a categorical head \(hl_gauss\) has no clipped loss"),
    ],
)
def test_a_critic_that_cannot_be_is_one_sentence(fields, sentence):
    with pytest.raises(RecipeError, match=sentence):
        CriticConfig(**fields)
    with pytest.raises(RecipeError, match=sentence):
        CriticConfig.of(fields)


def test_a_recipe_has_the_names_of_the_fields():
    written = {"head": "hl_gauss", "value_range": [0, 2], "epochs": 2, "gae_lambda_value": 0.95}
    config = CriticConfig.of(written)
    assert config == CriticConfig(head="hl_gauss", value_range=(0.0, 2.0), epochs=2, gae_lambda_value=0.95)
    with pytest.raises(RecipeError, match=r"critic\.length_adaptive_alpha belongs to the method, .* options: \{length"):
        CriticConfig.of({"length_adaptive_alpha": 0.05})


def test_every_documented_field_is_there():
    attributes = CriticConfig.__doc__.split("Attributes:")[1].split("Raises:")[0]
    for name in (field.name for field in dataclasses.fields(CriticConfig)):
        assert name in attributes, name
