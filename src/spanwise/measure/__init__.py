"""From rollouts to figures: calibration, accuracy, refusals."""

from spanwise.measure.calibration import auroc, brier, ece, figures

__all__ = ["auroc", "brier", "ece", "figures"]
