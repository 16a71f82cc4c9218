"""Tools that a model calls in its turns: a program that is run, an index that is searched.

A turn that calls none is the answer, and the last one.
"""

from __future__ import annotations

import json
import re
import sqlite3
from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping
from functools import lru_cache
from pathlib import Path
from typing import Any

from megatune.rl.environments.play import Step
from megatune.rl.rewards.code.sandbox import Job, Sandbox

_CALL = re.compile(r"<tool_call>\s*(.*?)\s*</tool_call>", re.DOTALL)
_BLOCK = re.compile(r"```(?:python|py)\n(.*?)```", re.DOTALL)
_SEARCH = re.compile(r"<search>(.*?)</search>", re.DOTALL)
_THOUGHT = "</think>"


class _Tool(ABC):
    """Args of all: max_characters: of what a tool returns; the middle of more is left out."""

    is_stateless = True
    name, argument, written = "", "", re.compile("")

    def __init__(self, max_characters: int = 2000) -> None:
        if max_characters < 1:
            raise ValueError(f"max_characters is {max_characters}, expected 1 or more")
        self._most = max_characters

    def reset(self, row: Mapping[str, Any]) -> str:
        """Begin; a tool is the same for every row."""
        return ""

    def step(self, action: str) -> Step:
        """Run the turn's last call: {"name": ..., "arguments": {...}} in <tool_call>, or as the tool writes it."""
        said = action.rpartition(_THOUGHT)[2]
        asked = self.written.findall(said)
        for text in _CALL.findall(said):
            try:
                call = json.loads(text)
                if call["name"] != self.name:
                    return f"Error: there is no tool {call['name']!r}, only {self.name}", 0.0, False, False, {}
                asked.append(str(call["arguments"][self.argument]))
            except (ValueError, KeyError, TypeError):
                form = {"name": self.name, "arguments": {self.argument: "..."}}
                return f"Error: write {json.dumps(form)} in <tool_call>", 0.0, False, False, {}
        if not asked:
            return "", 0.0, True, False, {}
        return self._shortened(self.call(asked[-1])), 0.0, False, False, {}

    @abstractmethod
    def call(self, asked: str) -> str:
        """Return what the tool says."""

    def _shortened(self, text: str) -> str:
        half = self._most // 2
        return text if len(text) <= self._most else f"{text[:half]} … {text[-half:]}"


class PythonTool(_Tool):
    """Runs the last ```python block of a turn in the sandbox of rewards, and returns what it prints.

    Args:
        seconds: that it may take.
    """

    name, argument, written = "python", "code", _BLOCK

    def __init__(self, seconds: float = 10.0, max_characters: int = 2000) -> None:
        super().__init__(max_characters)
        self._seconds = seconds

    def call(self, asked: str) -> str:
        with Sandbox(Job(asked), seconds=self._seconds) as sandbox:
            found = sandbox.read("", self._seconds)
        return "\n".join(filter(None, (found.stdout.strip(), found.failure))) or "(no output)"


class SearchTool(_Tool):
    """Searches texts by SQLite's full-text index, the best by BM25 first: <search>words</search>.

    Args:
        file: JSON lines with a column `text`, and perhaps `title`.
        results: how many are returned.
    """

    name, argument, written = "search", "query", _SEARCH

    def __init__(self, file: str, results: int = 3, max_characters: int = 2000) -> None:
        super().__init__(max_characters)
        if not Path(file).is_file():
            raise ValueError(f"file {file} is missing")
        self._file, self._results = file, results

    def call(self, asked: str) -> str:
        words = " OR ".join(f'"{word}"' for word in re.findall(r"\w+", asked))
        if not words:
            return "(no words to search for)"
        query = "SELECT title, text FROM texts WHERE texts MATCH ? ORDER BY bm25(texts), rowid LIMIT ?"
        found = _index(self._file).execute(query, (words, self._results)).fetchall()
        return "\n".join(f"{title}: {text}" if title else text for title, text in found) or "(nothing found)"


@lru_cache(maxsize=4)
def _index(file: str) -> sqlite3.Connection:
    """Return an index of a file's texts, in memory."""
    made = sqlite3.connect(":memory:")
    made.execute("CREATE VIRTUAL TABLE texts USING fts5(title, text)")
    made.executemany("INSERT INTO texts VALUES (?, ?)", _texts(Path(file)))
    return made


def _texts(path: Path) -> Iterator[tuple[str, str]]:
    with path.open(encoding="utf-8") as lines:
        for number, line in enumerate(lines, 1):
            try:
                row = json.loads(line)
                yield str(row.get("title") or ""), row["text"]
            except (ValueError, KeyError, AttributeError) as error:
                raise ValueError(f"{path}, line {number}: not a JSON object with a column text") from error
