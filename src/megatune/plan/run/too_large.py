"""What is said of a run that does not fit: why, and what would help."""

from __future__ import annotations

import bisect
import math
from collections.abc import Callable
from dataclasses import replace

from megatune.config.names import plain_finding
from megatune.errors import ExitCode, Finding, MegatuneError
from megatune.plan.changes.fixes import Fix, fix, savings, searched
from megatune.plan.changes.variation import with_settings
from megatune.plan.estimate import Estimate, estimate
from megatune.plan.pages.words import largest_part, parts, row_words, size
from megatune.plan.uncertainty import least_and_most

_SEARCHED = 256  # processes up to which a search for another layout takes no time to speak of
_ROW_STEP = 64  # tokens; lengths between are not worth telling apart


def allowed(planned: Estimate, phrased: Callable[[Finding], Finding] = plain_finding) -> str:
    """Return what is said of a run that may not fit, or that memory_check lets start all the same.

    Raises:
        MegatuneError: SETTINGS, where it may not start.
    """
    finding = _too_large(planned)
    if may_fit(planned):
        return str(finding)
    if planned.case.settings.run.memory_check == "error":
        raise MegatuneError(phrased(finding), ExitCode.SETTINGS)
    return f"{finding.what}; `memory_check: warn` lets it start"


def longest_row(planned: Estimate) -> int:
    """Return the tokens of the longest rows that fit, with everything else as it is; 0 where hardly any do."""
    multiple = math.lcm(planned.case.settings.parallel.sequence_multiple, _ROW_STEP)

    def is_too_long(count: int) -> bool:
        settings = with_settings(planned.case.settings, {"data.cutoff_len": count * multiple})
        return not estimate(replace(planned.case, settings=settings)).fits

    counts = range(1, planned.case.sequence_length // multiple + 1)
    return multiple * bisect.bisect_left(counts, True, key=is_too_long)


def may_fit(planned: Estimate) -> bool:
    """Return whether every rank's bytes are there at the lower end of the plan's uncertainty."""
    return least_and_most(planned.case, planned.stages)[0] <= planned.case.machine.device.memory


def _too_large(planned: Estimate) -> Finding:
    """Say why a planned run cannot fit, or may not: its largest part, and the cheapest changes with what they do."""
    stage, device = planned.fullest, planned.case.machine.device
    name, held = largest_part(stage)
    which = f"stage {stage.stage} of {len(planned.stages)}" if len(planned.stages) > 1 else "each rank"
    fixes = savings(planned)
    state = stage.weights + stage.gradients + stage.master_weights + stage.optimizer_state
    why = f"the largest part is {name}, {size(held)}; all: {parts(stage)}; for rows of"
    why += f" {row_words(planned.case)}"
    if state > device.memory:
        why += f"; weights, gradients and optimizer alone take {size(state)}, whatever the batch"
    head = "one of"
    if not any(fix.after.fits for fix in fixes):
        head = "no one or two changes are enough; what helps most"
        if planned.case.world_size <= _SEARCHED and (layout := searched(planned)) is not None:
            head, fixes = "the layout that fits and is fastest", [layout]
    lines = [f"{head}:", *(f"        {each.text}" for each in fixes)] if fixes else []
    if longest := longest_row(planned):
        rows = "the longest rows that fit: memory is planned for rows of that length"
        lines.append(f"        `cutoff_len: {longest}`, {rows}")
    if (adapters := _adapters(planned)) is not None:
        lines.append(f"        {adapters.text}: trains adapters instead of the model")
    lines.append("        megatune plan searches all layouts for this machine, or for another one")
    least, most = map(size, least_and_most(planned.case, planned.stages))
    if may_fit(planned):
        what = f"this run may not fit: {which} is planned to hold {size(stage.total)}, between {least} and {most}"
    else:
        what = f"this run cannot fit: {which} would hold {size(stage.total)}, {least} at least"
        lines.append("        `memory_check: warn` starts it anyway")
    return Finding(f"{what}, and {device.name} has {size(device.memory)}", why=why, fix="\n".join(lines).strip())


def _adapters(planned: Estimate) -> Fix | None:
    """Return what adapters in place of full training do, where the run then fits."""
    if planned.case.settings.finetuning.finetuning_type != "full":
        return None
    found = fix(planned, {"finetuning.finetuning_type": "lora"})
    return found if found is not None and found.after.fits else None
