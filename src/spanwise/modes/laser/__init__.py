"""The mode laser (LaSeR): a model's confidence from the probability of a reserved token."""

from spanwise.modes.laser.config import Laser
from spanwise.modes.laser.score import class_weights, own_opinion, self_reward, verification_loss

__all__ = ["Laser", "class_weights", "own_opinion", "self_reward", "verification_loss"]
