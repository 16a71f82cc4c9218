"""LLaMA-Factory's own package prepares the rows.

Its trainer's packages are not needed: `pip install --no-deps --target DIR llamafactory==0.9.5`, then PYTHONPATH=DIR. It
asks for other versions of Transformers and datasets than those that are measured here, and for torchaudio, of which
text needs nothing: neither is looked at.
"""

from __future__ import annotations

import contextlib
import importlib.metadata
import importlib.util
import json
import os
import sys
import time
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any


def version() -> str | None:
    """Return that of the package; None where it is not installed."""
    with contextlib.suppress(importlib.metadata.PackageNotFoundError):
        return importlib.metadata.version("llamafactory")
    return None


def import_it() -> None:
    """Import what `prepare` calls."""
    os.environ["DISABLE_VERSION_CHECK"] = "1"
    if importlib.util.find_spec("torchaudio") is None:
        sys.modules["torchaudio"] = ModuleType("torchaudio")
    import llamafactory.data
    import llamafactory.hparams  # noqa: F401


def prepare(folder: Path, tokenizer: Any, template: str, processes: int) -> Any:
    """Return the packed rows, on disk, as its trainer gets them."""
    import datasets
    from llamafactory.data import get_dataset, get_template_and_fix_tokenizer
    from llamafactory.hparams import DataArguments

    datasets.disable_progress_bars()
    (folder / "dataset_info.json").write_text(json.dumps({"rows": {"file_name": "rows.jsonl"}}))
    workers = processes if processes > 1 else None
    data = DataArguments(
        template=template,
        dataset="rows",
        dataset_dir=str(folder),
        cutoff_len=2048,
        packing=True,
        preprocessing_num_workers=workers,
    )
    model = SimpleNamespace(cache_dir=str(folder / f"theirs-{time.monotonic_ns()}"), hf_hub_token=None)
    run = SimpleNamespace(
        main_process_first=lambda **_: contextlib.nullcontext(),
        local_process_index=0,
        should_log=False,
        seed=42,
        do_train=True,
        predict_with_generate=False,
    )
    with contextlib.redirect_stdout(sys.stderr):
        found = get_dataset(get_template_and_fix_tokenizer(tokenizer, data), model, data, run, "sft", tokenizer)
    return found["train_dataset"]


def num_tokens(rows: Any) -> int:
    """Count those that are not padding."""
    return sum(len(mask) - mask.count(0) for mask in rows["attention_mask"])
