"""Published measurements against the planner's predictions: speed and memory.

Needs no GPU and a few seconds. Constants were chosen from the open rows alone; `planner.sets` has the rule.
"""

from __future__ import annotations

import argparse
import math
import statistics
from collections.abc import Iterator, Sequence

from planner import published_rl
from planner.fit import CHOSEN, fitted, hosts, rows_for
from planner.memory import FORMULAS, GIB, MEASURED, by_formula, predicted
from planner.predict import Prediction, by_this_engine, case_of, predict
from planner.published import LEFT_OUT, REASONS, ROWS
from planner.row import MEGATRON
from planner.sets import generation_of, held_out
from planner.spread import spread
from reporting import add_output_flag, finish_text, markdown_table

from megatune.plan.case import OURS
from megatune.plan.time.efficiency import EFFICIENCIES
from megatune.plan.uncertainty import SPREADS, model_class


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add_output_flag(parser)
    arguments = parser.parse_args()
    text = "\n\n".join((_least_flattering(), _bounds(), _speeds(), _memory(), _reinforcement()))
    finish_text("planner-accuracy", "Predicted and published speed and memory", text, arguments.output)


_SETS = (
    "Rows are split by publisher: of each generation of devices, publishers in alphabetical order are in turn open, "
    "which constants may be chosen from, and held out, which they may not; of a generation with one publisher all rows "
    "are held out. The rule was written down, and committed, before any row of H20, H800, L40S, RTX 4090, RTX 5090, "
    "B200 or Moonlight was predicted; the errors of 43 older rows were known by then. The split is kept since: rows "
    "of publishers that came later are all held out. What made a row, and how it dispatched tokens, was read from its "
    "source when the errors of the older mixtures of experts were known; most of the rows of "
    "`planner/published_newer.py` were planned after that, and those of one publisher's long rows showed that the "
    "attention of Transformer Engine is planned too slow where it was planned as torch's."
)


def _least_flattering() -> str:
    """What the README repeats: of the held-out rows, the median and the worst of each class."""
    lines = []
    for name in ("dense", "experts"):
        errors = [each.error for each in _predictions(name, "held out")]
        held = [factor - 1 for factor in _memory_factors(name, "held out")]
        lines.append(
            f"{name} {100 * _median(errors):.0f} % of time (worst {100 * max(errors, key=_distance):+.0f} % of speed, "
            f"{len(errors)} rows) and {100 * _median(held):.0f} % of memory ({len(held)} rows)"
        )
    every = [factor - 1 for name in ("dense", "experts") for factor in _memory_factors(name)]
    return (
        f"Of rows that no constant was chosen from, the median error is: {'; '.join(lines)}. The memory that others "
        f"published from their allocator's reserve lies up to {100 * max(every):.0f} % above the plan."
    )


def _bounds() -> str:
    lines = []
    for name, stated in SPREADS.items():
        assert stated == spread(name), f"plan/uncertainty.py says {stated}, its rows {spread(name)}"
        counts = len(_predictions(name)), len(_memory_factors(name))
        lines.append((name, *(f"{100 * share:.0f} %" for share in stated), *map(str, counts)))
    header = ("models", "memory, nine of ten", "time, two of three", "time, nine of ten", "rows of time", "of memory")
    return "\n\n".join(("## What plans state", markdown_table(header, lines), _STATED))


_STATED = (
    "Nine of ten runs hold at most 1 + x times the memory of their plan, and take between 1 / (1 + x) and 1 + x times "
    "its seconds; `plan/uncertainty.py` has these figures, and plans and searches take their margins from them. Of a "
    "class the larger figure of all rows and of the held-out ones (if five or more), rounded up to 5 %, and at least "
    "that of dense models. Pictures are two runs of one publisher, whose images others prepare: a guess."
)


def _predictions(name: str = "", of: str = "", generation: str = "") -> list[Prediction]:
    closed = held_out(ROWS)
    return [
        each
        for each in map(predict, ROWS)
        if (not name or model_class(each.case) == name)
        and (not of or (each.row.name in closed) == (of == "held out"))
        and (not generation or generation_of(each.row) == generation)
    ]


