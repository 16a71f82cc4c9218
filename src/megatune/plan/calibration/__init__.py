"""Factors that correct plans on a machine, as files, and how they are fitted to measured runs (`calibration.fit`)."""
