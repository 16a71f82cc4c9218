"""Rules of the parallel layout: what divides what, and which overlaps go together."""

from __future__ import annotations

from collections.abc import Iterator

from megatune.architecture import Architecture
from megatune.config.rules.problem import Context, Problem, Rule, divisors, either, multiples_around, nearest

_TP = "parallel.tensor_model_parallel_size"
_PP = "parallel.pipeline_model_parallel_size"
_VPP = "parallel.virtual_pipeline_model_parallel_size"


def tensor_parallel_fits(architecture: Architecture, size: int) -> bool:
    """Whether tensor parallelism of this size can split the model's heads and feed-forward."""
    groups = architecture.num_query_groups
    return (
        architecture.num_attention_heads % size == 0
        and architecture.ffn_hidden_size % size == 0
        and (groups % size == 0 or size % groups == 0)
    )


def tensor_parallel(context: Context) -> Iterator[Problem]:
    """Heads, key/value heads and the feed-forward are split over tensor-parallel processes."""
    architecture, tp = context.architecture, context.settings.parallel.tensor_model_parallel_size
    if architecture is None or tensor_parallel_fits(architecture, tp):
        return
    heads, groups, ffn = architecture.num_attention_heads, architecture.num_query_groups, architecture.ffn_hidden_size
    shares = (
        (heads, "attention heads", heads % tp),
        (groups, "key/value heads", groups % tp and tp % groups),
        (ffn, "MLP channels", ffn % tp),
    )
    unequal = [f"{number} {name}" for number, name, remainder in shares if remainder]
    valid = nearest(tp, (size for size in divisors(heads) if tensor_parallel_fits(architecture, size)))
    yield Problem(
        (_TP,),
        f"tensor_model_parallel_size {tp} does not split the model's {', '.join(unequal)}",
        "each process takes an equal, whole share; key/value heads may also be shared by several processes",
        f"write tensor_model_parallel_size: {valid}, the nearest that this model allows",
    )


def pipeline_layers(context: Context) -> Iterator[Problem]:
    """Every pipeline stage, or every virtual stage, holds the same number of layers."""
    architecture, parallel = context.architecture, context.settings.parallel
    if architecture is None or architecture.num_layers % parallel.num_model_chunks == 0:
        return
    layers, pp = architecture.num_layers, parallel.pipeline_model_parallel_size
    vpp = parallel.virtual_pipeline_model_parallel_size
    why = "every stage holds the same number of layers"
    if layers % pp:
        what = f"pipeline_model_parallel_size {pp} does not divide the model's {layers} layers"
        sizes = [size for size in divisors(layers) if size > 1 and layers // size % (vpp or 1) == 0]
        valid = nearest(pp, sizes or divisors(layers))
        yield Problem((_PP,), what, why, f"write pipeline_model_parallel_size: {valid}, the nearest that does")
        return
    assert vpp is not None
    what = f"{pp} stages of {vpp} virtual stages cut the model's {layers} layers into unequal parts"
    sizes = [size for size in divisors(layers // pp) if size > 1]
    mend = (
        f"write virtual_pipeline_model_parallel_size: {nearest(vpp, sizes)}, the nearest that fits"
        if sizes
        else "remove virtual_pipeline_model_parallel_size: each stage holds one layer"
    )
    yield Problem((_VPP, _PP), what, why, mend)


def virtual_stages(context: Context) -> Iterator[Problem]:
    """Virtual stages interleave over at least two pipeline stages, in rounds of one micro-batch a stage."""
    parallel, batch = context.settings.parallel, context.settings.batch
    pp, vpp = parallel.pipeline_model_parallel_size, parallel.virtual_pipeline_model_parallel_size
    if vpp is None:
        return
    if pp < 2:
        what = f"virtual_pipeline_model_parallel_size {vpp} with pipeline_model_parallel_size {pp}"
        why = "virtual stages interleave the layers of several pipeline stages; there is one"
        yield Problem(
            (_VPP, _PP),
            what,
            why,
            "remove virtual_pipeline_model_parallel_size, or write pipeline_model_parallel_size: 2",
        )
        return
    steps = batch.gradient_accumulation_steps
    if steps % pp:
        what = f"gradient_accumulation_steps {steps} is not a multiple of pipeline_model_parallel_size {pp}"
        why = "with virtual stages, micro-batches go through the pipeline in rounds of one for each stage"
        mend = f"write gradient_accumulation_steps: {either(multiples_around(steps, pp))}"
        yield Problem(("batch.gradient_accumulation_steps", _VPP, _PP), what, why, mend)


def sequence_parallel(context: Context) -> Iterator[Problem]:
    """The sequence is split over the tensor-parallel processes, so there must be some, and tokens for each."""
    parallel, cutoff = context.settings.parallel, context.settings.data.cutoff_len
    tp = parallel.tensor_model_parallel_size
    if not parallel.sequence_parallel:
        return
    if tp == 1:
        yield Problem(
            ("parallel.sequence_parallel", _TP),
            "sequence_parallel: true with tensor_model_parallel_size 1",
            "it splits the sequence over the tensor-parallel processes; there is one",
            "remove sequence_parallel, or write tensor_model_parallel_size: 2",
        )
    elif cutoff < tp:
        what = f"cutoff_len {cutoff} is shorter than tensor_model_parallel_size {tp}"
        why = "sequence_parallel gives each tensor-parallel process a part of the sequence"
        yield Problem(
            ("data.cutoff_len", _TP, "parallel.sequence_parallel"), what, why, f"write cutoff_len: {tp} or more"
        )


def world(context: Context) -> Iterator[Problem]:
    """The world holds whole copies of the model."""
    parallel, asked = context.settings.parallel, context.settings.run.num_processes
    size = parallel.model_parallel_size
    num_processes = asked if context.world_size is None else context.world_size
    if num_processes is None or num_processes % size == 0:
        return
    tp, pp = parallel.tensor_model_parallel_size, parallel.pipeline_model_parallel_size
    key = "num_processes" if asked == num_processes else "the number of processes"
    valid = either(multiples_around(num_processes, size))
    yield Problem(
        ("run.num_processes", _TP, _PP),
        f"{num_processes} processes are not a multiple of the {size} that one copy of the model takes",
        f"tensor_model_parallel_size {tp} times pipeline_model_parallel_size {pp} is {size}",
        f"write num_processes: {valid}" if key == "num_processes" else f"start {valid} processes, or change the layout",
    )


def overlap_param_gather(context: Context) -> Iterator[Problem]:
    """Megatron-Core gathers parameters early only where the optimizer is sharded and gradients are reduced early."""
    parallel = context.settings.parallel
    missing = [key for key in ("use_distributed_optimizer", "overlap_grad_reduce") if not getattr(parallel, key)]
    if parallel.overlap_param_gather and missing:
        yield Problem(
            ("parallel.overlap_param_gather", *(f"parallel.{key}" for key in missing)),
            f"overlap_param_gather: true without {' and '.join(missing)}",
            "it gathers what the distributed optimizer sharded, in the buckets that overlapped reduction keeps",
            "write " + " and ".join(f"{key}: true" for key in missing) + ", or overlap_param_gather: false",
        )


RULES: tuple[Rule, ...] = (
    tensor_parallel,
    pipeline_layers,
    virtual_stages,
    sequence_parallel,
    world,
    overlap_param_gather,
)
