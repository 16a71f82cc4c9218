"""Patches of Megatron-Core: names of its modules that this engine sets, each with its reason and what it relies on.

model.py has those that a model needs, optimizer.py those of the optimizer; nothing else of the engine sets a name of
Megatron-Core. (device.py replaces calls of torch on a machine without a GPU.)

A patch relies on functions of Megatron-Core: those that it replaces, and those that read what it sets. Their sources
were read; a digest of each says of which text, from which version on. tests/engine/test_patches.py compares them with
what is installed.
"""

from __future__ import annotations

import importlib
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

# The versions whose sources were read.
VERSIONS = ("0.16.1", "0.17.1", "0.18.2", "0.19.2")


@dataclass(frozen=True, slots=True)
class Patch:
    """Names that are set in one module of Megatron-Core.

    Attributes:
        reason: why Megatron-Core's own do not serve.
        relies_on: functions and classes as MODULE:NAME, each with the digests of its source, by the first version that
            has this source.
    """

    module: str
    names: tuple[str, ...]
    reason: str
    relies_on: Mapping[str, Mapping[str, str]]

    def set(self, **values: Any) -> None:
        """Set all of the names."""
        assert set(values) == set(self.names), f"{self.module}: {set(values) ^ set(self.names)}"
        module = importlib.import_module(self.module)
        for name, value in values.items():
            setattr(module, name, value)

    def define(self, **values: Any) -> None:
        """Set those of the names that the module does not have."""
        module = importlib.import_module(self.module)
        self.set(**{name: getattr(module, name, value) for name, value in values.items()})
