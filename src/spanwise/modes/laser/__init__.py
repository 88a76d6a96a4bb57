"""A confidence without words (LaSeR): the probability of one reserved token after the end of an answer.

`config` has the rule, `score` what it changes in credit and the loss that teaches it, `logps` how it is read off a model and how
it travels where a trainer gives log-probabilities of rows alone (verl, SkyRL); `trl` is its part in TRL.
"""

from spanwise.modes.laser.config import Laser
from spanwise.modes.laser.score import class_weights, own_opinion, self_reward, verification_loss

__all__ = ["Laser", "class_weights", "own_opinion", "self_reward", "verification_loss"]
