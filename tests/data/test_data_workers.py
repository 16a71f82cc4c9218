"""Worker processes that die or hang end the run with a reason, within a bound."""

from __future__ import annotations

import os
from typing import Any

import pytest
from tokenizer_kit import qwen_tokenizer

from megatune.data import workers
from megatune.data.encode import Encoder
from megatune.data.samples import Sample
from megatune.errors import ExitCode, MegatuneError

SAMPLES = [Sample("a.txt:1", "Hello", 1)]


class DyingTokenizer:
    """Ends its process the way the kernel does when memory runs out: without a word."""

    def __call__(self, *texts: Any, **options: Any) -> None:
        os._exit(9)


def test_a_worker_that_dies_is_reported() -> None:
    encoder = Encoder(DyingTokenizer(), None, cutoff_len=8)  # type: ignore[arg-type]
    with pytest.raises(MegatuneError, match="was killed, or could not start") as caught:
        list(workers.encode_all(encoder, SAMPLES, num_workers=2))
    assert caught.value.exit_code == ExitCode.PROCESS_DIED


def test_a_worker_that_does_not_answer_is_ended(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(workers, "CHUNK_TIMEOUT", 0.05)  # less than a process takes to start
    with pytest.raises(MegatuneError, match="does not answer") as caught:
        list(workers.encode_all(Encoder(qwen_tokenizer(), None, cutoff_len=8), SAMPLES, num_workers=2))
    assert caught.value.exit_code == ExitCode.PROCESS_DIED
