"""Settings that say something beside another one only."""

from __future__ import annotations

from collections.abc import Callable, Iterator

from megatune.architecture import Architecture
from megatune.config.settings import Settings, all_settings
from megatune.plan.changes.variation import setting_of

EXPERTS = "moe"  # needed: a model with experts


Condition = Callable[[Settings, Architecture | None], bool]


def _has_experts(settings: Settings, architecture: Architecture | None) -> bool:
    return architecture is None or architecture.moe is not None


# A setting, what it needs as a user writes it, or EXPERTS, and whether that is there.
_NEEDS: tuple[tuple[str, str, Condition], ...] = (
    ("optimizer.sgd_momentum", "optimizer: sgd", lambda s, _: s.optimizer.optimizer == "sgd"),
    *(
        (f"optimizer.{name}", "optimizer: adam", lambda s, _: s.optimizer.optimizer == "adam")
        for name in ("adam_beta1", "adam_beta2", "adam_epsilon")
    ),
    ("optimizer.num_train_epochs", "max_steps: -1", lambda s, _: s.optimizer.max_steps <= 0),
    ("parallel.overlap_p2p_comm", "virtual_pipeline_model_parallel_size: 2",
     lambda s, _: bool(s.parallel.virtual_stages)),
    ("parallel.cp_comm_type", "context_parallel_size: 2", lambda s, _: s.parallel.context_parallel_size > 1),
    ("recompute.recompute_modules", "recompute_granularity: selective",
     lambda s, _: s.recompute.recompute_granularity == "selective"),
    ("performance.manual_gc_interval", "manual_gc: true", lambda s, _: s.performance.manual_gc),
    ("checkpoint.save_steps", "save_strategy: steps", lambda s, _: s.checkpoint.save_strategy == "steps"),
    ("evaluation.eval_steps", "eval_strategy: steps", lambda s, _: s.evaluation.eval_strategy == "steps"),
    ("batch.per_device_eval_batch_size", "eval_strategy: steps", lambda s, _: s.evaluation.eval_strategy != "no"),
    ("experts.moe_aux_loss_coeff", "moe_router_load_balancing_type: aux_loss",
     lambda s, _: s.experts.moe_router_load_balancing_type in ("aux_loss", "seq_aux_loss")),
    ("experts.moe_router_load_balancing_type", "moe_aux_loss_coeff: 0.001",
     lambda s, _: s.experts.moe_aux_loss_coeff > 0
     or s.experts.moe_router_load_balancing_type in ("sinkhorn", "none")),
    *((path, EXPERTS, _has_experts) for path in all_settings() if path.startswith(("experts.", "parallel.expert_"))),
)  # fmt: skip


def without_effect(
    settings: Settings, written: set[str], architecture: Architecture | None
) -> Iterator[tuple[str, str]]:
    """Yield settings that were written and do nothing, each with what it needs.

    Args:
        written: "group.name" of what a user wrote.
        architecture: None where the model is not known.
    """
    for path, needs, are_met in _NEEDS:
        if path in written and setting_of(settings, path) is not None and not are_met(settings, architecture):
            yield path, needs
