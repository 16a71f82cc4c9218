"""How fast data becomes token rows: CPU seconds and samples a second with one and two processes, beside
LLaMA-Factory's package and datasets.map over apply_chat_template; peak memory; the start of a second run; and packing a
million lengths.

Each figure is measured in a process of its own, the ways in turn, several rounds; the best round counts, since what
else runs on a machine only ever adds time. `--source` takes an alpaca file; without one, rows are made of demo text.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import resource
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import data_theirs
from data_clock import Clock
from reporting import add_output_flag, finish

LIMIT = 1800.0  # seconds that one measurement may take
PACKED_LENGTHS, CAPACITY = 1_000_000, 4096


def make_rows(source: Path | None, count: int) -> Iterator[dict[str, str]]:
    """Alpaca rows: those of the source again and again, each with a number of its own, so that none is the same."""
    if source is not None:
        rows = json.loads(source.read_text(encoding="utf-8"))
    else:
        from megatune.demo.tokenizer import demo_texts

        draw = random.Random(0)
        words = " ".join(demo_texts()).split()

        def prose(low: int, high: int) -> str:
            start = draw.randrange(len(words) - high)
            return " ".join(words[start : start + draw.randint(low, high)])

        rows = [{"instruction": prose(5, 25), "input": "", "output": prose(20, 150)} for _ in range(1000)]
    for number in range(count):
        row = rows[number % len(rows)]
        yield {**row, "instruction": f"{row['instruction']} ({number})"}


def write_inputs(folder: Path, source: Path | None, count: int, vocab_size: int) -> None:
    """The data, and a Qwen-like tokenizer trained on it."""
    from megatune.demo.family import demo_family
    from megatune.demo.tokenizer import make_tokenizer

    with open(folder / "rows.jsonl", "w", encoding="utf-8") as file:
        for row in make_rows(source, count):
            file.write(f"{json.dumps(row, ensure_ascii=False)}\n")
    texts = (text for row in make_rows(source, min(count, 2000)) for text in row.values())
    shaped = make_tokenizer(demo_family("qwen2"))
    tokenizer = shaped.train_new_from_iterator(texts, vocab_size)
    tokenizer.chat_template = shaped.chat_template
    tokenizer.save_pretrained(folder / "model")


def load_inputs(folder: Path) -> tuple[Any, Callable[..., Any]]:
    """The tokenizer, and what makes settings."""
    from transformers import AutoTokenizer

    from megatune.config.load import load

    def settings(**changes: object) -> Any:
        values = {
            "model_name_or_path": folder / "model", "dataset": folder / "rows.jsonl", "cutoff_len": 2048,
            "packing": True, "template": "qwen", "output_dir": folder / "out", **changes,
        }  # fmt: skip
        return load(overrides=[f"{key}={value}" for key, value in values.items()]).require_valid()

    return AutoTokenizer.from_pretrained(folder / "model"), settings


def ours(folder: Path, template: str, processes: int) -> dict[str, float]:
    """Prepare the data: read, render, tokenise, label, pack, write."""
    from megatune.data.prepare import prepare

    tokenizer, settings = load_inputs(folder)
    shutil.rmtree(folder / "cache" / "rows", ignore_errors=True)
    clock = Clock()
    prepared = prepare(settings(template=template, preprocessing_num_workers=processes), tokenizer)
    return {**clock.read(), "tokens": prepared.report.train.tokens}


def second_start(folder: Path) -> dict[str, float]:
    """Open what another process prepared, and read a row."""
    from megatune.data.prepare import prepare

    tokenizer, settings = load_inputs(folder)
    clock = Clock()
    prepared = prepare(settings(), tokenizer)
    assert len(prepared.train[0])
    return clock.read()


def datasets_map(folder: Path, processes: int) -> dict[str, float]:
    """What a script over the datasets library does: tokens of one conversation at a time, without labels or packing."""
    import datasets

    datasets.disable_progress_bars()
    tokenizer, _ = load_inputs(folder)

    def encode(row: dict[str, str]) -> dict[str, list[int]]:
        question = "\n".join(part for part in (row["instruction"], row["input"]) if part)
        messages = [{"role": "user", "content": question}, {"role": "assistant", "content": row["output"]}]
        return {"input_ids": tokenizer.apply_chat_template(messages, tokenize=True, return_dict=False)}

    clock = Clock()
    rows = datasets.load_dataset(
        "json",
        data_files=str(folder / "rows.jsonl"),
        split="train",
        cache_dir=str(folder / f"hub-{time.monotonic_ns()}"),
    )
    rows = rows.map(encode, remove_columns=rows.column_names, num_proc=processes if processes > 1 else None)
    return {**clock.read(), "tokens": sum(map(len, rows["input_ids"]))}


def packing() -> dict[str, float]:
    """Pack a million lengths, log-normal around 300 tokens."""
    import numpy as np

    from megatune.data.build import pack

    lengths = np.random.default_rng(0).lognormal(np.log(300), 0.8, PACKED_LENGTHS).astype(np.int64).clip(1, CAPACITY)
    clock = Clock()
    _, rows = pack(lengths, CAPACITY, seed=0)
    return {**clock.read(), "filled": lengths.sum() / (len(rows) - 1) / CAPACITY}


def theirs(folder: Path, processes: int) -> dict[str, float]:
    """LLaMA-Factory's package; without its imports, as ours is."""
    tokenizer, _ = load_inputs(folder)
    data_theirs.import_it()
    clock = Clock()
    rows = data_theirs.prepare(folder, tokenizer, "qwen", processes)
    return {**clock.read(), "tokens": data_theirs.num_tokens(rows)}


