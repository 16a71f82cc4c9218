"""What rows with pictures take: memory of all processes, CPU seconds and a second start, while rows are prepared and
while steps are loaded.

Every picture is a JPEG of its own with about as many bytes as `--size` says, in a folder beside the rows or, with
`--inside`, in the rows of Parquet files. Nothing of a model runs: batches are made as a run makes them, and dropped.
"""

from __future__ import annotations

import argparse
import io
import json
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
from data_clock import INTERVAL, Clock
from PIL import Image
from reporting import add_output_flag, finish

SIDE, ROWS_A_FILE = (1024, 768), 10_000
BATCH, WORKERS = 4, 2  # rows of a step, and processes that load ahead


def media(count: int, size: int) -> Iterator[bytes]:
    """JPEGs of slopes and noise, each with a number of its own inside."""
    draw = np.random.default_rng(0)
    coarse = draw.integers(0, 256, (12, 16, 3), dtype=np.uint8)
    smooth = np.asarray(Image.fromarray(coarse).resize(SIDE, Image.Resampling.BICUBIC)).astype(np.int16)
    noisy = (smooth + draw.integers(-12, 13, smooth.shape, dtype=np.int16)).clip(0, 255).astype(np.uint8)
    for quality in range(96, 5, -2):
        Image.fromarray(noisy).save(file := io.BytesIO(), "JPEG", quality=quality)
        if file.tell() <= size:
            break
    content = file.getvalue()
    for number in range(count):
        yield content[:2] + b"\xff\xfe\x00\x0a%08d" % number + content[2:]  # a comment behind the start of the image