def _memory_factors(name: str = "", of: str = "") -> list[float]:
    """Published over planned bytes."""
    closed = held_out(ROWS)
    return [
        each.bytes / predicted(each)
        for each in MEASURED
        if (not name or model_class(case_of(each.row)) == name)
        and (not of or (each.row.name in closed) == (of == "held out"))
    ]


def _distance(error: float) -> float:
    """Of a speed twice and half as high, the same."""
    return abs(math.log(1 + error))


def _median(errors: Sequence[float]) -> float:
    return statistics.median(map(abs, errors))


def _speeds() -> str:
    closed = held_out(ROWS)
    lines = [
        (
            each.row.name,
            f"{each.row.gpus} {each.row.device}",
            f"{each.row.speed:,.0f}",
            f"{each.speed:,.0f}",
            f"{100 * each.error:+.0f} %",
            "" if each.row.engine == OURS else f"{by_this_engine(each.row).speed:,.0f}",
            "held out" if each.row.name in closed else "open",
            each.row.source,
        )
        for each in map(predict, ROWS)
    ]
    header = ("run", "devices", "tokens/s/GPU", "predicted", "error", "this engine", "set", "source")
    return "\n\n".join(
        (
            "## Speed",
            _SETS,
            markdown_table(("rows", "set", "number", "median error", "nine of ten", "worst"), list(_summary())),
            _READING,
            "\n".join(_chosen()),
            _EXPERTS,
            "Rows that are off by a factor of more than 1.4:\n\n"
            + "\n".join(f"- {name}: {why}" for name, why in REASONS.items()),
            markdown_table(header, lines),
            "A source is a repository on github.com, and where in it.",
            "Assumed:\n\n" + "\n".join(f"- {row.name}: {row.assumed}" for row in ROWS if row.assumed),
            "Not planned:\n\n" + "\n".join(f"- {what}: {why}" for what, why in LEFT_OUT.items()),
        )
    )


def _summary() -> Iterator[tuple[str, ...]]:
    generations = sorted({generation_of(row) for row in ROWS})
    kinds = [(name, "") for name in SPREADS] + [("", each) for each in generations] + [("", "")]
    for name, generation in kinds:
        for of in ("open", "held out"):
            errors = [each.error for each in _predictions(name, of, generation)]
            if errors:
                yield name or generation or "all", of, str(len(errors)), *_errors(errors)


def _errors(errors: Sequence[float]) -> tuple[str, str, str]:
    """Median of the sizes of errors, the size that nine of ten stay below, and the largest one."""
    sizes = sorted(map(abs, errors))
    ninth, worst = sizes[math.ceil(0.9 * len(sizes) - 1e-9) - 1], max(errors, key=_distance)
    return f"{100 * statistics.median(sizes):.0f} %", f"{100 * ninth:.0f} %", f"{100 * worst:+.0f} %"


_READING = (
    "Errors are of tokens/s, above 0 where the planner is too fast. A run is planned as the engine that made it works "
    '(`Engine` of `plan/case.py`); where that is another one than this project\'s, "this engine" is what this one is '
    "planned to reach with the same settings. Four constants were chosen from the open rows, below; the rest is "
    "derived from data sheets and shapes, or written down in `plan/time/efficiency.py` with its origin. FSDP's "
    "exchanges, which this project does not have, are added from the planner's own collectives."
)

