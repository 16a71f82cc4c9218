"""Published measurements against the planner's predictions: speed and memory.

Needs no GPU and a few seconds. One efficiency a generation of devices is fitted to every second row and tested on the
others.
"""

from __future__ import annotations

import argparse
import dataclasses
import statistics
from collections.abc import Sequence

from planner import published_rl
from planner.fit import efficiency_set, fitted, generations, halves
from planner.memory import GIB, PUBLISHED, predicted
from planner.predict import Prediction, predict
from planner.published import LEFT_OUT, ROWS
from planner.row import Row
from reporting import add_output_flag, finish_text, markdown_table

from megatune.plan.time.efficiency import EFFICIENCIES


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add_output_flag(parser)
    arguments = parser.parse_args()
    text = "\n\n".join((_speeds(), _memory(), _reinforcement()))
    finish_text("planner-accuracy", "Predicted and published speed and memory", text, arguments.output)


def _speeds() -> str:
    lines, summary, notes, tested = [], [], [], []
    for generation, rows in generations().items():
        halves_of = halves(rows)
        for half, name in zip(halves_of, ("fit", "test"), strict=True):
            predictions = [predict(row) for row in half]
            summary.append((f"{generation}, {name}", str(len(half)), *_errors(predictions)))
            tested += predictions if name == "test" else []
        lines += [_speed_line(predict(row), "test" if row in halves_of[1] else "fit") for row in rows]
        notes.append(_fit_note(generation, *halves_of))
    summary.append(("all, test", str(len(tested)), *_errors(tested)))
    return "\n\n".join(
        (
            "## Speed",
            markdown_table(("rows", "number", "median error", "mean", "worst"), summary),
            _READING,
            "\n".join((*notes, _common_devices())),
            markdown_table(("run", "devices", "tokens/s/GPU", "predicted", "error", "half"), lines),
            "Assumed:\n\n" + "\n".join(f"- {row.name}: {row.assumed} ({row.source})" for row in ROWS if row.assumed),
            "Not planned:\n\n" + "\n".join(f"- {what}: {why}" for what, why in LEFT_OUT.items()),
        )
    )


def _fit_note(generation: str, fit: Sequence[Row], test: Sequence[Row]) -> str:
    other = fitted(generation, test)
    with efficiency_set(generation, other):
        median = statistics.median(abs(predict(row).error) for row in fit)
    return (
        f"- {generation}: dense products reach {EFFICIENCIES[generation].matmul:.2f} of the peak; the fit says "
        f"{fitted(generation, fit):.2f}. The other way round, fitted to the test half, it says {other:.2f}, and the "
        f"median error of the first half is {100 * median:.0f} %"
    )


def _common_devices() -> str:
    """How much hangs on one assumption that was made with predictions in sight."""
    rows = [
        dataclasses.replace(row, device="h100-80g") if row.device == "h100-96g" else row
        for row in generations()["hopper"]
    ]
    fit, test = halves(rows)
    share = fitted("hopper", fit)
    with efficiency_set("hopper", share):
        median = statistics.median(abs(predict(row).error) for row in test)
    return (
        "- h100-96g is torchtitan's H100, limited to 500 W and with slower memory; its peak is taken to be the H100 "
        "NVL's, the lower end of what its page names, which was chosen after predictions had been seen. Taken for a "
        f"common H100, the fit says {share:.2f}, and the median error of hopper's test half is {100 * median:.0f} %"
    )


_READING = (
    "Errors are of tokens/s, above 0 where the planner is too fast. A generation's rows alternate in their order, "
    "the first to fit, the second to test, and so on; fitted is one number, the share of the peak that large dense "
    "products reach. It is fitted by the least median of errors, chosen over the least mean after predictions had been "
    "seen: that gives hopper 0.51 and a median of 20 % on its test half. Everything else is written down in "
    "`plan/time/efficiency.py` with its origin. FSDP's exchanges, "
    "which this project does not have, are added from the planner's own collectives. Neighbouring rows are often of "
    "one source, so the halves are not independent. The largest errors are runs that their publishers call untuned, or "
    "whose real batches are not known: no law of ours explains them."
)


def _speed_line(prediction: Prediction, half: str) -> tuple[str, ...]:
    row = prediction.row
    devices = f"{row.gpus} {row.device}"
    return (
        row.name,
        devices,
        f"{row.speed:,.0f}",
        f"{prediction.speed:,.0f}",
        f"{100 * prediction.error:+.0f} %",
        half,
    )


def _errors(predictions: Sequence[Prediction]) -> tuple[str, str, str]:
    """Median and mean of the sizes of errors, and the largest one."""
    errors = [prediction.error for prediction in predictions]
    sizes = [abs(error) for error in errors]
    worst = max(errors, key=abs)
    return tuple(
        f"{100 * value:{sign}.0f} %"
        for value, sign in ((statistics.median(sizes), ""), (statistics.fmean(sizes), ""), (worst, "+"))
    )  # type: ignore[return-value]


def _memory() -> str:
    lines = []
    for published in PUBLISHED:
        size = predicted(published)
        lines.append(
            (
                published.name,
                f"{published.bytes / GIB:.1f}",
                f"{size / GIB:.1f}",
                f"{100 * (size / published.bytes - 1):+.0f} %",
                published.why,
            )
        )
    header = ("run", "published GiB", "predicted GiB", "difference", "what explains it")
    return "\n\n".join(("## Memory of the fullest device", markdown_table(header, lines)))


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