WAYS: dict[str, tuple[str, Callable[[Path], dict[str, float]]]] = {
    "theirs-1": ("LLaMA-Factory, one process", lambda folder: theirs(folder, 1)),
    "map-1": ("datasets.map, one process", lambda folder: datasets_map(folder, 1)),
    "named-1": ("megatune, template qwen, one process", lambda folder: ours(folder, "qwen", 1)),
    "default-1": ("megatune, the tokenizer's template, one process", lambda folder: ours(folder, "null", 1)),
    "theirs-2": ("LLaMA-Factory, two processes", lambda folder: theirs(folder, 2)),
    "named-2": ("megatune, template qwen, two processes", lambda folder: ours(folder, "qwen", 2)),
}


def measure(way: str, folder: Path) -> dict[str, float]:
    """Run one way in a process of its own; adds its peak memory in GiB, of the process and the largest of its own."""
    environment = {**os.environ, "MEGATUNE_CACHE": str(folder / "cache")}
    environment.pop("TOKENIZERS_PARALLELISM", None)  # as users have it
    words = [sys.executable, __file__, "--measure", way, "--folder", str(folder)]
    done = subprocess.run(words, env=environment, capture_output=True, text=True, timeout=LIMIT)
    if done.returncode:
        sys.exit(done.stderr)
    return dict(json.loads(done.stdout.splitlines()[-1]))


def measured(way: str, folder: Path) -> None:
    """In that process."""
    others = {"start": second_start, "packing": lambda _: packing()}
    run = {**others, **{name: run for name, (_, run) in WAYS.items()}}[way]
    result = run(folder)
    peak = max(resource.getrusage(who).ru_maxrss for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN))
    print(json.dumps({**result, "peak": peak / 2**20}))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--source", type=Path, help="an alpaca file in JSON, to take rows from")
    parser.add_argument("--samples", type=int, default=100_000, metavar="N", help="rows (100000)")
    parser.add_argument("--vocab-size", type=int, default=32_000, metavar="N", help="of the tokenizer (32000)")
    parser.add_argument("--rounds", type=int, default=3, metavar="N", help="times that each is measured (3)")
    parser.add_argument("--measure", choices=[*WAYS, "start", "packing"], help=argparse.SUPPRESS)
    parser.add_argument("--folder", type=Path, help=argparse.SUPPRESS)
    add_output_flag(parser)
    arguments = parser.parse_args()
    if arguments.measure:
        measured(arguments.measure, arguments.folder)
        return
    if data_theirs.version() is None:
        parser.error("LLaMA-Factory's package is not there; benchmarks/data_theirs.py says how to install it")
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        write_inputs(folder, arguments.source, arguments.samples, arguments.vocab_size)
        loads = [os.getloadavg()[0]]
        results: dict[str, list[dict[str, float]]] = {way: [] for way in (*WAYS, "start", "packing")}
        for _ in range(arguments.rounds):
            for way in WAYS:
                results[way].append(measure(way, folder))
                loads.append(os.getloadavg()[0])
            # The cache holds what was prepared last; this makes sure that it is what the second start asks for.
            measure("start", folder)
            results["start"].append(measure("start", folder))
            results["packing"].append(measure("packing", folder))
    best = {way: min(rounds, key=lambda result: result["cpu"]) for way, rounds in results.items()}
    report(best, loads, arguments)


def report(best: dict[str, dict[str, float]], loads: Sequence[float], arguments: argparse.Namespace) -> None:
    """The table, and what stands below it."""
    rows = []
    for way, (title, _) in WAYS.items():
        result, peer = best[way], best[f"theirs-{way[-1]}"]
        rows.append(
            [
                title,
                f"{result['cpu']:.2f}",
                f"{result['cpu'] / peer['cpu']:.2f}",
                f"{result['busiest']:.2f}",
                f"{arguments.samples / result['seconds']:,.0f}",
                f"{result['tokens'] / result['cpu']:,.0f}",
                f"{result['peak']:.2f}",
            ]
        )
    start, packed, one, two = (best[way] for way in ("start", "packing", "named-1", "named-2"))
    note = (
        f"{arguments.samples:,} alpaca-like rows; of {arguments.rounds} rounds, in turn, the one with the fewest CPU "
        "seconds (user and system, of all processes). Ours reads, renders, tokenises, labels, packs all rows together "
        f"and writes; LLaMA-Factory is its package {data_theirs.version()} with template qwen, and packs within 1,000 "
        "rows; datasets.map has no labels and no packing. Busiest: CPU seconds of the busiest process, its threads "
        "included. Memory: the largest process, in GiB. Load of the machine: "
        f"{min(loads):.1f} to {max(loads):.1f} on {os.cpu_count()} cores; beside others samples/s say little, and "
        "a CPU second is longer, too.\n\n"
        f"- the second process: {one['cpu'] / max(two['busiest'], two['cpu'] / 2):.2f} times as fast as one core: CPU "
        "seconds of one process by those that two cores, were both free, leave to wait for (half of all, or those of "
        "the busiest process; starts included). Without preprocessing_num_workers the tokenizer has threads on all "
        "cores in the one process, which gains on the clock what two processes gain there for the tokenizer's part\n"
        f"- start of a second run, from the cache: {start['seconds']:.2f} s (key, opening, a row; without imports)\n"
        f"- packing {PACKED_LENGTHS:,} lengths into rows of {CAPACITY}: {packed['cpu']:.2f} CPU seconds, "
        f"{packed['filled']:.2%} full"
    )
    header = ["way", "CPU s", "of LLaMA-Factory's", "busiest", "samples/s", "tokens/CPU s", "peak GiB"]
    finish("data", "From files to token rows", header, rows, note, arguments.output)


if __name__ == "__main__":
    main()
