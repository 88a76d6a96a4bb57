"""The mode laser (LaSeR): a model's confidence in its answer, read as the probability of a reserved token after the end.

`config` has the settings, `score` the score, its change of the credit, and the loss. `logps` reads the score from a model, or from
a trainer that only gives log-probabilities of rows (verl, SkyRL). `trl` is the part in TRL's trainer.
"""

from spanwise.modes.laser.config import Laser
from spanwise.modes.laser.score import class_weights, own_opinion, self_reward, verification_loss

__all__ = ["Laser", "class_weights", "own_opinion", "self_reward", "verification_loss"]
