"""A confidence without words (LaSeR): the probability of one reserved token after the end of an answer.

`config` has the rule, `score` the change of credit and the loss, `logps` reads the score from a model or from a trainer that gives
log-probabilities of rows alone (verl, SkyRL), and `trl` is its part in TRL.
"""

from spanwise.modes.laser.config import Laser
from spanwise.modes.laser.score import class_weights, own_opinion, self_reward, verification_loss

__all__ = ["Laser", "class_weights", "own_opinion", "self_reward", "verification_loss"]
