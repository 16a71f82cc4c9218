"""What LLaMA-Factory does to prepare rows, step by step, over the same libraries: its package is not needed here.

It loads with datasets, maps every row to messages, maps batches of 1000 rows to tokens (one call of the tokenizer for
each piece of text that its template writes), fills rows of cutoff_len first-fit within the batch, pads them, and has
datasets write ids, labels, mask and positions.
"""

from __future__ import annotations

import bisect
import time
from collections import defaultdict
from pathlib import Path
from typing import Any

CUTOFF, IGNORED = 2048, -100
SYSTEM = "You are Qwen, created by Alibaba Cloud. You are a helpful assistant."


def to_messages(row: dict[str, str]) -> dict[str, Any]:
    question = "\n".join(part for part in (row["instruction"], row["input"]) if part)
    return {
        "_prompt": [{"role": "user", "content": question}],
        "_response": [{"role": "assistant", "content": row["output"]}],
        "_system": "",
        "_tools": "",
        "_images": None,
        "_videos": None,
        "_audios": None,
    }


def encoded(tokenizer: Any, question: str, answer: str) -> tuple[list[int], list[int]]:
    """The template qwen."""
    system = f"<|im_start|>system\n{SYSTEM}<|im_end|>\n"
    asked = f"<|im_start|>user\n{question}<|im_end|>\n<|im_start|>assistant\n"
    prompt = tokenizer.encode(system, add_special_tokens=False) + tokenizer.encode(asked, add_special_tokens=False)
    completion = tokenizer.encode(f"{answer}<|im_end|>\n", add_special_tokens=False)
    return prompt + completion, [IGNORED] * len(prompt) + completion


def filled(lengths: list[int]) -> list[list[int]]:
    """Lengths row by row: into each the longest that still fits."""
    lengths, rows = sorted(lengths), []
    while lengths:
        row, room = [], CUTOFF
        while (place := bisect.bisect(lengths, room)) > 0:
            row.append(lengths.pop(place - 1))
            room -= row[-1]
        rows.append(row)
    return rows


def to_rows(tokenizer: Any, batch: dict[str, list[Any]]) -> dict[str, list[Any]]:
    kept, by_length = [], defaultdict(list)
    for prompt, response in zip(batch["_prompt"], batch["_response"], strict=True):
        ids, labels = encoded(tokenizer, prompt[0]["content"], response[0]["content"])
        if len(ids) <= CUTOFF:
            by_length[len(ids)].append(len(kept))
            kept.append((ids, labels))
    rows: dict[str, list[Any]] = defaultdict(list)
    for lengths in filled([len(ids) for ids, _ in kept]):
        ids, labels, positions = [], [], []
        for length in lengths:
            more, trained = kept[by_length[length].pop()]
            ids += more
            labels += trained
            positions += list(range(length))
        padding = CUTOFF + 1 - len(ids)
        rows["input_ids"].append(ids + [tokenizer.pad_token_id] * padding)
        rows["labels"].append(labels + [IGNORED] * padding)
        rows["position_ids"].append(positions + [0] * padding)
        rows["attention_mask"].append([1] * (CUTOFF + 1))
        for kind in ("images", "videos", "audios"):
            rows[kind].append(None)
    return rows


def prepare(folder: Path, tokenizer: Any, processes: int) -> Any:
    """The rows, on disk."""
    import datasets

    datasets.disable_progress_bars()
    workers = processes if processes > 1 else None
    cache = str(folder / f"theirs-{time.monotonic_ns()}")
    rows = datasets.load_dataset("json", data_files=str(folder / "rows.jsonl"), split="train", cache_dir=cache)
    rows = rows.map(to_messages, remove_columns=rows.column_names, num_proc=workers)
    return rows.map(
        lambda batch: to_rows(tokenizer, batch),
        batched=True,
        batch_size=1000,
        remove_columns=rows.column_names,
        num_proc=workers,
    )


def num_tokens(rows: Any, tokenizer: Any) -> int:
    """Those that are not padding."""
    return sum(len(ids) - ids.count(tokenizer.pad_token_id) for ids in rows["input_ids"])
