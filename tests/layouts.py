"""Layouts that the tests of the engine and the bridge go through."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from megatune.config.settings import OptimizerSettings, ParallelSettings, PrecisionSettings, RunSettings, Settings


@dataclass(frozen=True)
class Layout:
    """How many ranks, and settings of `parallel` that are not their defaults."""

    world_size: int
    parallel: dict[str, Any] = field(default_factory=dict)

    @property
    def dp_size(self) -> int:
        return self.world_size // ParallelSettings(**self.parallel).model_parallel_size

    def settings(self, optimizer: dict[str, Any] | None = None, precision: dict[str, bool] | None = None) -> Settings:
        return Settings(
            # How long a rank waits for another one: less than a case may take.
            run=RunSettings(ddp_timeout=30),
            parallel=ParallelSettings(**self.parallel),
            optimizer=OptimizerSettings(**(optimizer or {})),
            precision=PrecisionSettings(**(precision or {})),
        )


_TP2 = {"tensor_model_parallel_size": 2}
_PP2 = {"pipeline_model_parallel_size": 2}
_VPP2 = {"virtual_pipeline_model_parallel_size": 2}
_SP = {"sequence_parallel": True}
_OVERLAPS = {"overlap_grad_reduce": True, "overlap_param_gather": True}
_FUSIONS = {"bias_activation_fusion": True, "apply_rope_fusion": True}

# Every family goes through these.
LAYOUTS: dict[str, Layout] = {
    "1": Layout(1),
    "tp2": Layout(2, _TP2),
    "tp2 sp": Layout(2, _TP2 | _SP),
    "pp2": Layout(2, _PP2),
    "pp2 vpp2": Layout(2, _PP2 | _VPP2),
    "dp2": Layout(2),
    "tp2 pp2 dp2 sp": Layout(8, _TP2 | _PP2 | _SP),
    "tp2 pp2 vpp2": Layout(4, _TP2 | _PP2 | _VPP2),
}

# One family goes through these.
MORE_LAYOUTS: dict[str, Layout] = {
    "tp4": Layout(4, {"tensor_model_parallel_size": 4}),
    "tp4 sp": Layout(4, {"tensor_model_parallel_size": 4} | _SP),
    "pp4": Layout(4, {"pipeline_model_parallel_size": 4}),
    "dp4": Layout(4),
    "dp2, whole optimizer": Layout(2, {"use_distributed_optimizer": False}),
    "dp2, grad overlap": Layout(2, {"overlap_grad_reduce": True}),
    "dp2, whole optimizer, grad overlap": Layout(2, {"use_distributed_optimizer": False, "overlap_grad_reduce": True}),
    "tp2 pp2 dp2 sp, overlaps, fusions": Layout(8, _TP2 | _PP2 | _SP | _OVERLAPS | _FUSIONS),
    "tp2 pp2 vpp2 dp2 sp, overlaps, fusions": Layout(8, _TP2 | _PP2 | _VPP2 | _SP | _OVERLAPS | _FUSIONS),
    "pp2 vpp2, no p2p overlap": Layout(2, _PP2 | _VPP2 | {"overlap_p2p_comm": False}),
}
