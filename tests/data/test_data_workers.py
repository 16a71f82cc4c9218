"""Worker processes that die or hang end the run with a reason, within a bound."""

from __future__ import annotations

import gc
import os
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import psutil
import pytest
from formats_kit import pair_of
from tokenizer_kit import qwen_tokenizer

from megatune.data import workers
from megatune.data.bad_rows import LengthError, RowError
from megatune.data.conversation import Conversation, Example, Message
from megatune.data.encode import Encoded, Encoder
from megatune.data.formats import FORMATS
from megatune.data.readers import RawRow
from megatune.data.samples import NO_METADATA, RowMetadata, RowReader, Sample
from megatune.data.sources import DatasetSource
from megatune.data.templates import load_template
from megatune.errors import ExitCode, MegatuneError

SAMPLES = [Sample(RawRow("a.txt:1", {"text": "Hello"}))]
READER = RowReader(DatasetSource("a", (), FORMATS["text"]), "pt", {})


class GivenExamples(RowReader):
    """Reads rows that have an example, or why there is none."""

    def read(self, fields: Mapping[str, Any]) -> tuple[Any, RowMetadata]:
        return fields["example"], NO_METADATA


class DyingTokenizer:
    """Ends its process the way the kernel does when memory runs out: without a word."""

    def __call__(self, *texts: Any, **options: Any) -> None:
        os._exit(9)


def test_a_worker_that_dies_is_reported() -> None:
    encoder = Encoder(DyingTokenizer(), None, cutoff_len=8)  # type: ignore[arg-type]
    with pytest.raises(MegatuneError, match="was killed, or could not start") as caught:
        list(workers.encode_all(encoder, READER, SAMPLES, num_workers=2))
    assert caught.value.exit_code == ExitCode.PROCESS_DIED


def test_a_worker_that_does_not_answer_is_ended(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(workers, "CHUNK_TIMEOUT", 0.05)  # less than a process takes to start
    with pytest.raises(MegatuneError, match="does not answer") as caught:
        list(workers.encode_all(Encoder(qwen_tokenizer(), None, cutoff_len=8), READER, SAMPLES, num_workers=2))
    assert caught.value.exit_code == ExitCode.PROCESS_DIED


def test_workers_end_with_a_parent_that_is_killed(tmp_path: Path) -> None:
    script = tmp_path / "parent.py"
    script.write_text(PARENT)
    path = os.pathsep.join([str(Path(__file__).parent), os.environ.get("PYTHONPATH", "")])
    with subprocess.Popen(
        [sys.executable, script], stdout=subprocess.PIPE, env={**os.environ, "PYTHONPATH": path}
    ) as parent:
        assert parent.stdout is not None
        parent.stdout.readline()
        children = psutil.Process(parent.pid).children(recursive=True)
        parent.kill()
    _, alive = psutil.wait_procs(children, timeout=30)
    assert len(children) >= 2
    assert not alive


PARENT = """
import time
from tokenizer_kit import qwen_tokenizer
from test_data_workers import READER, SAMPLES
from megatune.data import workers
from megatune.data.encode import Encoder

if __name__ == "__main__":
    for _ in workers.encode_all(Encoder(qwen_tokenizer(), None, cutoff_len=8), READER, SAMPLES * 600, num_workers=2):
        print("working", flush=True)
        time.sleep(600)
"""


def test_processes_send_what_one_computes() -> None:
    """Conversations, pairs, rows that are cut, rows that are lost and rows that never were any, in their order."""
    tokenizer = qwen_tokenizer()
    encoder = Encoder(tokenizer, load_template("qwen", tokenizer), cutoff_len=120, truncation="right")
    question = Message("user", "What is the weather in Paris today?")
    examples: list[Example | RowError] = []
    for number in range(300):
        answer = Message("assistant", f"{number} " * (number % 40 + 1))
        examples += [
            Conversation((question, answer)),
            Conversation((Message("user", "weather " * 100), answer)),
            pair_of((question,), answer, Message("assistant", "No.")),
            RowError("code", "reason", f"detail {number}"),
        ]
    samples = [Sample(RawRow(str(number), {"example": example})) for number, example in enumerate(examples)]
    reader = GivenExamples(READER.source, "sft", {})
    alone, apart = (list(workers.encode_all(encoder, reader, samples, num_workers)) for num_workers in (1, 2))
    assert [sample for sample, _ in alone] == [sample for sample, _ in apart] == samples
    seen = set()
    for (_, ours), (_, theirs) in zip(alone, apart, strict=True):
        seen.add(type(ours))
        assert type(ours) is type(theirs)
        if isinstance(ours, RowError):
            assert isinstance(theirs, RowError)
            assert (ours.code, str(ours), vars(ours)) == (theirs.code, str(theirs), vars(theirs))
        else:
            assert isinstance(theirs, Encoded)
            assert (ours.truncated, ours.length) == (theirs.truncated, theirs.length)
            for mine, other in zip(ours.documents, theirs.documents, strict=True):
                assert mine.input_ids.tolist() == other.input_ids.tolist()
                assert mine.labels.tolist() == other.labels.tolist()
    assert seen == {Encoded, RowError, LengthError}


@pytest.mark.parametrize("num_workers", [1, 2])
def test_the_heap_is_frozen_once(num_workers: int) -> None:
    gc.unfreeze()
    encoder = Encoder(qwen_tokenizer(), None, cutoff_len=8)
    frozen = [
        gc.get_freeze_count() for _ in range(2) for _ in workers.encode_all(encoder, READER, SAMPLES, num_workers)
    ]
    assert 0 < frozen[1] <= frozen[0]
