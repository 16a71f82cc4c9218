"""Devices, links and well-known models, by name."""

from megatune.plan.catalogue.find import (
    cpu_machine,
    device_by_driver_name,
    device_names,
    find_machine,
    machine_assumptions,
)
from megatune.plan.catalogue.models import MODELS, find_model

__all__ = [
    "MODELS",
    "cpu_machine",
    "device_by_driver_name",
    "device_names",
    "find_machine",
    "find_model",
    "machine_assumptions",
]
