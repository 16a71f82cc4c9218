"""What this program trains on the golden cases, in the form of the golden files."""

from __future__ import annotations

import contextlib
import json
import os
from collections.abc import Iterator, Mapping
from functools import cache
from itertools import groupby
from pathlib import Path
from typing import Any

from megatune.config.dialects.swift import read_swift
from megatune.data.bad_rows import LengthError, RowError, UnsupportedRow
from megatune.data.encode import load_tokenizer, make_encoder
from megatune.data.rows import IGNORE_INDEX, Document
from megatune.data.samples import RowReader
from megatune.data.sources import datasets_of
from megatune.data.vision import load_vision_input
from megatune.errors import ExitCode, Finding, MegatuneError

Case = dict[str, Any]
Result = dict[str, Any]
_tokenizer = cache(load_tokenizer)


def encode(case: Case, models: Path, folder: Path) -> Result:
    """Encode the rows of a case, as a command line of the case does; `folder` is an empty one to work in."""
    with _inside(folder, case.get("env", {})):
        try:
            return {"rows": _rows(case, models, folder)}
        except MegatuneError as error:
            return {"error": str(error)}


def _rows(case: Case, models: Path, folder: Path) -> list[Result]:
    for name, text in case.get("files", {}).items():
        (folder / name).write_text(text, encoding="utf-8")
    (folder / "pictures").symlink_to(models / "pictures")
    rows = folder / "rows.jsonl"
    rows.write_text("".join(json.dumps(row, ensure_ascii=False) + "\n" for row in case["rows"]), encoding="utf-8")
    model = models / case["model"]
    words = ["--model", str(model), "--dataset", str(rows), "--dataset_shuffle", "false", "--train_iters", "1"]
    if case["version"] == 3:
        words += ["--log_interval", "5"]  # which only version 3 has
    config = json.loads((model / "config.json").read_text(encoding="utf-8"))
    run = read_swift(case["verb"], [*words, *case["flags"]], env=dict(os.environ), config=config, on_cpu=True)
    settings = run.loaded.require_valid(world_size=1)
    tokenizer = _tokenizer(model)
    vision = load_vision_input(model, tokenizer, settings.data)
    encoder = make_encoder(settings, tokenizer, vision)
    (source,) = datasets_of(settings)
    reader = RowReader(source, settings.run.stage, {}, media=vision is not None)
    found = []
    for row in source.rows():
        example, metadata = (row.error, None) if row.error else reader.read(row.fields)
        if not isinstance(example, RowError | UnsupportedRow):
            (example,) = encoder.encode([example])
        if isinstance(example, RowError | UnsupportedRow):
            if settings.data.on_bad_row == "error" and not isinstance(example, LengthError):
                raise MegatuneError(Finding(str(example)), ExitCode.DATA)
            found.append({"dropped": str(example)})
            continue
        documents = [_document(document) for document in example.documents]
        if settings.run.stage == "rm":  # scores the last token: no token is predicted
            for document in documents:
                del document["trained"]
        if settings.data.truncation_strategy == "split":
            found.append(_pieces(documents[0], settings.data.cutoff_len))
        elif len(documents) == 2:
            found.append(dict(zip(("chosen", "rejected"), documents, strict=True)))
        elif settings.run.stage == "kto":
            found.append({**documents[0], "label": metadata.desirable})
        else:
            found += documents
    return found


def _document(document: Document) -> Result:
    trained = (document.labels != IGNORE_INDEX).tolist()
    result: Result = {"ids": document.input_ids.tolist(), "trained": runs(trained)}
    if document.media:
        result["grids"] = [list(picture.grid) for picture in document.media]
    return result


def _pieces(document: Result, size: int) -> Result:
    ids, trained = document["ids"], spread(document["trained"])
    if len(ids) <= size:
        return document
    starts = range(0, len(ids), size)
    return {"pieces": [{"ids": ids[at : at + size], "trained": runs(trained[at : at + size])} for at in starts]}


def runs(trained: list[bool]) -> list[int]:
    """Return the lengths of runs of masked and trained tokens by turns; the first token is never predicted."""
    lengths = [(on, len(list(group))) for on, group in groupby([False, *trained[1:]])]
    return [length for _, length in lengths]


def spread(lengths: list[int]) -> list[bool]:
    """Return for each token whether it is trained: the inverse of `runs`."""
    return [bool(index % 2) for index, length in enumerate(lengths) for _ in range(length)]


def difference(expected: Result, found: Result) -> str:
    """Return what differs between ms-swift's result of a case and ours, "" where nothing does."""
    if _trains_nothing(expected) or _trains_nothing(found):
        return "" if _trains_nothing(expected) and _trains_nothing(found) else f"{_short(expected)} | {_short(found)}"
    if len(expected["rows"]) != len(found["rows"]):
        return f"{len(expected['rows'])} rows | {len(found['rows'])}"
    for number, (theirs, ours) in enumerate(zip(expected["rows"], found["rows"], strict=True)):
        if "dropped" in theirs and "dropped" in ours:
            continue
        if theirs != ours:
            return f"row {number}: {_short(theirs)} | {_short(ours)}"
    return ""


def _trains_nothing(result: Result) -> bool:
    """Tell whether a command ends before training: with an error, or as no row is left."""
    return "error" in result or all("dropped" in row for row in result["rows"])


def _short(result: Mapping[str, Any]) -> str:
    text = json.dumps(result, ensure_ascii=False)
    return text if len(text) < 300 else f"{text[:300]}..."


@contextlib.contextmanager
def _inside(folder: Path, env: Mapping[str, str]) -> Iterator[None]:
    before = dict(os.environ)
    os.environ.update(env)
    try:
        with contextlib.chdir(folder):
            yield
    finally:
        os.environ.clear()
        os.environ.update(before)
