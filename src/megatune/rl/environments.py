"""Environments of multi-turn responses, and two tools as environments: a Python sandbox and a search index. A turn that
calls no tool is the answer, and the last turn.

Environments have Gymnasium's interface. They run in any process of their domain's reward, and continue in others
after a resume: so all turns are replayed for every new turn, and an environment must be deterministic.
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

OBSERVATION = "observation"  # key in a verdict's details; the response continues after the observation
BUILT_IN = {name: f"megatune.rl.environments:{name.title()}Tool" for name in ENVIRONMENTS}

# observation, reward, terminated, truncated, info
Step = tuple[str, float, bool, bool, Mapping[str, Any]]


class Environment(Protocol):
    """One episode: a problem from its first turn to its last. If a class attribute `is_stateless` is true, a step
    depends only on the turn, and earlier turns are not replayed."""

    def reset(self, row: Mapping[str, Any]) -> object:
        """Begin with a row; the return value is ignored, since the model sees the row's prompt."""
        ...

    def step(self, action: str) -> Step:
        """Respond to a turn of the model: its text without special tokens."""
        ...


@dataclass(frozen=True, slots=True)
class EnvironmentReward:
    """A reward with an environment.

    The score is the sum of the environment's rewards, or the score of another reward for the last turn. `correct` is
    that of the last info, by default whether the score is 1 or more.

    Attributes:
        make: returns a new environment.
        max_turns: maximum number of turns of the model.
        reward: scores the last turn; None if the environment does.
    """

    make: Callable[[], Environment]
    max_turns: int
    reward: Reward | None = None

    def __call__(self, answer: Answer) -> Verdict:
        """Return a verdict that requests another turn (`OBSERVATION`), or the final one."""
        total, is_done, observation, info = self._replay(answer)
        if not is_done and answer.finish == "stop" and len(answer.turns) < self.max_turns:
            return Verdict(total, 0.0, {OBSERVATION: observation})
        details = {name: value for name, value in info.items() if name != "correct"} | {"turns": len(answer.turns)}
        if self.reward is None:
            return Verdict(total, float(info.get("correct", total >= 1)), details)
        verdict = self.reward(answer)
        return replace(verdict, details={**details, **verdict.details})

    def _replay(self, answer: Answer) -> tuple[float, bool, str, Mapping[str, Any]]:
        environment = self.make()
        environment.reset(answer.row)
        turns = answer.turns[-1:] if getattr(environment, "is_stateless", False) else answer.turns
        total, is_done, observation, info = 0.0, False, "", dict[str, Any]()
        for turn in turns:
            step = environment.step(turn)
            if not isinstance(step, tuple) or len(step) != 5:
                what = "step must return (observation, reward, terminated, truncated, info)"
                raise RewardError(f"the environment {type(environment).__name__}: {what}, not {step!r:.80}")
            observation, reward, terminated, truncated, new_info = step
            total, info, is_done = total + float(reward), {**info, **new_info}, bool(terminated or truncated)
            if is_done:
                break
        return total, is_done, str(observation), info


_CALL = re.compile(r"<tool_call>\s*(.*?)\s*</tool_call>", re.DOTALL)
_BLOCK = re.compile(r"```(?:python|py)\n(.*?)```", re.DOTALL)
_SEARCH = re.compile(r"<search>(.*?)</search>", re.DOTALL)
_END_OF_THINK = "</think>"


class _Tool(ABC):
    """Base of tools. max_characters limits a tool's output, whose middle is cut out."""

    is_stateless = True
    name, argument, written = "", "", re.compile("")

    def __init__(self, max_characters: int = 2000) -> None:
        if max_characters < 1:
            raise ValueError(f"max_characters is {max_characters}, expected 1 or more")
        self._max_characters = max_characters

    def reset(self, row: Mapping[str, Any]) -> str:
        """Do nothing; a tool is the same for every row."""
        return ""

    def step(self, action: str) -> Step:
        """Run the turn's last call: {"name": ..., "arguments": {...}} in <tool_call>, or in the tool's own form."""
        text = action.rpartition(_END_OF_THINK)[2]
        calls = self.written.findall(text)
        for block in _CALL.findall(text):
            try:
                call = json.loads(block)
                if call["name"] != self.name:
                    return f"Error: there is no tool {call['name']!r}, only {self.name}", 0.0, False, False, {}
                calls.append(str(call["arguments"][self.argument]))
            except (ValueError, KeyError, TypeError):
                form = {"name": self.name, "arguments": {self.argument: "..."}}
                return f"Error: write {json.dumps(form)} in <tool_call>", 0.0, False, False, {}
        if not calls:
            return "", 0.0, True, False, {}
        return self._shorten(self.call(calls[-1])), 0.0, False, False, {}

    @abstractmethod
    def call(self, argument: str) -> str:
        """Return the tool's output."""

    def _shorten(self, text: str) -> str:
        half = self._max_characters // 2
        return text if len(text) <= self._max_characters else f"{text[:half]} … {text[-half:]}"


class PythonTool(_Tool):
    """Runs the last ```python block of a turn in the rewards' sandbox, and returns its output.

    Args:
        seconds: time limit.
    """

    name, argument, written = "python", "code", _BLOCK

    def __init__(self, seconds: float = 10.0, max_characters: int = 2000) -> None:
        super().__init__(max_characters)
        self._seconds = seconds

    def call(self, argument: str) -> str:
        with Sandbox(Job(argument), seconds=self._seconds) as sandbox:
            found = sandbox.read("", self._seconds)
        return "\n".join(filter(None, (found.stdout.strip(), found.failure))) or "(no output)"


class SearchTool(_Tool):
    """Searches texts with SQLite's full-text index, ranked by BM25: <search>words</search>.

    Args:
        file: JSON lines with a column `text`, and optionally `title`.
        results: number of returned texts.
    """

    name, argument, written = "search", "query", _SEARCH

    def __init__(self, file: str, results: int = 3, max_characters: int = 2000) -> None:
        super().__init__(max_characters)
        if not Path(file).is_file():
            raise ValueError(f"file {file} is missing")
        self._file, self._results = file, results

    def call(self, argument: str) -> str:
        words = " OR ".join(f'"{word}"' for word in re.findall(r"\w+", argument))
        if not words:
            return "(no words to search for)"
        query = "SELECT title, text FROM texts WHERE texts MATCH ? ORDER BY bm25(texts), rowid LIMIT ?"
        found = _index(self._file).execute(query, (words, self._results)).fetchall()
        return "\n".join(f"{title}: {text}" if title else text for title, text in found) or "(nothing found)"


@lru_cache(maxsize=4)
def _index(file: str) -> sqlite3.Connection:
    """Return an in-memory index of a file's texts."""
    index = sqlite3.connect(":memory:")
    index.execute("CREATE VIRTUAL TABLE texts USING fts5(title, text)")
    index.executemany("INSERT INTO texts VALUES (?, ?)", _texts(Path(file)))
    return index


def _texts(path: Path) -> Iterator[tuple[str, str]]:
    with path.open(encoding="utf-8") as lines:
        for number, line in enumerate(lines, 1):
            try:
                row = json.loads(line)
                yield str(row.get("title") or ""), row["text"]
            except (ValueError, KeyError, AttributeError) as error:
                raise ValueError(f"{path}, line {number}: not a JSON object with a column text") from error
