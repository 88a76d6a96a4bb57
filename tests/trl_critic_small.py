"""The real trainer with a critic: scripted completions, two blocks with a reward each, tool output in between."""

from spanwise.modes.critic.config import CriticConfig
from spanwise.objective import Objective
from trl_small import LAYOUT, SAID_WITH_TOOLS, trainer

#: Blocks that are paid apart: a value for each.
PAIR = (
    Objective("correct", pays=("solution",), options={"verify": "exact"}),
    Objective("brier", pays=("confidence",), if_missing=-1.0),
)
#: One reward at the end: one value.
ONE = (Objective("correct", pays=LAYOUT.names, options={"verify": "exact"}),)
STEPS = {"max_steps": 3, "learning_rate": 1e-2, "optim": "adamw_torch", "num_generations": 4, "max_grad_norm": 1.0}


def with_critic(folder, critic=None, *, method="gae", objectives=PAIR, credit=None, extra=None, **options):
    """A trainer whose critic learns fast; `options` are those of TRL."""
    arguments = {"method": method, "objectives": objectives, "critic": critic or fast(), "credit": credit, **(extra or {})}
    return trainer(folder, scripts=SAID_WITH_TOOLS, tools=True, extra=arguments, **{**STEPS, **options})


def fast(**options):
    return CriticConfig(**{"learning_rate": 1e-2, **options})


def critic_lines(run):
    """What was logged of the critic, batch by batch, without clocks."""
    clocks = {"critic/seconds", "critic/share"}
    names = [{name for name in line if name.startswith("critic/")} - clocks for line in run.state.log_history]
    return [{name: line[name] for name in kept} for kept, line in zip(names, run.state.log_history, strict=True) if kept]


class Watched:
    def __init__(self, run):
        self.estimates, self.inputs, learn = [], [], run.critic.learn

        def watched(rows, streams, truncated_n, *, fit):
            estimate = learn(rows, streams, truncated_n, fit=fit)
            self.inputs.append((rows, streams))
            self.estimates.append(estimate)
            return estimate

        run.critic.learn = watched
