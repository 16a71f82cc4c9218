"""Answers where Megatron-Core asks Transformer Engine for something although it is not installed."""

from __future__ import annotations

import contextlib
from typing import Any

from megatron.core.tensor_parallel import random


class _NoFp8:
    """What Transformer Engine's FP8GlobalStateManager says where nothing computes in fp8."""

    @staticmethod
    def is_fp8_enabled() -> bool:
        return False


def answer() -> None:
    """Give the recomputation of single modules the names that it uses whether or not anything is in fp8."""
    if hasattr(random, "FP8GlobalStateManager"):
        return
    module: Any = random
    module.FP8GlobalStateManager = _NoFp8
    module.activation_recompute_forward = module.fp8_autocast = lambda **unused: contextlib.nullcontext()
