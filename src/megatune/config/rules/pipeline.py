"""Rules of the pipeline: layers of each stage, and the number of micro-batches."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any

from megatune.config.pipeline import holds_deepstack, parse_layout, pipeline_chunks, write_layout
from megatune.config.rules.rule import Context, Problem, multiples_around
from megatune.config.settings import ParallelSettings
from megatune.references import assign, ref, remove, write

_PP = "pipeline_model_parallel_size"
_VPP = "virtual_pipeline_model_parallel_size"
_LAYOUT = "pipeline_model_parallel_layout"
_SHAPES = (
    "decoder_first_pipeline_num_layers",
    "decoder_last_pipeline_num_layers",
    "account_for_embedding_in_pipeline_split",
    "account_for_loss_in_pipeline_split",
    "pipeline_model_parallel_layout",
)


def _given_shapes(parallel: ParallelSettings) -> list[str]:
    return [name for name in _SHAPES if getattr(parallel, name)]


def shapes(context: Context) -> Iterator[Problem]:
    """The layers of stages are set in one way only."""
    given = _given_shapes(context.settings.parallel)
    kinds = {name.partition("_")[0] for name in given}
    if len(kinds) > 1:
        kept = given[-1] if "pipeline" in kinds else given[0]
        what, why = _names(given), "each sets the number of layers per stage"
        yield Problem(tuple(given), what, why, f"keep {ref(kept)}")


def _names(given: Iterable[str]) -> str:
    return " and ".join(map(ref, given))


def written_layout(context: Context) -> Iterator[Problem]:
    """A written layout is valid, and has a part for each stage and virtual stage."""
    parallel = context.settings.parallel
    text, pp = parallel.pipeline_model_parallel_layout, parallel.pipeline_model_parallel_size
    if text is None or pp == 1:
        return
    try:
        parts = len(parse_layout(text))
    except ValueError as error:
        fix = "write E first, t for each layer, L last, and | between stages: Et*3|t*3L"
        yield Problem((_LAYOUT,), f"{ref(_LAYOUT, repr(text))} cannot be read: {error}", "", fix)
        return
    vpp = parallel.virtual_pipeline_model_parallel_size
    if parts % pp or (vpp and parts != pp * vpp):
        stages = f"{pp} stages" + (f" of {vpp} virtual stages" if vpp else "")
        expected = f"{pp * vpp} parts" if vpp else f"a multiple of {pp} parts"
        what = f"{ref(_LAYOUT, repr(text))} has {parts} parts for {stages}"
        why = "every stage holds one part, or one for each of its virtual stages"
        fix = f"write {expected}{_stages_for(parts, pp, vpp)}"
        yield Problem((_LAYOUT, _PP, *([_VPP] if vpp else [])), what, why, fix)


def _stages_for(parts: int, pp: int, vpp: int | None) -> str:
    """Return the alternative fix: the sizes that fit a layout of this many parts; "" without one."""
    if parts == 1:
        return f", or {remove(_LAYOUT)}"
    if vpp is None:
        return f", or {assign(_PP, parts)}"
    if parts == pp:
        return f", or {remove(_VPP)}"
    if parts % pp == 0:
        return f", or {assign(_VPP, parts // pp)}"
    return f", or {assign(_PP, parts // vpp)}" if parts % vpp == 0 and parts > vpp else ""


def _is_shaped_wrong(context: Context) -> bool:
    """Return whether other rules refuse the layers of stages, so that their numbers are not known."""
    parallel = context.settings.parallel
    has_one = parallel.pipeline_model_parallel_size == 1 and bool(_given_shapes(parallel))
    return has_one or any(shapes(context)) or any(written_layout(context))


def layers(context: Context) -> Iterator[Problem]:
    """Every stage, and every virtual stage, has layers."""
    architecture, parallel = context.architecture, context.settings.parallel
    if architecture is None or _is_shaped_wrong(context):
        return
    try:
        pipeline_chunks(parallel, architecture.num_layers)
    except ValueError as error:
        asked = [name for name in _given_shapes(parallel) if not name.startswith("account")]
        if asked:
            named = " and ".join(ref(name, getattr(parallel, name)) for name in asked)
            why = f"the parts together must have the model's {architecture.num_layers} layers"
            fix = _nearest_numbers(parallel, architecture.num_layers, asked)
            yield Problem((*asked, _PP), f"{named}: {error}", why, fix)
        else:
            yield _too_many_parts(parallel, architecture.num_layers, str(error))


def _too_many_parts(parallel: ParallelSettings, num_layers: int, error: str) -> Problem:
    """Return the problem of more stages, or virtual stages, than layers."""
    pp, vpp = parallel.pipeline_model_parallel_size, parallel.virtual_stages
    counted = _given_shapes(parallel)
    most = num_layers + len(counted)
    if vpp and pp <= most:
        largest, one = f"{write(_VPP, most // pp)}, the largest possible", f"{remove(_VPP)}: each stage has one layer"
        what = f"{pp} stages of {vpp} virtual stages: {error}"
        return Problem(
            (_VPP, _PP, *counted),
            what,
            "every virtual stage has at least one layer",
            largest if most // pp > 1 else one,
        )
    fix = f"{write(_PP, most)}, the largest possible"
    if vpp:
        fix += f", and {remove(_VPP)}"
    what = f"{ref(_PP, pp)}: {error}"
    return Problem((_PP, *counted), what, "every stage has at least one layer", fix)


def _nearest_numbers(parallel: ParallelSettings, num_layers: int, asked: list[str]) -> str:
    """Return the fix that changes one number, preferably the last one that is set."""
    if parallel.pipeline_model_parallel_layout:
        counts = [chunk.num_layers for chunk in parse_layout(parallel.pipeline_model_parallel_layout)]
        while (left := num_layers - sum(counts)) != 0:
            index = counts.index(min(counts)) if left > 0 else counts.index(max(counts))
            counts[index] += 1 if left > 0 else -1
        return write(_LAYOUT, write_layout(counts))
    for name in reversed(asked):
        given = getattr(parallel, name)
        for number in sorted(range(1, num_layers), key=lambda number: (abs(number - given), number)):
            try:
                pipeline_chunks(parallel.model_copy(update={name: number}), num_layers)
            except ValueError:
                continue
            return write(name, number)
    return f"remove {_names(asked)}"


def deepstack(context: Context) -> Iterator[Problem]:
    """The first chunk has all layers that get deepstack features, which exist there only."""
    architecture, parallel = context.architecture, context.settings.parallel
    if architecture is None or architecture.vision is None:
        return
    if _is_shaped_wrong(context) or any(layers(context)):
        return
    if holds_deepstack(parallel, architecture):
        return
    counts = [chunk.num_layers for chunk in pipeline_chunks(parallel, architecture.num_layers)]
    fed, names = architecture.vision.num_deepstack_mergers, [_PP, *([_VPP] if parallel.virtual_stages else [])]
    what = f"the first of {len(counts)} pipeline parts has {counts[0]} of the first {fed} layers"
    why = f"each of these {fed} gets features of the vision encoder, which is in the first part (deepstack)"
    changes = _nearest_with_first_layers(parallel, architecture.num_layers, fed)
    writes = " and ".join(assign(name, value) for name, value in changes.items() if value is not None)
    removes = _names(name for name, value in changes.items() if value is None)
    fix = ", and ".join(f"{verb} {each}" for verb, each in (("write", writes), ("remove", removes)) if each)
    yield Problem((*_given_shapes(parallel), *names), what, why, fix)


def _nearest_with_first_layers(parallel: ParallelSettings, num_layers: int, fed: int) -> dict[str, Any]:
    """Return the values to write, or to remove (None), so that the first part has `fed` layers."""
    pp, vpp, most = parallel.pipeline_model_parallel_size, parallel.virtual_stages or 1, 1 + num_layers - fed
    if pp * vpp > most:
        pp, vpp = (pp, most // pp) if pp <= most else (most, 1)
    wanted: dict[str, Any] = {_PP: pp, _VPP: None, **dict.fromkeys(_SHAPES)}
    if vpp > 1:
        wanted |= {_VPP: parallel.virtual_pipeline_model_parallel_size and vpp, _LAYOUT: None}
        even = ParallelSettings.model_validate({_PP: pp, _VPP: vpp})
        counts = [chunk.num_layers for chunk in pipeline_chunks(even, num_layers)]
        while counts[0] < fed:
            fullest = max(range(1, len(counts)), key=lambda index: (counts[index], index))
            counts[0], counts[fullest] = counts[0] + 1, counts[fullest] - 1
        wanted[_LAYOUT] = write_layout(counts)
    elif pp > 1:
        wanted["decoder_first_pipeline_num_layers"] = fed
    return {name: value for name, value in wanted.items() if (getattr(parallel, name) or None) != value}


def virtual_stages(context: Context) -> Iterator[Problem]:
    """With virtual stages the number of micro-batches is a multiple of the stages."""
    parallel, steps = context.settings.parallel, context.settings.batch.gradient_accumulation_steps
    pp, key = parallel.pipeline_model_parallel_size, _VPP if parallel.virtual_pipeline_model_parallel_size else _LAYOUT
    if parallel.virtual_stages is not None and pp > 1 and steps % pp:
        what = f"{ref('gradient_accumulation_steps', steps)} is not a multiple of {ref(_PP, pp)}"
        why = "with virtual stages, micro-batches go through the pipeline in rounds of one for each stage"
        fix = write("gradient_accumulation_steps", *multiples_around(steps, pp))
        yield Problem(("gradient_accumulation_steps", key, _PP), what, why, fix)


RULES = (shapes, written_layout, layers, deepstack, virtual_stages)
