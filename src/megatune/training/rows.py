"""Token rows for every rank: one process of each machine prepares them, the others map what it made."""

from __future__ import annotations

import os
import time
from pathlib import Path
from typing import TYPE_CHECKING

from megatune.config.settings import Settings
from megatune.data.prepare import Prepared, open_prepared, prepare, prepared_key
from megatune.engine import groups
from megatune.errors import ExitCode, Finding, MegatuneError
from megatune.launch.context import RankContext

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

_POLL_SECONDS = 0.05


def load_tokenizer(model_dir: str | Path) -> PreTrainedTokenizerBase:
    """The checkpoint's tokenizer.

    Raises:
        MegatuneError: INPUT, when there is none or it cannot be read.
    """
    from transformers import AutoTokenizer

    try:
        return AutoTokenizer.from_pretrained(model_dir)
    except (OSError, ValueError, KeyError) as error:
        raise MegatuneError(
            Finding(
                "the tokenizer cannot be loaded",
                str(model_dir),
                str(error).splitlines()[0] if str(error) else type(error).__name__,
                "put tokenizer.json and tokenizer_config.json beside the weights",
            ),
            ExitCode.INPUT,
        ) from error


def cache_dir() -> Path:
    """Where prepared rows are kept between runs: $MEGATUNE_CACHE, else ~/.cache/megatune."""
    return Path(os.environ.get("MEGATUNE_CACHE") or "~/.cache/megatune").expanduser()


def prepare_on_node(context: RankContext, settings: Settings, tokenizer_dir: str | Path) -> tuple[Prepared, str]:
    """The rows of this run, and the digest of all that determines them.

    Preparing can take longer than any collective operation may, so the other ranks of the machine look for a note
    instead of waiting in one. A failure ends the rank that prepares, and with it the run.

    Raises:
        MegatuneError: see `data.prepare.prepare`.
    """
    note = f"rows/{context.node_rank}"
    if context.local_rank == 0:
        tokenizer = load_tokenizer(tokenizer_dir)
        key = prepared_key(settings, tokenizer)
        context.beat("data", 0, limit=float("inf"))
        prepared = prepare(settings, tokenizer, cache_dir() / "rows" / key)
        groups.post(note, key)
        return prepared, key
    while (posted := groups.posted(note)) is None:
        context.beat("data", 0)
        time.sleep(_POLL_SECONDS)
    return open_prepared(cache_dir() / "rows" / posted), posted


def check_vocabulary(prepared: Prepared, vocab_size: int) -> None:
    """Refuse token ids that the model has no embedding for.

    Raises:
        MegatuneError: INPUT.
    """
    largest = max(part.largest_id for part in (prepared.report.train, prepared.report.evaluation) if part is not None)
    if largest >= vocab_size:
        raise MegatuneError(
            Finding(
                f"token id {largest} is beyond the model's vocabulary of {vocab_size}",
                why="the tokenizer and the weights belong to different models",
                mend="use the tokenizer that was published with the weights",
            ),
            ExitCode.INPUT,
        )
