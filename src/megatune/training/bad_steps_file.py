"""OUTPUT/bad_steps.jsonl: each bad step with its rows and what became of it, over all processes of a run."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from megatune.training.storage.files import write_atomically, writing
from megatune.training.storage.json_lines import json_line, read_json_lines

BAD_STEPS_FILE = "bad_steps.jsonl"


class BadStepsFile:
    """The file of one run."""

    def __init__(self, output_dir: Path) -> None:
        self.path = output_dir / BAD_STEPS_FILE

    def begin(self, resume_step: int | None) -> list[dict[str, Any]]:
        """Drop what the run will come to again, and return the times that it went back.

        Args:
            resume_step: steps done before this process; None where the run starts anew.

        Raises:
            MegatuneError: CANNOT_WRITE.
        """
        with writing(self.path):
            if resume_step is None:
                self.path.unlink(missing_ok=True)
                return []
            records = read_json_lines(self.path)
            kept = [record for record in records if _goes_back(record) or record.get("step", 0) <= resume_step]
            if kept != records:
                write_atomically(self.path, "".join(map(json_line, kept)))
        return self.went_back()

    def went_back(self) -> list[dict[str, Any]]:
        """Return the records of the times that the run went back to a checkpoint."""
        return list(filter(_goes_back, read_json_lines(self.path)))

    def add(self, record: Mapping[str, Any]) -> None:
        """Keep a bad step.

        Raises:
            MegatuneError: CANNOT_WRITE.
        """
        with writing(self.path), self.path.open("a", encoding="utf-8") as file:
            file.write(json_line(record))


def _goes_back(record: Mapping[str, Any]) -> bool:
    return record.get("action") == "go_back" and isinstance(record.get("left_out"), list)
