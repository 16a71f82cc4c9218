"""Layouts that the tests of the engine and the bridge go through.

Every layout is proved with one dense family and one with experts; every family in the layouts where its own modules and
weights are cut in other ways: FAMILY_LAYOUTS of each kind.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from megatune.config.groups.data import DataSettings
from megatune.config.groups.finetuning import FinetuningSettings
from megatune.config.groups.parallel import ExpertSettings
from megatune.config.groups.performance import PerformanceSettings, RecomputeSettings
from megatune.config.settings import OptimizerSettings, ParallelSettings, PrecisionSettings, RunSettings, Settings


@dataclass(frozen=True)
class Layout:
    """How many ranks, and settings of `parallel` and of other groups that are not their defaults; nothing is frozen.

    Attributes:
        packed: rows hold several samples.
    """

    world_size: int
    parallel: dict[str, Any] = field(default_factory=dict)
    experts: dict[str, Any] = field(default_factory=dict)
    recompute: dict[str, Any] = field(default_factory=dict)
    performance: dict[str, Any] = field(default_factory=dict)
    packed: bool = False

    @property
    def takes_experts(self) -> bool:
        """Whether a model with experts may have it: tensor parallelism needs sequence parallelism then."""
        return self.parallel.get("tensor_model_parallel_size", 1) == 1 or "sequence_parallel" in self.parallel

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
            experts=ExpertSettings(**self.experts),
            recompute=RecomputeSettings(**self.recompute),
            performance=PerformanceSettings(**self.performance),
            data=DataSettings(packing=self.packed),
            finetuning=FinetuningSettings(freeze_vision_tower=False, freeze_multi_modal_projector=False),
        )


_TP2 = {"tensor_model_parallel_size": 2}
_PP2 = {"pipeline_model_parallel_size": 2}
_VPP2 = {"virtual_pipeline_model_parallel_size": 2}
_SP = {"sequence_parallel": True}
_OVERLAPS = {"overlap_grad_reduce": True, "overlap_param_gather": True}
_FUSIONS = {"bias_activation_fusion": True, "apply_rope_fusion": True, "gradient_accumulation_fusion": True}
_CP2 = {"context_parallel_size": 2}
_EP2 = {"expert_model_parallel_size": 2}
_ETP1 = {"expert_tensor_parallel_size": 1}

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

FAMILY_LAYOUTS = ("1", "tp2 sp", "pp2 vpp2", "tp2 pp2 dp2 sp")
MORE_LAYOUTS: dict[str, Layout] = {
    "tp4": Layout(4, {"tensor_model_parallel_size": 4}),
    "tp4 sp": Layout(4, {"tensor_model_parallel_size": 4} | _SP),
    "pp4": Layout(4, {"pipeline_model_parallel_size": 4}),
    "dp4": Layout(4),
    "dp2, no distributed optimizer": Layout(2, {"use_distributed_optimizer": False}),
    "dp2, grad overlap": Layout(2, {"overlap_grad_reduce": True}),
    "dp2, no distributed optimizer, grad overlap": Layout(
        2, {"use_distributed_optimizer": False, "overlap_grad_reduce": True}
    ),
    "tp2 pp2 dp2 sp, overlaps, fusions": Layout(8, _TP2 | _PP2 | _SP | _OVERLAPS, performance=_FUSIONS),
    "tp2 pp2 vpp2 dp2 sp, overlaps, fusions": Layout(8, _TP2 | _PP2 | _VPP2 | _SP | _OVERLAPS, performance=_FUSIONS),
    "pp2 vpp2, no p2p overlap": Layout(2, _PP2 | _VPP2 | {"overlap_p2p_comm": False}),
}

# Context parallelism and packed rows.
SEQUENCE_LAYOUTS: dict[str, Layout] = {
    "cp2 p2p": Layout(2, _CP2 | {"cp_comm_type": "p2p"}),
    "cp2 all_gather": Layout(2, _CP2 | {"cp_comm_type": "all_gather"}),
    "cp2 a2a": Layout(2, _CP2 | {"cp_comm_type": "a2a"}),
    "cp2 tp2 sp": Layout(4, _CP2 | _TP2 | _SP),
    "cp2 pp2": Layout(4, _CP2 | _PP2),
    "packed": Layout(1, packed=True),
    "tp2 sp, packed": Layout(2, _TP2 | _SP, packed=True),
    "pp2, packed": Layout(2, _PP2, packed=True),
    "cp2, packed": Layout(2, _CP2, packed=True),
}

FAMILY_SEQUENCE_LAYOUTS = ("cp2 tp2 sp", "cp2, packed")
MORE_SEQUENCE_LAYOUTS: dict[str, Layout] = {
    "cp4 p2p": Layout(4, {"context_parallel_size": 4, "cp_comm_type": "p2p"}),
    "cp4 all_gather": Layout(4, {"context_parallel_size": 4, "cp_comm_type": "all_gather"}),
    "cp4 a2a": Layout(4, {"context_parallel_size": 4, "cp_comm_type": "a2a"}),
    "cp2 dp2": Layout(4, _CP2),
    "cp2 pp2 vpp2 tp2 sp": Layout(8, _CP2 | _PP2 | _VPP2 | _TP2 | _SP),
    "cp2 all_gather, packed": Layout(2, _CP2 | {"cp_comm_type": "all_gather"}, packed=True),
    "cp2 a2a, packed": Layout(2, _CP2 | {"cp_comm_type": "a2a"}, packed=True),
    "cp4, packed": Layout(4, {"context_parallel_size": 4}, packed=True),
    "cp2 pp2 vpp2 tp2 sp, packed": Layout(8, _CP2 | _PP2 | _VPP2 | _TP2 | _SP, packed=True),
    "cp2, packed, overlaps, fusions": Layout(4, _CP2 | _OVERLAPS, performance=_FUSIONS, packed=True),
    "cp2, packed, recompute full": Layout(2, _CP2, recompute={"recompute_granularity": "full"}, packed=True),
    "unfused attention": Layout(1, performance={"attention_backend": "unfused"}),
    "unfused attention, packed": Layout(1, performance={"attention_backend": "unfused"}, packed=True),
    "plain norms": Layout(1, performance={"rms_norm_fusion": False}),
    "plain cross-entropy, tp2 sp": Layout(2, _TP2 | _SP, performance={"cross_entropy_loss_fusion": False}),
}

# Of families with experts.
EXPERT_LAYOUTS: dict[str, Layout] = {
    "1": Layout(1),
    "tp2 sp": Layout(2, _TP2 | _SP),
    "pp2": Layout(2, _PP2),
    "ep2": Layout(2, _EP2),
    "ep2 allgather": Layout(2, _EP2, experts={"moe_token_dispatcher_type": "allgather"}),
    "ep2 etp1 tp2 sp": Layout(2, _EP2 | _ETP1 | _TP2 | _SP),
    "ep2 pp2": Layout(4, _EP2 | _PP2),
    "ep4 dp4": Layout(4, {"expert_model_parallel_size": 4}),
    "ep2 pp2 vpp2": Layout(4, _EP2 | _PP2 | _VPP2),
    "ep2, packed": Layout(2, _EP2, packed=True),
    "cp2 ep2, packed": Layout(2, _CP2 | _EP2, packed=True),
}

FAMILY_EXPERT_LAYOUTS = ("1", "ep2 etp1 tp2 sp", "ep2 pp2", "ep2, packed")
MORE_EXPERT_LAYOUTS: dict[str, Layout] = {
    "ep2 etp2 tp2 sp": Layout(4, _EP2 | _TP2 | _SP),
    "etp1 tp2 sp": Layout(2, _ETP1 | _TP2 | _SP),
    "etp2": Layout(2, {"expert_tensor_parallel_size": 2}),
    "ep2 dp4": Layout(4, _EP2),
    "ep4 allgather": Layout(4, {"expert_model_parallel_size": 4}, experts={"moe_token_dispatcher_type": "allgather"}),
    "ep2 etp1 tp2 sp pp2 dp2": Layout(8, _EP2 | _ETP1 | _TP2 | _SP | _PP2),
    "ep2 etp1 tp2 sp allgather": Layout(
        2, _EP2 | _ETP1 | _TP2 | _SP, experts={"moe_token_dispatcher_type": "allgather"}
    ),
    "ep2, no grouped GEMM": Layout(2, _EP2, experts={"moe_grouped_gemm": False}),
    "ep2 dp2, no distributed optimizer": Layout(2, _EP2 | {"use_distributed_optimizer": False}),
    "ep2 pp2 dp4, overlaps, fusions": Layout(8, _EP2 | _PP2 | _OVERLAPS, performance=_FUSIONS),
    "ep2 pp2 vpp2 dp4, overlaps, fusions, recompute full": Layout(
        8, _EP2 | _PP2 | _VPP2 | _OVERLAPS, performance=_FUSIONS, recompute={"recompute_granularity": "full"}
    ),
    "cp2 ep2 tp2 sp etp1 pp2, packed": Layout(8, _CP2 | _EP2 | _TP2 | _SP | _ETP1 | _PP2, packed=True),
}
