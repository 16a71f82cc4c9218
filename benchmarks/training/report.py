"""From steps to a table: medians, rates, and ratios of the same step on two engines."""

from __future__ import annotations

import statistics
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from reporting import markdown_table

from megatune.plan.flops import num_parameters, train_flops
from training.case import TRANSFORMERS, Case, Engine, Measured, Outcome
from training.rows import document_lengths
from training.timeline import PARTS, PHASES

RATES = ("engine", "s a step", "range", "tokens/s", "TFLOP/s", "MFU", "peak GiB", "speed", "range")
TIMES = ("seconds of", "forward", *(f"– {part}" for part in PARTS), *PHASES[1:], "build", "warm-up")


@dataclass(frozen=True, slots=True)
class Result:
    """All visits to one engine with one case."""

    case: Case
    engine: Engine
    outcomes: tuple[Outcome, ...]

    @property
    def steps(self) -> dict[int, Measured]:
        """By index: the same index is the same work on every engine."""
        return {step.index: step for outcome in self.outcomes for step in outcome.steps}

    @property
    def failures(self) -> list[str]:
        return [outcome.failure for outcome in self.outcomes if outcome.failure is not None]

    def flops(self, index: int) -> float:
        """Model FLOP of a step."""
        lengths = [
            length
            for micro_batch in range(self.case.micro_batches)
            for length in document_lengths(self.case, index, micro_batch)
        ]
        return train_flops(self.case.shape.architecture(), lengths)

    def tflops(self) -> float:
        """Model TFLOP/s, the median over steps."""
        return statistics.median(self.flops(index) / step.seconds / 1e12 for index, step in self.steps.items())

    def speed(self, reference: Result) -> list[float]:
        """How many times as fast as the reference, for each step that both did."""
        both = self.steps.keys() & reference.steps.keys()
        return [reference.steps[index].seconds / self.steps[index].seconds for index in sorted(both)]

    def loss_gap(self, reference: Result) -> float:
        """The largest relative difference of the loss of a step that both did."""
        both = self.steps.keys() & reference.steps.keys()
        return max((abs(self.steps[i].loss / reference.steps[i].loss - 1) for i in both), default=0.0)


def gather(outcomes: Sequence[Outcome]) -> list[Result]:
    """Results in the order of their first visits."""
    grouped: dict[tuple[str, str], list[Outcome]] = {}
    for outcome in outcomes:
        grouped.setdefault((outcome.case.name, outcome.engine.name), []).append(outcome)
    return [Result(of[0].case, of[0].engine, tuple(of)) for of in grouped.values()]


def sections(results: Sequence[Result], peak_flops: float | None) -> Iterator[str]:
    """The Markdown of each case. Transformers without options is what speeds are against."""
    for case in {result.case.name: result.case for result in results}.values():
        of_case = [result for result in results if result.case.name == case.name]
        reference = next((result for result in of_case if result.engine == TRANSFORMERS), None)
        done = [result for result in of_case if result.steps]
        parts = [f"## {case.name}", _work(case)]
        if done:
            parts.append(markdown_table(RATES, [_rates(result, reference, peak_flops) for result in done]))
            parts.append(markdown_table(TIMES, [_times(result) for result in done]))
        parts.append("\n".join(f"- {line}" for result in of_case if (line := _note(result, reference))))
        yield "\n\n".join(parts)


def _work(case: Case) -> str:
    architecture = case.shape.architecture()
    documents = "one document" if case.document_median is None else f"documents of {case.document_median} in the median"
    return (
        f"{case.shape.name} with {architecture.num_layers} layers, {num_parameters(architecture) / 1e9:.3f} billion "
        "parameters; a step is "
        f"{case.micro_batches} × {case.tokens:,} tokens, {documents}; {'bf16' if case.bf16 else 'fp32'}, "
        f"{'all layers recomputed' if case.recompute else 'nothing recomputed'}."
    )


def _rates(result: Result, reference: Result | None, peak_flops: float | None) -> list[str]:
    seconds = [step.seconds for step in result.steps.values()]
    tokens = result.case.tokens * result.case.micro_batches
    tflops = result.tflops()
    speed = result.speed(reference) if reference else []
    peak = max((outcome.closing.peak_bytes for outcome in result.outcomes if outcome.closing), default=0)
    return [
        result.engine.name,
        f"{statistics.median(seconds):.3f}",
        f"{min(seconds):.3f} to {max(seconds):.3f}",
        f"{tokens / statistics.median(seconds):,.0f}",
        f"{tflops:.4f}" if tflops < 1 else f"{tflops:.0f}",
        f"{tflops * 1e12 / peak_flops:.1%}" if peak_flops else "–",
        f"{peak / 2**30:.1f}" if peak else "–",
        f"{statistics.median(speed):.2f}" if speed else "–",
        f"{min(speed):.2f} to {max(speed):.2f}" if speed else "–",
    ]


def _times(result: Result) -> list[str]:
    steps = list(result.steps.values())
    phases = [f"{statistics.median(step.phases[phase] for step in steps):.3f}" for phase in PHASES]
    closing = next((outcome.closing for outcome in result.outcomes if outcome.closing), None)
    found = closing.forward_parts if closing else {}
    ready = result.outcomes[0].ready
    assert ready is not None, "it did steps"
    return [
        result.engine.name,
        phases[0],
        *(f"{found[part]:.3f}" if part in found else "–" for part in PARTS),
        *phases[1:],
        f"{ready.build_seconds:.1f}",
        f"{sum(ready.warm_seconds):.1f}",
    ]


def _note(result: Result, reference: Result | None) -> str:
    """What computed it, how its losses agree with the reference's, and what failed."""
    ready = next((outcome.ready for outcome in result.outcomes if outcome.ready), None)
    words = [ready.description] if ready else []
    if reference is not None and result is not reference and result.speed(reference):
        words.append(f"losses within {result.loss_gap(reference):.0e} of those of {reference.engine.name}")
    words += sorted(set(result.failures))
    return f"{result.engine.name}: {'; '.join(words)}" if words else ""
