"""Every layout that is worth a look, valid by construction, as `config.rules` sees it; and why others cannot be."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property

from megatune.config.groups.performance import RecomputeSettings
from megatune.config.pipeline import holds_deepstack
from megatune.config.rules import check
from megatune.config.rules.layout import tensor_parallel_fits
from megatune.config.rules.problem import divisors, nearest
from megatune.config.settings import BatchSettings, ParallelSettings, Settings
from megatune.errors import Finding
from megatune.plan.changes.table import FREE
from megatune.plan.changes.variation import with_settings
from megatune.plan.search import recompute
from megatune.plan.search.candidate import Candidate, Refusal, SearchRequest

MOST_VIRTUAL_STAGES = 8
LARGEST_MICRO_BATCH = 32
NUM_RESHAPED = 12
# Virtual stages multiply messages, and ask for micro-batches in multiples of the stages: they must win clearly.
CLEARLY = 0.1
# Fewer tokens a process, and context parallelism exchanges more than it computes.
TOKENS_OF_A_CONTEXT_PART = 4096
# A layout of a user's own says what each stage holds; a search begins with equal shares.
_EVEN_STAGES = {
    "decoder_first_pipeline_num_layers": None,
    "decoder_last_pipeline_num_layers": None,
    "account_for_embedding_in_pipeline_split": False,
    "account_for_loss_in_pipeline_split": False,
    "pipeline_model_parallel_layout": None,
}


@dataclass(frozen=True, slots=True)
class CandidateLayout:
    """Sizes of each kind of parallelism; expert sizes are 1 for a dense model."""

    tp: int
    pp: int
    cp: int
    ep: int = 1
    etp: int = 1


@dataclass(frozen=True, slots=True)
class CandidateBatch:
    """How one process takes its rows of a step."""

    micro_batch: int
    accumulation: int


@dataclass(frozen=True)
class Space:
    """The candidates of a request. Groups of settings that many of them share are made once: keys of many caches."""

    request: SearchRequest
    _made: dict[tuple[CandidateLayout, int | None], ParallelSettings] = field(
        default_factory=dict, compare=False, repr=False
    )
    _batches: dict[CandidateBatch, BatchSettings] = field(default_factory=dict, compare=False, repr=False)

    @cached_property
    def tensor_sizes(self) -> list[int]:
        """Sizes that split the model and stay inside one machine."""
        request = self.request
        inside = request.world_size if self.one_machine else request.machine.gpus_per_node
        longest = inside if request.model.architecture.moe is None else max(1, self.cutoff)
        sizes = (size for size in divisors(inside) if size <= longest and request.world_size % size == 0)
        return [size for size in sizes if tensor_parallel_fits(request.model.architecture, size)]

    @property
    def one_machine(self) -> bool:
        """Whether the whole world is inside one machine."""
        return self.request.world_size <= self.request.machine.gpus_per_node

    @property
    def cutoff(self) -> int:
        return self.request.settings.data.cutoff_len

    def layouts(self) -> Iterator[CandidateLayout]:
        """Tensor, pipeline, context and expert parallelism, each a whole share of the world and of the model."""
        world, architecture = self.request.world_size, self.request.model.architecture
        for tp in self.tensor_sizes:
            for pp in divisors(world // tp):
                if pp > architecture.num_layers or not self.holds_deepstack(pp):
                    break
                for cp in divisors(world // (tp * pp)):
                    if not self._has_context(tp, cp) or self.request.rows % (world // (tp * pp * cp)):
                        continue
                    for ep, etp in self._experts(tp, pp):
                        yield CandidateLayout(tp, pp, cp, ep, etp)

    def holds_deepstack(self, pp: int, virtual: int | None = None) -> bool:
        """Return whether the first of even parts has the layers that a vision encoder's mergers feed."""
        sizes = {"pipeline_model_parallel_size": pp, "virtual_pipeline_model_parallel_size": virtual}
        return holds_deepstack(ParallelSettings.model_validate(sizes), self.request.model.architecture)

    def _has_context(self, tp: int, cp: int) -> bool:
        if cp == 1:
            return True
        whole_rows = self.request.settings.performance.attention_backend == "fused"
        if whole_rows and self._cp_comm_type(CandidateLayout(tp, 1, cp)) != "a2a":
            return False
        return self.cutoff >= cp * TOKENS_OF_A_CONTEXT_PART

    def _experts(self, tp: int, pp: int) -> Iterator[tuple[int, int]]:
        """Expert parallelism, with experts whole or cut as the rest of a layer is."""
        moe = self.request.model.architecture.moe
        if moe is None:
            yield 1, 1
            return
        for etp in sorted({1, tp}):
            if moe.moe_ffn_hidden_size % etp:
                continue
            for ep in divisors(moe.num_experts):
                if self.request.world_size % (ep * etp * pp) == 0:
                    yield ep, etp

    def batches(self, layout: CandidateLayout) -> list[CandidateBatch]:
        """Micro-batches that make up the global batch, the smallest first."""
        rows = self.request.rows * layout.tp * layout.pp * layout.cp // self.request.world_size
        return [CandidateBatch(size, rows // size) for size in divisors(rows) if size <= LARGEST_MICRO_BATCH]

    def virtual_stages(self, layout: CandidateLayout, batch: CandidateBatch) -> list[int]:
        """Return numbers of virtual stages that there are micro-batches for: those that split the layers evenly, the
        embedding and the loss counted as layers or not; two and four where none does."""
        num_layers = self.request.model.architecture.num_layers
        if layout.pp == 1 or batch.accumulation % layout.pp:
            return []
        most = min(MOST_VIRTUAL_STAGES, num_layers // layout.pp)
        even = [
            virtual
            for virtual in range(2, most + 1)
            if any((num_layers + counted) % (layout.pp * virtual) == 0 for counted in (0, 1, 2))
        ]
        found = even or [virtual for virtual in (2, 4) if virtual <= most]
        return [virtual for virtual in found if self.holds_deepstack(layout.pp, virtual)]

    def candidate(
        self,
        layout: CandidateLayout,
        batch: CandidateBatch,
        virtual: int | None,
        how: RecomputeSettings = recompute.NONE,
    ) -> Candidate:
        return Candidate(self.request.case(self.settings(layout, batch, virtual, how)))

    def settings(
        self, layout: CandidateLayout, batch: CandidateBatch, virtual: int | None, how: RecomputeSettings
    ) -> Settings:
        """Return the request's settings in this layout."""
        if batch not in self._batches:
            rows = {"per_device_train_batch_size": batch.micro_batch, "gradient_accumulation_steps": batch.accumulation}
            self._batches[batch] = self.request.settings.batch.model_copy(update=rows)
        parallel = self._parallel(layout, virtual)
        update = {"parallel": parallel, "batch": self._batches[batch], "recompute": how, "run": self._run}
        return self.request.settings.model_copy(update=update)

    def _parallel(self, layout: CandidateLayout, virtual: int | None) -> ParallelSettings:
        if found := self._made.get((layout, virtual)):
            return found
        dense, overlaps = self.request.model.architecture.moe is None, {}
        # On a CPU nothing runs beside the computing: the settings' own stay.
        if not self.request.machine.device.on_cpu:
            has_replicas = self.request.world_size > layout.tp * layout.pp * layout.cp
            overlaps = dict.fromkeys(("overlap_grad_reduce", "overlap_param_gather"), has_replicas)
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
        self._made[layout, virtual] = made = self.request.settings.parallel.model_copy(update=update)
        return made

    @cached_property
    def _run(self) -> object:
        processes = self.request.world_size if self.one_machine else None
        return self.request.settings.run.model_copy(update={"num_processes": processes})

    def _cp_comm_type(self, layout: CandidateLayout) -> str:
        """Return the settings' own where it can be, or a ring."""
        asked = self.request.settings.parallel.cp_comm_type
        heads = self.request.model.architecture.num_attention_heads
        return "p2p" if asked == "a2a" and heads % (layout.tp * layout.cp) else asked

    def exchanged(self, settings: Settings) -> Iterator[Settings]:
        """Yield the same layout with the other exchanges of context parallelism."""
        parallel = settings.parallel
        if parallel.context_parallel_size == 1 or settings.performance.attention_backend == "fused":
            return  # what there is for whole rows is a2a
        heads = self.request.model.architecture.num_attention_heads
        for kind in ("p2p", "all_gather", "a2a"):
            share = parallel.tensor_model_parallel_size * parallel.context_parallel_size if kind == "a2a" else 1
            if kind != parallel.cp_comm_type and heads % share == 0:
                yield settings.model_copy(update={"parallel": parallel.model_copy(update={"cp_comm_type": kind})})

    def dispatched(self, settings: Settings) -> Iterator[Settings]:
        """Yield the same layout with the other dispatcher of tokens to experts, where the user did not choose one."""
        experts, name = settings.experts, "moe_token_dispatcher_type"
        free = self.request.free and f"experts.{name}" not in self.request.written
        if self.request.model.architecture.moe is None or not free or experts.moe_shared_expert_overlap:
            return
        kind = "alltoall" if experts.moe_token_dispatcher_type == "allgather" else "allgather"
        yield settings.model_copy(update={"experts": experts.model_copy(update={name: kind})})

    def reshaped(self, settings: Settings) -> Iterator[Settings]:
        """Yield the same layout with other numbers of layers in the first and the last stage."""
        parallel, architecture = settings.parallel, self.request.model.architecture
        if parallel.pipeline_model_parallel_size == 1:
            return
        for embedding, loss in ((False, True), (True, True)):
            split = {"account_for_embedding_in_pipeline_split": embedding, "account_for_loss_in_pipeline_split": loss}
            shaped = parallel.model_copy(update=split)
            try:
                if not holds_deepstack(shaped, architecture):
                    continue
            except ValueError:  # too few layers for it
                continue
            yield settings.model_copy(update={"parallel": shaped})

    @property
    def policy(self) -> tuple[str, ...]:
        """What is valid and left out all the same."""
        devices = self.request.machine.gpus_per_node
        return (
            f"tensor parallelism stays inside a machine of {devices}",
            "sequence parallelism is on with tensor parallelism: it saves memory and costs nothing",
            f"context parallelism leaves each process {TOKENS_OF_A_CONTEXT_PART} tokens of a row or more",
            f"micro-batches of at most {LARGEST_MICRO_BATCH} rows, at most {MOST_VIRTUAL_STAGES} virtual stages",
            "experts are whole, or cut as the rest of a layer is",
            "the distributed optimizer and its overlaps are on, on GPUs",
            f"virtual stages are left out where a step without them takes at most {CLEARLY:.0%} longer",
            f"other sizes of first and last stages, and other cp_comm_type, are tried for {NUM_RESHAPED} layouts",
            f"experts' tokens are dispatched in the other way in the first {NUM_RESHAPED} layouts only",
        )


def with_free(request: SearchRequest) -> Settings:
    """Return the request's settings with everything on that costs nothing, but for what the user wrote, and for what
    the rules have something against. On a CPU, where none of it makes a step faster, the settings as they are."""
    settings = request.settings
    if not request.free or request.machine.device.on_cpu:
        return settings
    architecture = request.model.architecture
    before = set(check(settings, architecture))
    for path, value in FREE.items():
        if path in request.written or (architecture.moe is None and path.startswith("experts.")):
            continue
        changed = with_settings(settings, {path: value})
        if changed != settings and not set(check(changed, architecture)) - before:
            settings = changed
    return settings


# --- layouts that cannot be ------------------------------------------------------------------------------------------

_TP, _PP, _CP = "tensor_model_parallel_size", "pipeline_model_parallel_size", "context_parallel_size"
_EP, _ETP = "expert_model_parallel_size", "expert_tensor_parallel_size"


def refusals(space: Space) -> tuple[Refusal, ...]:
    """Group the layouts that the rules refuse by the first reason, the largest group first: of all the processes'
    layouts with tensor parallelism inside a machine."""
    examples: dict[str, Mapping[str, int]] = {}
    counts: Counter[str] = Counter()
    for what, layout in _impossible(space):
        examples.setdefault(what, layout)
        counts[what] += 1
    findings = {what: _finding(space, layout) for what, layout in examples.items()}
    return tuple(
        Refusal(what=what, why=findings[what].why, count=count, example=findings[what])
        for what, count in counts.most_common()
    )


def _impossible(space: Space) -> Iterator[tuple[str, Mapping[str, int]]]:
    """Yield layouts that cannot be, as settings, each with what is wrong."""
    request, architecture = space.request, space.request.model.architecture
    world = request.world_size
    inside = world if space.one_machine else request.machine.gpus_per_node
    for tp in (size for size in divisors(inside) if world % size == 0):
        for pp in divisors(world // tp):
            for cp in divisors(world // (tp * pp)):
                layout = {_TP: tp, _PP: pp, _CP: cp}
                if not tensor_parallel_fits(architecture, tp):
                    yield "tensor parallelism does not split the model evenly", layout
                elif pp > architecture.num_layers:
                    yield "more pipeline stages than layers", layout
                elif not space.holds_deepstack(pp):
                    yield "the first pipeline stage has fewer layers than deepstack mergers feed", layout
                elif request.rows % (world // (tp * pp * cp)):
                    yield "the global batch is not split evenly over the data-parallel processes", layout
                elif architecture.moe is not None:
                    yield from _impossible_experts(space, layout)


def _impossible_experts(space: Space, layout: Mapping[str, int]) -> Iterator[tuple[str, Mapping[str, int]]]:
    moe, world = space.request.model.architecture.moe, space.request.world_size
    assert moe is not None
    for etp in sorted({1, layout[_TP]}):
        for ep in divisors(world // layout[_PP]):
            experts = {**layout, _EP: ep, _ETP: etp}
            if moe.moe_ffn_hidden_size % etp:
                yield "expert tensor parallelism does not split the experts evenly", experts
            elif moe.num_experts % ep:
                yield "expert parallelism does not shard the experts evenly", experts
            elif world % (ep * etp * layout[_PP]):
                yield "the processes do not hold whole copies of the experts", experts


def _finding(space: Space, layout: Mapping[str, int]) -> Finding:
    """Return what the rules say about a layout, or, as no rule knows of a global batch, what is wrong with that."""
    request = space.request
    parallel = ParallelSettings.model_validate({**layout, "sequence_parallel": 1 < layout[_TP] <= space.cutoff})
    settings = with_settings(request.settings, {"run.num_processes": None}).model_copy(update={"parallel": parallel})
    origins = {f"parallel.{key}": "plan" for key in layout}
    found = check(settings, request.model.architecture, request.world_size, origins=origins)
    if about := next((finding for finding in found if finding.where), None):
        return replace(about, where="")
    dp = request.world_size // (layout[_TP] * layout[_PP] * layout[_CP])
    valid = nearest(request.rows, (max(request.rows // dp, 1) * dp, (request.rows // dp + 1) * dp))
    what = f"a global batch of {request.rows} rows on {dp} data-parallel processes"
    return Finding(what, "", "every process takes as many rows of a step", f"ask for a global batch of {valid}")