_EXPERTS = """What is modelled of experts:

- the products of a rank's experts: one grouped kernel here, at 0.7 of what dense products reach; with Transformer
  Engine a kernel for each expert on four streams, which is faster where experts are large and waits for the host where
  they are small; in Transformers a loop;
- dispatch: with NCCL a token travels to each of its experts; with DeepEP and HybridEP once to each machine and each
  rank that has any, and to few of them where a benchmark's gate deals experts out in turn;
- exchanges next to another micro-batch's passes, where the run did that: they hide 0.8 of what these compute;
- uneven experts: the fullest rank by chance (`operators/shapes.py`), none where balance was forced or padded;
- the host: 1.5 times this engine's launches with Transformer Engine's modules, 1 with CUDA graphs around the experts,
  and a launch for each expert's weight gradient here;
- attention to packed documents and over context-parallel ranks: as fast as whole rows with cuDNN through Transformer
  Engine, slower with torch's kernels;
- the loss: computed from kept logits there, from logits that are computed again here.

Not modelled: dispatch that slows products down, a network that others use, padding of rows to tiles, hooks of
wrappers."""


def _chosen() -> Iterator[str]:
    for constant, generation, devices in CHOSEN:
        yield (
            f"- {constant} of {generation}: {getattr(EFFICIENCIES[generation], constant):.2f} in use; the "
            f"{len(rows_for(devices))} open rows of {', '.join(devices)} say "
            f"{fitted(constant, generation, devices):.2f}"
        )

    losses = hosts()
    yield (
        f"- host of Megatron-Core with Transformer Engine: {MEGATRON.host:.1f} in use; the open rows say "
        f"{min(losses, key=lambda host: losses[host]):.1f}"
    )


def _memory() -> str:
    closed = held_out(ROWS)
    lines = [
        (
            each.row.name,
            each.counted,
            f"{each.bytes / GIB:.1f}",
            f"{predicted(each) / GIB:.1f}",
            f"{100 * (each.bytes / predicted(each) - 1):+.0f} %",
            "held out" if each.row.name in closed else "open",
            each.why or each.row.source,
        )
        for each in MEASURED
    ]
    sums = [
        (
            name,
            of,
            str(len(held)),
            f"{100 * _median(held):.1f} %",
            *(f"{100 * each:+.0f} %" for each in (max(held), min(held))),
        )
        for name in SPREADS
        for of in ("open", "held out")
        if (held := [factor - 1 for factor in _memory_factors(name, of)])
    ]
    formulas = [
        (name, f"{size / GIB:.1f}", f"{by_formula(row, states) / GIB:.1f}", why)
        for name, row, size, states, why in FORMULAS
    ]
    header = ("run", "counted", "published GiB", "predicted GiB", "published is", "set", "source, or what explains it")
    return "\n\n".join(
        (
            "## Memory of the fullest device",
            _COUNTED,
            markdown_table(("rows", "set", "number", "median", "most above the plan", "most below"), sums),
            markdown_table(header, lines),
            "Formulas that others publish, which nobody measured:",
            markdown_table(("formula", "GiB", "predicted GiB", "what explains the difference"), formulas),
        )
    )


_COUNTED = (
    "Nothing was fitted to any of these. Allocated is what tensors take, as torch's allocator counts them; reserved is "
    "what the allocator holds of the device, with its fragments, and with what it keeps for later and would return "
    "before it fails."
)


def _reinforcement() -> str:
    lines, errors = [], []
    for row in published_rl.ROWS:
        found, error = published_rl.error(row)
        errors.append(error)
        phases = found.seconds.phases
        parts = (f"{phases[name]:.0f}" for name in ("rollout", "reference", "old log-probs", "train", "offload"))
        planned = found.seconds.total - phases["sync"]
        lines.append((row.name, f"{row.gpus}", *parts, f"{row.seconds:.0f}", f"{planned:.0f}", f"{100 * error:+.0f} %"))
    header = ("run", "H100", "rollout", "reference", "old", "train", "offload", "published s", "predicted s", "error")
    median = f"Median error {100 * statistics.median(map(abs, errors)):.0f} %, of seconds of a step without sync: "
    median += "theirs takes some seconds, ours goes through Ray's objects and takes longer (docs/plan-rl.md)."
    source = f"Source: {published_rl.SOURCE}."
    return "\n\n".join(("## Steps of reinforcement learning", median, source, markdown_table(header, lines)))


if __name__ == "__main__":
    main()
