"""Set-ups of a script under Unsloth that its loss cannot serve."""

import pytest

from border.case import case, check
from spanwise import CriticConfig, Objective, Scheme
from spanwise.engines import unsloth as door
from spanwise.engines.trl import config as trl_config
from trl_small import THIRD_PARTY, Layout, config, policy, prompts, scheme, scripted, tokenizer, trainer

pytestmark = [*THIRD_PARTY, pytest.mark.usefixtures("unchecked_shapes")]
CUTS = Scheme("bae", Layout({"segment[*]": "cuts:5"}, most=4), [Objective("environment", "segment[*]")])


class UnslothGRPOTrainer(trl_config.GRPOTrainer):
    """What Unsloth calls the trainer that it writes in the place of TRL's."""


@case
def script(folder, *, replaced=None, variables=(), imported=True, **options):
    """A script with Unsloth's trainer and some arguments `replaced`; `imported`: Unsloth was imported first."""
    usual = {"train_dataset": prompts(), "processing_class": tokenizer(), "rollout_func": scripted(), "scheme": scheme()}
    with pytest.MonkeyPatch.context() as patch:
        for name, value in variables:
            patch.setenv(name, value)
        if imported:
            patch.setattr(door, "GRPOTrainer", UnslothGRPOTrainer)
        door.UnslothSpanGRPOTrainer(policy(), args=config(folder, **options), **{**usual, **(replaced or {})})


def of_trl(folder):
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(trl_config, "GRPOTrainer", UnslothGRPOTrainer)
        trainer(folder)


CASES = {
    "trl or spanwise imported before unsloth": script(imported=False),
    "SpanGRPOTrainer of spanwise.engines.trl after `import unsloth`": of_trl,
    "loss_type='dppo_tv' under Unsloth": script(loss_type="dppo_tv"),
    "beta=0.1 with the usual loss_type under Unsloth": script(beta=0.1),
    "importance_sampling_level='block' under Unsloth": script(importance_sampling_level="block"),
    "a layout that cuts by log-probabilities under Unsloth": script(replaced={"scheme": CUTS}),
    "a critic under Unsloth": script(replaced={"critic": CriticConfig(learning_rate=1e-3)}),
    "UNSLOTH_GRPO_LOSS_AGGREGATION=prompt": script(variables=[("UNSLOTH_GRPO_LOSS_AGGREGATION", "prompt")]),
}

test = check(__doc__, CASES)
