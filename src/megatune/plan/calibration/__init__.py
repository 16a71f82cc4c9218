"""Factors between what was planned and what was measured, fitted to runs and kept for the next plan."""

from megatune.plan.calibration.fit import CalibrationReport, calibrate
from megatune.plan.calibration.store import calibration_for, default_path, read, write

__all__ = ["CalibrationReport", "calibrate", "calibration_for", "default_path", "read", "write"]
