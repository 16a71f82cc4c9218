"""Rules of optimizer, precision, recomputation and kernels.

Whether the machine has the kernels is checked when a run starts.
"""

from __future__ import annotations

import math
from collections.abc import Iterator

from megatune.config.kernels import te_obstacle
from megatune.config.pipeline import pipeline_chunks
from megatune.config.rules.layout import tensor_parallel_fits
from megatune.config.rules.rule import Context, Problem, divisors, nearest, needs_of
from megatune.errors import with_article
from megatune.families import FAMILIES
from megatune.families.weights import Slice, Stack, engine_shape, layers_of
from megatune.references import assign, ref, remove, write

_MODULES, _BACKEND = "recompute_modules", "attention_backend"
_FP8_MULTIPLE = 16  # required by the kernels of cuBLAS and torch


def groups_of_layers(context: Context) -> Iterator[Problem]:
    """With uniform the groups of recomputed layers divide every stage."""
    recompute, architecture = context.settings.recompute, context.architecture
    count = recompute.recompute_num_layers
    if recompute.recompute_granularity != "full" or recompute.recompute_method == "block" or not count:
        return
    if architecture is None:
        return
    try:
        chunks = pipeline_chunks(context.settings.parallel, architecture.num_layers)
    except ValueError:  # reported by another rule
        return
    uneven = next((chunk.num_layers for chunk in chunks if chunk.num_layers % count), None)
    if uneven is not None:
        sizes = divisors(math.gcd(*(chunk.num_layers for chunk in chunks)))
        what = f"{ref('recompute_num_layers', count)} does not divide the {uneven} layers of a stage"
        why = "uniform recomputes layers in groups of that size"
        valid = nearest(count, sizes)
        fix = f"{write('recompute_num_layers', valid)}, the nearest that does, or {assign('recompute_method', 'block')}"
        yield Problem(("recompute_num_layers", "recompute_method"), what, why, fix)


def modules(context: Context) -> Iterator[Problem]:
    """Recomputed modules exist in the model, and can be recomputed."""
    recompute, architecture, experts = context.settings.recompute, context.architecture, context.settings.experts
    if recompute.recompute_granularity != "selective":
        return
    chosen = set(recompute.recompute_modules)
    absent: dict[str, str] = {}
    if architecture is not None:
        if architecture.mla is None:
            absent["mla_up_proj"] = "has no latent attention"
        if architecture.moe is None:
            absent |= dict.fromkeys(("moe", "moe_act", "shared_experts"), "has no experts")
        elif not architecture.moe.shared_expert_intermediate_size:
            absent["shared_experts"] = "has no shared experts"
        for module in sorted(chosen & absent.keys()):
            what = f"{ref(_MODULES)} has {module}, and {with_article(architecture.model_type)} {absent[module]}"
            yield Problem((_MODULES,), what, "", f"remove {module}")
    for module, needs, wanted in (
        ("moe_act", "moe_grouped_gemm", True),
        ("shared_experts", "moe_shared_expert_overlap", False),
    ):
        if module in chosen - absent.keys() and getattr(experts, needs) is not wanted:
            what = f"{ref(_MODULES)} has {module} with {assign(needs, not wanted)}"
            fix = f"remove {module}, or {write(needs, wanted)}"
            yield Problem((_MODULES, needs), what, "", fix)


def whole_rows(context: Context) -> Iterator[Problem]:
    """cuDNN's attention supports whole rows of one sequence only."""
    settings, parallel = context.settings, context.settings.parallel
    if settings.performance.attention_backend != "fused":
        return
    fix = write(_BACKEND, "auto", "flash")
    if settings.packing:
        why = "cuDNN's attention supports rows of one sequence only; packed rows need flash attention"
        yield Problem((_BACKEND, "packing"), f"{assign(_BACKEND, 'fused')} and {assign('packing', True)}", why, fix)
    if parallel.context_parallel_size > 1 and parallel.cp_comm_type != "a2a":
        what = f"{assign(_BACKEND, 'fused')} and {ref('cp_comm_type', parallel.cp_comm_type)}"
        why = "cuDNN's attention supports whole rows only, and each process has a part of the row's queries"
        fix = f"{fix}; or {assign('cp_comm_type', 'a2a')}, which attends to whole rows"
        yield Problem((_BACKEND, "cp_comm_type", "context_parallel_size"), what, why, fix)


def transformer_engine(context: Context) -> Iterator[Problem]:
    """Transformer Engine's layers support the model and its training."""
    settings, architecture = context.settings, context.architecture
    if settings.performance.transformer_impl != "transformer_engine" or architecture is None:
        return
    if why := te_obstacle(settings, architecture):
        what = f"{assign('transformer_impl', 'transformer_engine')} with {with_article(architecture.model_type)}"
        yield Problem(("transformer_impl",), what, why, write("transformer_impl", "native", "auto"))


def fp8_sides(context: Context) -> Iterator[Problem]:
    """The sizes of matrices that are multiplied in 8-bit floats are supported by the kernels."""
    architecture, parallel = context.architecture, context.settings.parallel
    tp, name = parallel.tensor_model_parallel_size, "tensor_model_parallel_size"
    if context.settings.precision.fp8 is None or architecture is None or not tensor_parallel_fits(architecture, tp):
        return
    for weight in FAMILIES[architecture.model_type].weight_map(architecture):
        if weight.stack is not Stack.DECODER or weight.per_expert or not weight.is_matrix:
            continue
        rows, columns = engine_shape(weight, architecture, Slice(tp))
        if layers_of(weight, architecture) and (rows % _FP8_MULTIPLE or columns % _FP8_MULTIPLE):
            layer = weight.engine.removesuffix(".weight").rpartition(".")[2]
            what = f"{ref('fp8')} with {layer} of {rows} × {columns} on each process"
            why = f"8-bit matrix products need sizes that are multiples of {_FP8_MULTIPLE}"
            fix = f"{remove('fp8')}, or write a smaller {ref(name)}" if tp > 1 else remove("fp8")
            yield Problem(("fp8", *([name] if tp > 1 else [])), what, why, fix)
            return


RULES = (
    needs_of("optimizer", "precision", "recompute", "performance"),
    groups_of_layers,
    modules,
    whole_rows,
    transformer_engine,
    fp8_sides,
)
