"""What keeps a run from continuing, known without torch."""

from __future__ import annotations

from pathlib import Path

from megatune.training.train_state import ROWS, TrainState, changed_since


def of_rows(**parts: str) -> TrainState:
    return TrainState(rows_digest="key", rows_parts={"the tokenizer": "t", **parts})


def test_rows_that_another_version_makes_otherwise_are_noticed() -> None:
    """The files and settings are the same, and so is the key; a checkpoint of a version that kept no digest resumes."""
    before = of_rows(**{ROWS: "1"})
    assert not list(changed_since(Path("c"), before, before))
    assert not list(changed_since(Path("c"), of_rows(), before))
    (finding,) = changed_since(Path("c"), before, of_rows(**{ROWS: "2"}))
    assert finding.what == "the training rows differ from those that the run began with"
    assert finding.why == "changed: the prepared rows"
