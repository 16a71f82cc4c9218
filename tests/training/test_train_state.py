"""What keeps a run from continuing, known without torch."""

from __future__ import annotations

import json
from datetime import date
from pathlib import Path

from pool import RankPool

from megatune.config.groups.data import DataSettings
from megatune.config.settings import Settings
from megatune.data.cache.key import DAY
from megatune.training.storage.manifest import TRAINING_FOLDER
from megatune.training.train_state import ROWS, STATE_NAME, TrainState, changed_since


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


def test_merged_adapters_are_compared_unless_the_checkpoint_is_of_an_earlier_version() -> None:
    """Digests had no part for their order and scaling factors."""
    now = TrainState(base="weights-merged", reference="weights-merged")
    assert not list(changed_since(Path("c"), now, now))
    assert not list(changed_since(Path("c"), TrainState(base="weights", reference="weights"), now))
    for before in (TrainState(base="weights-other"), TrainState(base="other"), TrainState()):
        assert [finding.what for finding in changed_since(Path("c"), before, now)] == [
            "the adapters were trained with another base"
        ]


def days_of(checkpoint: Path | None, data: dict[str, str]) -> str | None:
    """On a rank: the day on which templates are written, of a run that resumes from a checkpoint."""
    from megatune.engine.groups import build
    from megatune.training.feed import with_template_date

    settings = Settings(data=DataSettings(**data))
    build(settings.parallel, seed=0, timeout=60)
    return with_template_date(settings, checkpoint).data.template_date


def test_a_run_that_resumes_keeps_its_day(pool: RankPool, tmp_path: Path) -> None:
    """Today is not the checkpoint's day."""
    (tmp_path / TRAINING_FOLDER).mkdir()
    state = {"rows_parts": {DAY: "2026-01-31"}}
    (tmp_path / TRAINING_FOLDER / STATE_NAME).write_text(json.dumps(state))
    rules = {"conversation_rules": "ms_swift_4"}
    today = date.today().isoformat()
    assert pool.run(2, days_of, None, rules) in ([today] * 2, [date.today().isoformat()] * 2)
    assert pool.run(2, days_of, tmp_path, rules) == ["2026-01-31"] * 2
    assert pool.run(2, days_of, tmp_path, rules | {"template_date": "2026-02-01"}) == ["2026-02-01"] * 2
    assert pool.run(2, days_of, tmp_path, {}) == [None] * 2
