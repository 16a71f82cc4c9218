"""Token rows for every rank: one process of each machine prepares them, the others map what it made."""

from __future__ import annotations

import time
from pathlib import Path

from megatune.config.settings import Settings
from megatune.data.prepare import Prepared, open_prepared, prepare
from megatune.data.tokenizer import load_tokenizer
from megatune.engine import groups
from megatune.errors import ExitCode, Finding, MegatuneError
from megatune.launch.context import RankContext

_POLL_SECONDS = 0.05


def prepare_on_node(context: RankContext, settings: Settings, tokenizer_dir: str | Path) -> Prepared:
    """The rows of this run.

    Preparing can take longer than any collective operation may, so the other ranks of the machine look for a note
    instead of waiting in one. It names the folder, which need not be the same on every machine. A failure ends the
    rank that prepares, and with it the run.

    Raises:
        MegatuneError: see `data.prepare.prepare`.
    """
    note = f"rows/{context.node_rank}"
    if context.local_rank == 0:
        context.beat("data", 0, limit=float("inf"))
        prepared = prepare(settings, load_tokenizer(tokenizer_dir))
        groups.post(note, str(prepared.directory.absolute()))
        return prepared
    while (posted := groups.posted(note)) is None:
        context.beat("data", 0)
        time.sleep(_POLL_SECONDS)
    return open_prepared(Path(posted))


def check_vocabulary(prepared: Prepared, vocab_size: int) -> None:
    """Refuse token ids that the model has no embedding for.

    Raises:
        MegatuneError: INPUT.
    """
    parts = (prepared.report.train, prepared.report.evaluation)
    check_token_ids(max(part.largest_id for part in parts if part is not None), vocab_size)


def check_token_ids(largest: int, vocab_size: int) -> None:
    """Refuse a token id that the model has no embedding for.

    Raises:
        MegatuneError: INPUT.
    """
    if largest >= vocab_size:
        raise MegatuneError(
            Finding(
                f"token id {largest} is beyond the model's vocabulary of {vocab_size}",
                why="the tokenizer and the weights belong to different models",
                fix="use the tokenizer that was published with the weights",
            ),
            ExitCode.INPUT,
        )