def write_inputs(folder: Path, count: int, size: int, *, inside: bool) -> None:
    """The rows with their pictures."""
    (data := folder / "rows").mkdir()
    texts = (
        {"instruction": f"<image>What is in picture {number}?", "output": f"Slopes of colour and noise, {number}."}
        for number in range(count)
    )
    found = media(count, size)
    if inside:
        for number in range(-(-count // ROWS_A_FILE)):
            write_parquet(data / f"{number:03}.parquet", islice(texts, ROWS_A_FILE), found)
        return
    with open(data / "rows.jsonl", "w", encoding="utf-8") as file:
        for number, (row, content) in enumerate(zip(texts, found, strict=True)):
            path = data / "images" / f"{number // 1000}" / f"{number}.jpg"
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_bytes(content)
            file.write(f"{json.dumps({**row, 'images': [str(path.relative_to(data))]})}\n")


def write_parquet(path: Path, texts: Iterator[dict[str, str]], found: Iterator[bytes]) -> None:
    """Rows with their pictures, a hundred in each row group, as the datasets library writes them."""
    import pyarrow
    import pyarrow.parquet

    picture = pyarrow.struct({"bytes": pyarrow.binary(), "path": pyarrow.string()})
    schema = pyarrow.schema(
        {"instruction": pyarrow.string(), "output": pyarrow.string(), "images": pyarrow.list_(picture)}
    )
    with pyarrow.parquet.ParquetWriter(path, schema) as writer:
        while rows := [{**row, "images": [{"bytes": next(found)}]} for row in islice(texts, 100)]:
            writer.write_table(pyarrow.Table.from_pylist(rows, schema))


def load_inputs(folder: Path, workers: int) -> tuple[Any, Any, Any]:
    """The settings, the tokenizer, and what makes pictures into tokens."""
    from megatune.config.load import load
    from megatune.data.encode import load_tokenizer
    from megatune.data.vision import load_vision_input

    values = {
        "model_name_or_path": folder / "model", "dataset": folder / "rows", "template": "qwen2_vl", "cutoff_len": 2048,
        "media_dir": folder / "rows", "preprocessing_num_workers": workers, "output_dir": folder / "out",
    }  # fmt: skip
    settings = load(overrides=[f"{key}={value}" for key, value in values.items()]).require_valid()
    tokenizer = load_tokenizer(folder / "model")
    return settings, tokenizer, load_vision_input(folder / "model", tokenizer, settings.data)


def prepared(folder: Path, workers: int) -> dict[str, float]:
    """Prepare the rows, or open them."""
    from megatune.data.prepare import prepare

    settings, tokenizer, vision = load_inputs(folder, workers)
    clock = Clock(memory=True)
    rows = prepare(settings, tokenizer, vision=vision).train
    assert len(rows[0])
    return clock.read()


def loaded(folder: Path, steps: int) -> dict[str, float]:
    """Make the batches of steps, in the shuffled order of a run."""
    from megatune.data.batches import Collator, MediaShard
    from megatune.data.loader import StepLoader
    from megatune.data.order import PreparedSteps
    from megatune.data.prepare import prepare

    settings, tokenizer, vision = load_inputs(folder, 1)
    rows = prepare(settings, tokenizer, vision=vision).train
    clock = Clock(memory=True)
    loader = StepLoader(
        PreparedSteps.from_settings(rows, settings, BATCH),
        Collator(BATCH, rows.is_packed, sequence_multiple=8, document_multiple=1, pad_token_id=0, vision=vision),
        data_parallel_rank=0,
        data_parallel_size=1,
        num_micro_batches=1,
        same_length=False,
        stop_step=steps,
        shard=MediaShard(0, 1),
        num_workers=WORKERS,
    )
    for _, batches in loader:
        assert all(batch.media is not None and not batch.unreadable for batch in batches)
    return clock.read()


def measure(way: str, folder: Path, arguments: argparse.Namespace) -> dict[str, float]:
    """Run one way in a process of its own."""
    environment = {**os.environ, "MEGATUNE_CACHE": str(folder / "cache")}
    words = [sys.executable, __file__, "--measure", way, "--folder", str(folder), "--steps", str(arguments.steps)]
    done = subprocess.run(words, env=environment, stdout=subprocess.PIPE, text=True, check=True)
    return dict(json.loads(done.stdout.splitlines()[-1]))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--pictures", type=int, default=100_000, metavar="N", help="rows, each with one (100000)")
    parser.add_argument("--size", type=int, default=300_000, metavar="BYTES", help="of a picture, at most (300000)")
    parser.add_argument("--inside", action="store_true", help="in the rows of Parquet files, not in a folder")
    parser.add_argument("--steps", type=int, default=300, metavar="N", help=f"that are loaded, of {BATCH} rows (300)")
    parser.add_argument("--folder", type=Path, help="for all files; kept, and rows that it has are used")
    parser.add_argument("--measure", choices=WAYS, help=argparse.SUPPRESS)
    add_output_flag(parser)
    arguments = parser.parse_args()
    if arguments.measure:
        run = WAYS[arguments.measure][1]
        print(json.dumps(run(arguments.folder, arguments.steps)))
        return
    with tempfile.TemporaryDirectory() as name:
        folder = arguments.folder or Path(name)
        report(folder, arguments)


WAYS = {
    "one": ("prepare, one process", lambda folder, _: prepared(folder, 1)),
    "start": ("second start", lambda folder, _: prepared(folder, 1)),
    "load": (f"load steps of {BATCH} rows, {WORKERS} processes", loaded),
    "two": ("prepare, two processes", lambda folder, _: prepared(folder, 2)),
}


def report(folder: Path, arguments: argparse.Namespace) -> None:
    """Measure each way once, and write the table."""
    from megatune.demo.checkpoint import make_checkpoint

    folder.mkdir(exist_ok=True)
    make_checkpoint("qwen2_vl", folder / "model", overwrite=True)
    if not (folder / "rows").exists():
        write_inputs(folder, arguments.media, arguments.size, inside=arguments.inside)
    size = sum(path.stat().st_size for path in (folder / "rows").rglob("*") if path.is_file())
    rows = []
    for way, (title, _) in WAYS.items():
        if way in ("one", "two"):
            shutil.rmtree(folder / "cache", ignore_errors=True)
        found = measure(way, folder, arguments)
        figures = (found["seconds"], found["cpu"], found["held"], found["mapped"])
        rows.append([title, *(f"{figure:.2f}" for figure in figures)])
        print(rows[-1], flush=True)
    note = (
        f"{arguments.media:,} rows, each with a JPEG of its own, {size / 2**30:.1f} GiB in "
        f"all, {'in the rows of Parquet files' if arguments.inside else 'in a folder'}; {arguments.steps} steps are "
        f"loaded. Without the imports. Memory: the most that all processes hold at one of the looks, "
        f"{INTERVAL} s apart; a page that several share counts once. Pages of files, which are in the last column, a "
        "system takes back where it needs them."
    )
    kind = "rows" if arguments.inside else "folder"
    header = ["work", "s", "CPU s", "held, GiB", "with pages of files, GiB"]
    finish(f"picture-memory-{kind}", "Memory of data with pictures", header, rows, note, arguments.output)


if __name__ == "__main__":
    main()
