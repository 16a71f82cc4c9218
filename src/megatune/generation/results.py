"""Answers in a file: JSON lines as ms-swift writes them, one for each answer, whole as soon as it is there."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping, Sequence
from datetime import datetime
from pathlib import Path
from types import TracebackType
from typing import Any

from megatune.errors import ExitCode, Finding, MegatuneError


def default_path(folder: Path) -> Path:
    """Return where answers go that nobody gave a place: infer_result/TIMESTAMP.jsonl in the model's folder."""
    return folder / "infer_result" / f"{datetime.now():%Y%m%d-%H%M%S}.jsonl"


class ResultFile:
    """A new file of answers.

    Raises:
        MegatuneError: (CANNOT_WRITE) it is there already, or cannot be made.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            self._file = open(path, "x", encoding="utf-8", errors="backslashreplace")  # noqa: SIM115
        except FileExistsError as error:
            why, fix = "existing answers are never overwritten", "give another --result_path, or move the file away"
            raise MegatuneError(Finding("is there already", str(path), why, fix), ExitCode.CANNOT_WRITE) from error
        except OSError as error:
            raise self._unwritten(error) from error

    def __enter__(self) -> ResultFile:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._file.close()
        if kind is not None and os.path.getsize(self.path) == 0:  # what failed before its first answer may be repeated
            self.path.unlink()

    def add(self, row: Mapping[str, Any]) -> None:
        """Write one line."""
        try:
            self._file.write(json.dumps(row, ensure_ascii=False) + "\n")
            self._file.flush()
        except OSError as error:
            raise self._unwritten(error) from error

    def add_turn(self, messages: Sequence[Mapping[str, Any]], response: str) -> None:
        """Write the line of a chat's turn: the response, and all messages with it."""
        self.add({"response": response, "messages": [*messages, {"role": "assistant", "content": response}]})

    def _unwritten(self, error: OSError) -> MegatuneError:
        finding = Finding(
            "cannot write the answers", str(self.path), error.strerror or str(error), "--result_path FILE"
        )
        return MegatuneError(finding, ExitCode.CANNOT_WRITE)
