"""A thousand steps under random faults: the same model as of a run that nothing happened to, and what it cost.

Two runs of a tiny model with experts are struck about every thirty steps: ranks, fork server and launcher are killed,
stopped or asked to end, disks are full, checkpoints damaged. Each time the command is typed again, as a user would: in
one run always in the same layout, in the other each time in another one. See docs/benchmarks.md.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import socket
import statistics
import tempfile
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from reporting import add_output_flag, finish_text, markdown_table
from soaking.chain import Chain, Cost, cost_of
from soaking.command import OUTPUT, Command
from soaking.faults import FAULTS, Fault
from soaking.history import differing, distance, read_trained, rows_by_step, tensors

from megatune.demo.checkpoint import make_checkpoint

ROWS = 8  # a step
SAVE_STEPS = 10
HANG_SECONDS = 30  # ddp_timeout
TOLERANCE = 1e-5  # relative L2 difference of a tensor, where layouts changed: they add in other orders
ONE_COPY = "per_device_train_batch_size=2", "gradient_accumulation_steps=4"
LAYOUTS: dict[str, tuple[str, ...]] = {
    "dp2": ("per_device_train_batch_size=2", "gradient_accumulation_steps=2"),
    "tp2": (*ONE_COPY, "tensor_model_parallel_size=2", "sequence_parallel=true"),
    "pp2": (*ONE_COPY, "pipeline_model_parallel_size=2"),
    "cp2": (*ONE_COPY, "context_parallel_size=2"),
    "ep2": ("per_device_train_batch_size=2", "gradient_accumulation_steps=2", "expert_model_parallel_size=2"),
}
HEADER = ("step", "layout", "fault", "exit", "noticed, s", "training again, s", "steps again", "what the user was told")


@dataclass(frozen=True)
class Soaked:
    """What a chain has shown; its report in Markdown."""

    chain: Chain
    text: str


def write_run(folder: Path, steps: int, *, async_save: bool) -> None:
    """Write the run.yaml of a chain, whose data and model are beside its folder."""
    values = {
        "model_name_or_path": "../model", "stage": "sft", "do_train": True, "finetuning_type": "full",
        "dataset_dir": "..", "dataset": "soak", "template": "qwen3_nothink", "cutoff_len": 64, "max_steps": steps,
        "num_processes": 2, "save_steps": SAVE_STEPS, "save_total_limit": 3, "async_save": async_save,
        "learning_rate": 1e-3, "lr_scheduler_type": "cosine", "logging_steps": 1, "report_to": "none",
        "plot_loss": False, "bf16": False, "ddp_timeout": HANG_SECONDS, "output_dir": OUTPUT,
    }  # fmt: skip
    folder.mkdir()
    (folder / "run.yaml").write_text("".join(f"{key}: {json.dumps(value)}\n" for key, value in values.items()))


def prepare(folder: Path, steps: int) -> Path:
    """Write the model, and as many rows as one epoch of so many steps has; each row says its number."""
    numbers = [
        {"instruction": f"What are {row % 97} and {row % 89}?", "output": f"Row {row:05d} says {row * 7919 % 10007}."}
        for row in range(steps * ROWS)
    ]
    (folder / "rows.json").write_text(json.dumps(numbers))
    (folder / "dataset_info.json").write_text(json.dumps({"soak": {"file_name": "rows.json"}}))
    sizes = {"num_layers": 2, "hidden_size": 32, "num_attention_heads": 4, "num_query_groups": 2, "num_experts": 4}
    return make_checkpoint("qwen3_moe", folder / "model", **sizes)


def train_whole(folder: Path, steps: int) -> float:
    """Train without faults, saving as often; return the seconds."""
    write_run(folder, steps, async_save=False)
    began, command = time.monotonic(), Command(folder, LAYOUTS["dp2"], 1)
    assert command.wait() == 0, command.errors
    return time.monotonic() - began


def soak(
    folder: Path,
    whole: Path,
    layouts: Sequence[str],
    steps: int,
    every: tuple[int, int],
    seed: int,
    faults: Sequence[Fault] = FAULTS,
) -> Soaked:
    """Run a chain, and hold it against the run without faults.

    Raises:
        AssertionError: whatever a run owes its user, and does not give.
    """
    write_run(folder, steps, async_save=len(layouts) == 1)
    chain = Chain(folder, {name: LAYOUTS[name] for name in layouts}, steps, every, seed, faults)
    chain.run()
    trained = read_trained(folder)
    rows, expected = (rows_by_step(each, whole.parent / "model") for each in (trained, read_trained(whole)))
    assert rows == expected, "steps had other rows than without faults"
    counts = Counter(row for ids in rows.values() for row in ids)
    assert counts == dict.fromkeys(range(steps * ROWS), 1), "rows were not trained once each"
    weights, training = f"checkpoint-{steps}", f"checkpoint-{steps}/training"
    parts = [(tensors(folder / OUTPUT / part), tensors(whole / OUTPUT / part)) for part in (".", weights, training)]
    if len(layouts) == 1:
        different = [name for pair in parts for name in differing(*pair)]
        assert not different, f"tensors differ: {different}"
        equal = f"all {sum(len(one) for one, _ in parts)} tensors of the final model, of checkpoint-{steps} and of its"
        equal += " optimizer are those of the run without faults, bit for bit"
    else:
        apart = distance(*parts[0])
        assert apart <= TOLERANCE, f"weights are {apart:.1e} apart"
        equal = f"the final model is {apart:.1e} from that of the run without faults (largest relative L2 difference of"
        equal += f" a tensor; at most {TOLERANCE:.0e} is allowed)"
    costs = [cost_of(struck, trained) for struck in chain.struck]
    return Soaked(chain, f"{_summary(chain, costs, equal)}\n\n{_table(chain, costs)}")


def _table(chain: Chain, costs: Sequence[Cost]) -> str:
    lines = []
    for struck, cost in zip(chain.struck, costs, strict=True):
        said = (
            struck.line.replace("megatune: ", "")
            .replace(f"{chain.folder}/", "")
            .replace(socket.gethostname(), "HOST")
            .replace("|", "\\|")
        )
        code = "goes on" if struck.code is None else str(struck.code)
        noticed = f"{struck.noticed:.1f}" if struck.code is not None or struck.line else "-"
        place = f"{struck.step} ({struck.phase})", struck.layout, struck.fault.name
        lines.append((*place, code, noticed, f"{cost.back:.1f}", str(cost.steps), said or "nothing"))
    return markdown_table(HEADER, lines)


def _summary(chain: Chain, costs: Sequence[Cost], equal: str) -> str:
    again, damaged = sum(cost.steps for cost in costs), sum(struck.damaged is not None for struck in chain.struck)
    noticed = [struck.noticed for struck in chain.struck if "SIGSTOP" not in struck.fault.name]
    back = [cost.back for cost in costs]
    lines = (
        f"{len(costs)} faults, {chain.attempts} commands, {chain.seconds:.0f} s in all",
        equal,
        f"each of the {chain.steps * ROWS:,} rows was trained once in the history that counts, in the step where the"
        " run without faults has it, by the numbers in the tokens that ranks trained",
        f"{chain.checked} times a visible checkpoint was read whole after the end of a command, and none was broken but"
        f" the {damaged} that were damaged here",
        f"{again} steps were trained again ({again / chain.steps:.0%}), at most {max(cost.steps for cost in costs)}"
        f" after one fault; a checkpoint is saved every {SAVE_STEPS}",
        f"a fault that was no SIGSTOP was noticed after {statistics.median(noticed):.1f} s (median; at most"
        f" {max(noticed):.1f} s); until a step was trained again it took {statistics.median(back):.1f} s (median; at"
        f" most {max(back):.1f} s), the start of the next command included",
    )
    return "\n".join(f"- {line}" for line in lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=1000, metavar="N", help="of each run (1000)")
    parser.add_argument("--every", type=int, nargs=2, default=(20, 40), metavar="N", help="steps between (20 40)")
    parser.add_argument("--seed", type=int, help="of the faults (a random one)")
    add_output_flag(parser)
    arguments = parser.parse_args()
    seed = random.SystemRandom().randrange(10**6) if arguments.seed is None else arguments.seed
    print(f"seed {seed}", flush=True)
    load = os.getloadavg()[0]
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        os.environ["MEGATUNE_CACHE"] = str(folder / "cache")
        prepare(folder, arguments.steps)
        whole = train_whole(folder / "whole", arguments.steps)
        every = tuple(arguments.every)
        one = soak(folder / "one", folder / "whole", ["dp2"], arguments.steps, every, seed)
        many = soak(folder / "many", folder / "whole", list(LAYOUTS), arguments.steps, every, seed + 1)
    kinds = {struck.fault.name for each in (one, many) for struck in each.chain.struck}
    text = "\n\n".join(
        [
            f"{arguments.steps} steps of {ROWS} rows, of a qwen3_moe with 4 experts in 2 layers, on two CPU processes;"
            f" without faults they took {whole:.0f} s. Seed of the faults: {seed}; {len(kinds)} of {len(FAULTS)} kinds"
            f" came. `ddp_timeout` is {HANG_SECONDS} s, which is how long a stopped rank may be silent; a restart by"
            " `max_restarts` waits 5 s. Load of the machine (1 minute) at the start: " + f"{load:.1f}.",
            "## One layout\n\nEvery command in dp 2, with `async_save`.",
            one.text,
            "## Another layout each time\n\nCheckpoints are saved at once.",
            many.text,
        ]
    )
    finish_text("soak", "A thousand steps under faults", text, arguments.output)


if __name__ == "__main__":
    main()
