"""Rules of the kernels that attend. Which of them the machine has is seen when a run starts."""

from __future__ import annotations

from collections.abc import Iterator

from megatune.config.rules.problem import Context, Problem, Rule


def whole_rows(context: Context) -> Iterator[Problem]:
    """cuDNN attends to whole rows of one document only."""
    settings = context.settings
    parallel = settings.parallel
    if settings.performance.attention_backend != "fused":
        return
    fix = "write attention_backend: auto, or flash"
    if settings.packing:
        why = "cuDNN's attention is used for rows of one document only; packed rows need flash attention"
        yield Problem(("attention_backend", "packing"), "attention_backend: fused and packing: true", why, fix)
    if parallel.context_parallel_size > 1 and parallel.cp_comm_type != "a2a":
        what = f"attention_backend: fused and cp_comm_type {parallel.cp_comm_type}"
        why = "cuDNN's attention is used for whole rows only, and each process has a part of the row's queries"
        fix = f"{fix}; or cp_comm_type: a2a, which attends to whole rows"
        yield Problem(("attention_backend", "cp_comm_type", "context_parallel_size"), what, why, fix)


RULES: tuple[Rule, ...] = (whole_rows,)
