"""A response of several turns as a reward sees it: an environment answers each turn, until it is done; and the
tools that a model calls in its turns: a program that is run, an index that is searched. A turn that calls none is the
answer, and the last one.

An environment has Gymnasium's terms. It runs in the processes of its domain's reward, which may be any of them, and
may be new after a resume: so it is played again from its beginning for every turn, and must answer equal turns of
equal rows equally.
"""

from __future__ import annotations

import json
import re
import sqlite3
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from functools import lru_cache
from pathlib import Path
from typing import Any, Protocol

from megatune.config.rl.rollout import ENVIRONMENTS
from megatune.rl.rewards.answer import Answer, Reward, RewardError, Verdict
from megatune.rl.rewards.code.sandbox import Job, Sandbox

OBSERVATION = "observation"  # of a verdict's details: the response goes on after it
BUILT_IN = {name: f"megatune.rl.environments:{name.title()}Tool" for name in ENVIRONMENTS}

# observation, reward, terminated, truncated, info
Step = tuple[str, float, bool, bool, Mapping[str, Any]]


class Environment(Protocol):
    """One problem, from its first turn to its last. It may have a class attribute `is_stateless`, where an answer
    depends on the turn alone, which is not played again then."""

    def reset(self, row: Mapping[str, Any]) -> object:
        """Begin with a row; the model sees its prompt, whatever this returns."""
        ...

    def step(self, action: str) -> Step:
        """Answer a turn of the model: its text, without special tokens."""
        ...


@dataclass(frozen=True, slots=True)
class Play:
    """A reward that plays.

    The score is the sum of the environment's rewards, or what another reward says of the last turn. `correct` is
    that of the last info, else whether the score is 1 or more.

    Attributes:
        make: returns a new environment.
        max_turns: of the model.
        reward: scores the last turn; None: the environment does.
    """

    make: Callable[[], Environment]
    max_turns: int
    reward: Reward | None = None

    def __call__(self, answer: Answer) -> Verdict:
        """Return a verdict that asks for another turn (`OBSERVATION`), or the response's."""
        total, is_done, observation, info = self._played(answer)
        if not is_done and answer.finish == "stop" and len(answer.turns) < self.max_turns:
            return Verdict(total, 0.0, {OBSERVATION: observation})
        said = {name: value for name, value in info.items() if name != "correct"} | {"turns": len(answer.turns)}
        if self.reward is None:
            return Verdict(total, float(info.get("correct", total >= 1)), said)
        verdict = self.reward(answer)
        return replace(verdict, details={**said, **verdict.details})

    def _played(self, answer: Answer) -> tuple[float, bool, str, Mapping[str, Any]]:
        environment = self.make()
        environment.reset(answer.row)
        turns = answer.turns[-1:] if getattr(environment, "is_stateless", False) else answer.turns
        total, is_done, observation, info = 0.0, False, "", dict[str, Any]()
        for turn in turns:
            step = environment.step(turn)
            if not isinstance(step, tuple) or len(step) != 5:
                what = "step returns (observation, reward, terminated, truncated, info)"
                raise RewardError(f"the environment {type(environment).__name__}: {what}, not {step!r:.80}")
            observation, reward, terminated, truncated, own = step
            total, info, is_done = total + float(reward), {**info, **own}, bool(terminated or truncated)
            if is_done:
                break
        return total, is_done, str(observation), info


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
