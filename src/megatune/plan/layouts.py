"""Generates the candidate layouts of a search, which are valid by `config.rules`, and the reasons against others."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from functools import cached_property, lru_cache
from typing import Any, NamedTuple

from megatune.architecture import Architecture
from megatune.config.groups.parallel import ExpertSettings
from megatune.config.groups.performance import RecomputeSettings
from megatune.config.pipeline import holds_deepstack
from megatune.config.rules import check
from megatune.config.rules.layout import tensor_parallel_fits
from megatune.config.rules.rule import divisors, nearest
from megatune.config.settings import BatchSettings, ParallelSettings, Settings, with_settings
from megatune.errors import Finding
from megatune.plan.case import Case
from megatune.plan.changes import FREE
from megatune.plan.estimate import Estimate

MOST_VIRTUAL_STAGES = 8
LARGEST_MICRO_BATCH = 32
NUM_RESHAPED = 12
# Virtual stages multiply messages and need micro-batches in multiples of the stages: they must save more than this.
CLEARLY = 0.1
# With fewer tokens per process, context parallelism communicates more than it computes.
TOKENS_OF_A_CONTEXT_PART = 4096
# A search begins with even stages.
_EVEN_STAGES = {
    "decoder_first_pipeline_num_layers": None,
    "decoder_last_pipeline_num_layers": None,
    "account_for_embedding_in_pipeline_split": False,
    "account_for_loss_in_pipeline_split": False,
    "pipeline_model_parallel_layout": None,
}

# Variants of a layout that are tried after the search. The best of each row is the start of the next.
_DISPATCHER = "experts.moe_token_dispatcher_type"
_SPLIT = "parallel.account_for_{}_in_pipeline_split"
VARIANTS: tuple[list[Mapping[str, Any]], ...] = (
    [{"parallel.cp_comm_type": kind} for kind in ("p2p", "all_gather", "a2a")],
    [{_DISPATCHER: kind} for kind in ("alltoall", "allgather")],
    [{_SPLIT.format("embedding"): embedding, _SPLIT.format("loss"): True} for embedding in (False, True)],
)

# Ways to recompute activations.
NO_RECOMPUTE = RecomputeSettings()
FULL_RECOMPUTE = RecomputeSettings(recompute_granularity="full", recompute_method="uniform", recompute_num_layers=1)


@dataclass(frozen=True, slots=True, kw_only=True)
class SearchRequest:
    """The input of a search.

    Attributes:
        case: the model, its rows, the machines, and the settings that are not searched.
        global_batch_size: rows of a step, which every layout keeps.
        keep: number of layouts to rank.
        written: settings that the user set, by "group.name", which `with_free` keeps.
        free: whether to turn on settings without a cost, see `with_free`.
        below: an upper limit in seconds for the layouts to find; if it is finite, no frontier is computed.
    """

    case: Case
    global_batch_size: int
    keep: int = 20
    written: frozenset[str] = frozenset()
    free: bool = True
    below: float = math.inf


class CandidateLayout(NamedTuple):
    """Parallel sizes; those of experts are 1 for a dense model."""

    tp: int
    pp: int
    cp: int
    ep: int = 1
    etp: int = 1


class CandidateBatch(NamedTuple):
    """Micro-batch size and gradient accumulation of one process."""

    micro_batch: int
    accumulation: int


class Space:
    """The candidates of a request. They share groups of settings, which are keys of many caches, where possible."""

    def __init__(self, request: SearchRequest) -> None:
        self.request, self.settings, self.world = request, request.case.settings, request.case.world_size
        self.architecture, self.machine = request.case.model.architecture, request.case.machine
        self.cutoff = self.settings.data.cutoff_len
        self.one_machine = self.world <= self.machine.gpus_per_node
        self.selective = selective(self.architecture, self.settings.experts)
        self._parallels: dict[tuple[CandidateLayout, int | None], ParallelSettings] = {}
        self._batches: dict[CandidateBatch, BatchSettings] = {}
        self._ends: dict[tuple[CandidateLayout, CandidateBatch, int | None], tuple[Estimate, Estimate]] = {}

    def layouts(self) -> Iterator[CandidateLayout]:
        """Yield the valid layouts within the policy."""
        for layout, problem in self.all_layouts:
            too_wide = self.architecture.moe is not None and layout.tp > max(1, self.cutoff)
            if not problem and not too_wide and self._has_context(layout):
                yield layout

    @cached_property
    def all_layouts(self) -> list[tuple[CandidateLayout, str]]:
        """All layouts with tensor parallelism inside a machine, each with its problem, "" for none; experts are whole,
        or split as the rest of a layer."""
        return list(self._all_layouts())

    def _all_layouts(self) -> Iterator[tuple[CandidateLayout, str]]:
        for tp in divisors(self.world if self.one_machine else self.machine.gpus_per_node):
            for pp in divisors(self.world // tp) if self.world % tp == 0 else ():
                for cp in divisors(self.world // (tp * pp)):
                    layout = CandidateLayout(tp, pp, cp)
                    if (problem := self._problem(layout)) or self.architecture.moe is None:
                        yield layout, problem
                        continue
                    for etp in sorted({1, tp}):
                        for ep in divisors(self.world // pp):
                            layout = CandidateLayout(tp, pp, cp, ep, etp)
                            yield layout, self._problem_of_experts(layout)

    def _problem(self, layout: CandidateLayout) -> str:
        """Return the problem of a layout without its experts, "" for none."""
        if not tensor_parallel_fits(self.architecture, layout.tp):
            return "tensor parallelism does not split the model evenly"
        if layout.pp > self.architecture.num_layers:
            return "more pipeline stages than layers"
        delta = self.architecture.delta
        if layout.cp > 1 and delta is not None and delta.num_key_heads % (layout.tp * layout.cp):
            return "context parallelism does not split the key heads of gated delta nets evenly"
        if not _holds_deepstack(self.architecture, layout.pp, None):
            return "the first pipeline stage has fewer layers than deepstack mergers feed"
        if self.request.global_batch_size % (self.world // (layout.tp * layout.pp * layout.cp)):
            return "the global batch is not split evenly over the data-parallel processes"
        return ""

    def _problem_of_experts(self, layout: CandidateLayout) -> str:
        moe = self.architecture.moe
        assert moe is not None
        if moe.moe_ffn_hidden_size % layout.etp:
            return "expert tensor parallelism does not split the experts evenly"
        if moe.num_experts % layout.ep:
            return "expert parallelism does not shard the experts evenly"
        if self.world % (layout.ep * layout.etp * layout.pp):
            return "the processes do not hold whole copies of the experts"
        return ""

    def _has_context(self, layout: CandidateLayout) -> bool:
        """Return whether context parallelism leaves each process enough tokens of a row, and a kernel supports it."""
        if layout.cp == 1:
            return True
        whole_rows = self.settings.performance.attention_backend == "fused"
        if whole_rows and self._cp_comm_type(layout) != "a2a":
            return False
        if self.architecture.bidirectional_images and self.architecture.num_attention_heads % (layout.tp * layout.cp):
            return False
        return self.cutoff >= layout.cp * TOKENS_OF_A_CONTEXT_PART

    def batches(self, layout: CandidateLayout) -> list[CandidateBatch]:
        """Return the micro-batch sizes that divide the global batch, ascending."""
        rows = self.request.global_batch_size * layout.tp * layout.pp * layout.cp // self.world
        return [CandidateBatch(size, rows // size) for size in divisors(rows) if size <= LARGEST_MICRO_BATCH]

    def virtual_stages(self, layout: CandidateLayout, batch: CandidateBatch) -> tuple[int, ...]:
        """Return the numbers of virtual stages that the micro-batches allow."""
        has_micro_batches = layout.pp > 1 and batch.accumulation % layout.pp == 0
        return _virtual_stages(self.architecture, layout.pp) if has_micro_batches else ()

    def ends(self, layout: CandidateLayout, batch: CandidateBatch, virtual: int | None) -> tuple[Estimate, Estimate]:
        """Return the cached estimates of the request's model in this layout: without recomputation, and with full
        recomputation."""
        key = layout, batch, virtual
        if key not in self._ends:
            plain = self.estimate(self.settings_of(*key))
            self._ends[key] = plain, plain.with_recompute(FULL_RECOMPUTE)
        return self._ends[key]

    def estimate(self, settings: Settings) -> Estimate:
        """Return the estimate of the request's case with other settings."""
        return Estimate(replace(self.request.case, settings=settings))

    def settings_of(self, layout: CandidateLayout, batch: CandidateBatch, virtual: int | None) -> Settings:
        """Return the request's settings in this layout, without recomputation."""
        if batch not in self._batches:
            rows = {"per_device_train_batch_size": batch.micro_batch, "gradient_accumulation_steps": batch.accumulation}
            self._batches[batch] = self.settings.batch.model_copy(update=rows)
        parallel = self._parallel(layout, virtual)
        update = {"parallel": parallel, "batch": self._batches[batch], "recompute": NO_RECOMPUTE, "run": self._run}
        return self.settings.model_copy(update=update)

    def _parallel(self, layout: CandidateLayout, virtual: int | None) -> ParallelSettings:
        if found := self._parallels.get((layout, virtual)):
            return found
        dense, overlaps = self.architecture.moe is None, {}
        # On a CPU nothing overlaps with computation: the settings are kept.
        if not self.machine.device.on_cpu:
            reduces = self.world > layout.tp * layout.pp  # gradients, also over context-parallel ranks
            overlaps = dict.fromkeys(("overlap_grad_reduce", "overlap_param_gather"), reduces)
            overlaps["use_distributed_optimizer"] = True
        update = {
            **_EVEN_STAGES,
            **overlaps,
            "tensor_model_parallel_size": layout.tp,
            "pipeline_model_parallel_size": layout.pp,
            "virtual_pipeline_model_parallel_size": virtual,
            "sequence_parallel": 1 < layout.tp <= self.cutoff,
            "context_parallel_size": layout.cp,
            "expert_model_parallel_size": layout.ep,
            "expert_tensor_parallel_size": None if dense or layout.etp == layout.tp else layout.etp,
            "cp_comm_type": self._cp_comm_type(layout),
        }
        self._parallels[layout, virtual] = self.settings.parallel.model_copy(update=update)
        return self._parallels[layout, virtual]

    @cached_property
    def _run(self) -> object:
        processes = self.world if self.one_machine else None
        return self.settings.run.model_copy(update={"num_processes": processes})

    def _cp_comm_type(self, layout: CandidateLayout) -> str:
        """Return that of the settings if it is valid, or else a ring; all-to-all if images must stay whole."""
        kind = self.settings.parallel.cp_comm_type
        heads = self.architecture.num_attention_heads
        if self.architecture.bidirectional_images:
            return "a2a"
        return "p2p" if kind == "a2a" and heads % (layout.tp * layout.cp) else kind

    def variants(self, settings: Settings, changes: Iterable[Mapping[str, Any]]) -> Iterator[Settings]:
        """Yield the same layout with each of these changes, unless a rule refuses it, or the user chose the
        experts' dispatcher."""
        keeps_dispatcher = not self.request.free or _DISPATCHER in self.request.written
        known = set(check(settings, self.architecture, self.world))
        for each in changes:
            changed = with_settings(settings, each)
            if changed == settings or (keeps_dispatcher and _DISPATCHER in each):
                continue
            if not set(check(changed, self.architecture, self.world)) - known:
                yield changed

    @property
    def policy(self) -> tuple[str, ...]:
        """The valid layouts that are left out, as sentences."""
        devices = self.machine.gpus_per_node
        return (
            f"tensor parallelism stays inside a machine of {devices}",
            "sequence parallelism is on with tensor parallelism: it saves memory at no cost",
            f"context parallelism leaves each process at least {TOKENS_OF_A_CONTEXT_PART} tokens of a row",
            f"micro-batches of at most {LARGEST_MICRO_BATCH} rows, at most {MOST_VIRTUAL_STAGES} virtual stages",
            "experts are whole, or split as the rest of a layer",
            "the distributed optimizer and its overlaps are on, on GPUs",
            f"virtual stages are left out if a step without them takes at most {CLEARLY:.0%} longer",
            f"other sizes of first and last stages, and other cp_comm_type, are tried for {NUM_RESHAPED} layouts",
            f"experts' other token dispatcher is tried for the first {NUM_RESHAPED} layouts",
        )


