"""What became of every row that was read."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterable
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

EXAMPLES_PER_REASON = 3


@dataclass(slots=True)
class DatasetReport:
    """One data set, in rows of its files; every row read is trained, held out or dropped.

    Attributes:
        dropped: number of rows by reason.
        examples: the first few dropped rows of each reason, with their places.
        truncated: rows cut to cutoff_len, among those trained or held out.
    """

    name: str
    read: int = 0
    trained: int = 0
    evaluation: int = 0
    truncated: int = 0
    dropped: Counter[str] = field(default_factory=Counter)
    examples: list[str] = field(default_factory=list)

    def drop(self, where: str, reason: str, detail: str) -> None:
        """Count one dropped row."""
        self.dropped[reason] += 1
        if self.dropped[reason] <= EXAMPLES_PER_REASON:
            self.examples.append(f"{where}: {reason}{f' ({detail})' if detail else ''}")


@dataclass(slots=True)
class TokenReport:
    """The token rows of training or of evaluation.

    Attributes:
        documents: more than rows of files where long texts are cut into several or data sets are repeated.
        rows: as many as documents, or fewer where they are packed.
        capacity: tokens that a packed row can hold; None without packing.
        trained: tokens that count in the loss.
        longest: tokens of the longest document.
        largest_id: the largest token id, which the model's vocabulary must hold.
    """

    documents: int = 0
    rows: int = 0
    capacity: int | None = None
    tokens: int = 0
    trained: int = 0
    longest: int = 0
    largest_id: int = 0

    def add(self, input_ids: np.ndarray, trained: int) -> None:
        """Count one document."""
        self.documents += 1
        self.tokens += len(input_ids)
        self.trained += trained
        self.longest = max(self.longest, len(input_ids))
        self.largest_id = max(self.largest_id, int(input_ids.max()))

    @property
    def packing_efficiency(self) -> float:
        """The share of packed rows' capacity that holds tokens."""
        assert self.capacity is not None
        return self.tokens / (self.rows * self.capacity)

    def line(self) -> str:
        """The report in words."""
        tokens = f"{self.tokens} tokens, {self.trained} of them trained"
        if self.capacity is None:
            return f"{self.rows} token rows, {tokens}"
        return (
            f"{self.documents} samples packed into {self.rows} rows of up to {self.capacity} tokens, "
            f"{self.packing_efficiency:.1%} full; {tokens}"
        )


@dataclass(slots=True)
class DataReport:
    """All of it; `train` and `evaluation` count tokens, `datasets` rows of files."""

    datasets: list[DatasetReport]
    train: TokenReport
    evaluation: TokenReport | None = None

    def lines(self) -> Iterable[str]:
        """The report in words, for a terminal or a log."""
        for dataset in self.datasets:
            yield (
                f"{dataset.name}: {dataset.read} rows read, {dataset.trained} trained, {dataset.evaluation} held out, "
                f"{dataset.dropped.total()} dropped, {dataset.truncated} cut to cutoff_len"
            )
            for reason, count in dataset.dropped.most_common():
                yield f"    dropped {count}: {reason}"
            yield from (f"        {example}" for example in dataset.examples)
        for name, tokens in (("train", self.train), ("evaluation", self.evaluation)):
            if tokens is not None:
                yield f"{name}: {tokens.line()}"

    def save(self, path: Path) -> None:
        """Write as JSON."""
        datasets = [{name: getattr(dataset, name) for name in DatasetReport.__slots__} for dataset in self.datasets]
        tokens = {"train": asdict(self.train), "evaluation": asdict(self.evaluation) if self.evaluation else None}
        text = json.dumps({"datasets": datasets, **tokens}, ensure_ascii=False, indent=2)
        path.write_text(f"{text}\n", encoding="utf-8")

    @classmethod
    def load(cls, path: Path) -> DataReport:
        """Read what `save` wrote."""
        raw: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
        datasets = [DatasetReport(**{**entry, "dropped": Counter(entry["dropped"])}) for entry in raw["datasets"]]
        evaluation = TokenReport(**raw["evaluation"]) if raw["evaluation"] is not None else None
        return cls(datasets, TokenReport(**raw["train"]), evaluation)