@lru_cache(maxsize=1024)
def _holds_deepstack(architecture: Architecture, pp: int, virtual: int | None) -> bool:
    """Return whether the first of even stages has all layers that deepstack mergers feed."""
    sizes = {"pipeline_model_parallel_size": pp, "virtual_pipeline_model_parallel_size": virtual}
    return holds_deepstack(ParallelSettings.model_validate(sizes), architecture)


@lru_cache(maxsize=1024)
def _virtual_stages(architecture: Architecture, pp: int) -> tuple[int, ...]:
    """Return the numbers of virtual stages that split the layers evenly, with the embedding and the loss counted as
    layers or not; two and four if none does."""
    num_layers = architecture.num_layers
    possible = range(2, min(MOST_VIRTUAL_STAGES, num_layers // pp) + 1)
    even = [
        virtual for virtual in possible if any((num_layers + counted) % (pp * virtual) == 0 for counted in (0, 1, 2))
    ]
    found = even or [virtual for virtual in (2, 4) if virtual in possible]
    return tuple(virtual for virtual in found if _holds_deepstack(architecture, pp, virtual))


def with_free(request: SearchRequest) -> Settings:
    """Return the request's settings with all of `FREE` turned on that the user did not set and the rules allow; on a
    CPU, where none of it saves time, the settings unchanged."""
    settings, architecture = request.case.settings, request.case.model.architecture
    if not request.free or request.case.machine.device.on_cpu:
        return settings
    before = set(check(settings, architecture))
    for path, value in FREE.items():
        if path in request.written or (architecture.moe is None and path.startswith("experts.")):
            continue
        changed = with_settings(settings, {path: value})
        if changed != settings and not set(check(changed, architecture)) - before:
            settings = changed
    return settings


def selective(architecture: Architecture, experts: ExpertSettings) -> list[RecomputeSettings]:
    """Return the selective recomputations for a model: cheap modules, attention, the feed-forward, and unions."""
    moe = architecture.moe
    cheap = ["layernorm", *(["mla_up_proj"] if architecture.mla is not None else [])]
    cheapest = [*cheap, *(["moe_act"] if moe is not None and experts.moe_grouped_gemm else [])]
    ffn = [*(["mlp"] if moe is None or not all(moe.layers) else []), *(["moe"] if moe is not None else [])]
    attention = ["core_attn"]
    chosen = [cheapest, attention, cheapest + attention, ffn, cheap + ffn, cheap + ffn + attention]
    return [_selective(tuple(modules)) for modules in chosen]


@lru_cache(maxsize=64)
def _selective(modules: tuple[str, ...]) -> RecomputeSettings:
    return RecomputeSettings.model_validate({"recompute_granularity": "selective", "recompute_modules": list(modules)})


@lru_cache(maxsize=1024)
def block(num_layers: int) -> RecomputeSettings:
    """Return recomputation of the first layers of each chunk."""
    return RecomputeSettings(recompute_granularity="full", recompute_method="block", recompute_num_layers=num_layers)


@dataclass(frozen=True, slots=True, kw_only=True)
class Refusal:
    """A problem of invalid layouts, its reason, their number, and the finding of the rules about one of them."""

    what: str
    why: str
    count: int
    example: Finding


def refusals(space: Space) -> tuple[Refusal, ...]:
    """Group invalid layouts by their first problem, the largest group first."""
    groups: dict[str, list[CandidateLayout]] = {}
    for layout, what in space.all_layouts:
        if what:
            groups.setdefault(what, []).append(layout)
    found = []
    for what, layouts in sorted(groups.items(), key=lambda group: -len(group[1])):
        example = _finding(space, layouts[0])
        found.append(Refusal(what=what, why=example.why, count=len(layouts), example=example))
    return tuple(found)


def _finding(space: Space, layout: CandidateLayout) -> Finding:
    """Return the finding of the rules about a layout, or that about its global batch, which has no rule."""
    sizes = {
        "tensor_model_parallel_size": layout.tp,
        "pipeline_model_parallel_size": layout.pp,
        "context_parallel_size": layout.cp,
    }
    if layout.ep * layout.etp > 1:
        sizes |= {"expert_model_parallel_size": layout.ep, "expert_tensor_parallel_size": layout.etp}
    parallel = ParallelSettings.model_validate({**sizes, "sequence_parallel": 1 < layout.tp <= space.cutoff})
    settings = with_settings(space.settings, {"run.num_processes": None}).model_copy(update={"parallel": parallel})
    origins = {f"parallel.{key}": "plan" for key in sizes}
    found = check(settings, space.architecture, space.world, origins=origins)
    if about := next((finding for finding in found if finding.where), None):
        return replace(about, where="")
    rows, dp = space.request.global_batch_size, space.world // (layout.tp * layout.pp * layout.cp)
    valid = nearest(rows, (max(rows // dp, 1) * dp, (rows // dp + 1) * dp))
    what = f"a global batch of {rows} rows on {dp} data-parallel processes"
    return Finding(what, "", "data-parallel processes have equal numbers of rows", f"use a global batch of {valid}")
