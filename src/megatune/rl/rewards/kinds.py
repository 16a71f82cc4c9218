"""The kinds of rewards, and how they are loaded.

A reward is a class that is constructed with its arguments and called with an `Answer`. A user's reward may be such a
class, or a function that returns a number, (number, details) or a `Verdict`.
"""

from __future__ import annotations

import importlib
import importlib.util
import inspect
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any

from megatune.config.rl.settings import REWARD_MODEL, UNSCORED
from megatune.config.values import import_object
from megatune.errors import ExitCode, Finding, MegatuneError
from megatune.rl.environments import BUILT_IN, Environment, EnvironmentReward
from megatune.rl.rewards.answer import Answer, Reward, Verdict

if TYPE_CHECKING:
    from megatune.config.rl.settings import RewardRole


@dataclass(frozen=True, slots=True)
class RewardKind:
    """One kind of reward.

    Attributes:
        target: "module:class" in this package.
        limit: time limit of a sample, in seconds.
        columns: columns that a row needs.
        library: package that must be installed.
        timeout_is_wrong: whether an answer that exceeds the limit counts as wrong, since the time depends on the answer
            alone. With other kinds it has no score, because a service or a user's program may be slow.
    """

    target: str
    limit: float = 10.0
    columns: tuple[str, ...] = ("ground_truth",)
    library: str | None = None
    timeout_is_wrong: bool = False


KINDS: dict[str, RewardKind] = {
    "math_rule": RewardKind("rules:MathRule", limit=20.0, library="math_verify", timeout_is_wrong=True),
    "code_sandbox": RewardKind("code.reward:CodeSandbox", limit=400.0, columns=("test_cases",)),
    "multiple_choice": RewardKind("rules:MultipleChoice"),
    "crossthinkqa": RewardKind("rules:CrossThinkQA"),
    "general_val": RewardKind("rules:GeneralValidation"),
    "general_rule": RewardKind("instructions:GeneralRule"),
    "format": RewardKind("rules:Format", columns=()),
    "length": RewardKind("rules:Length", columns=()),
    "llm_judge": RewardKind("judge:Judge", limit=600.0, columns=()),
    "swift": RewardKind("swift:SwiftRewards", limit=60.0, columns=()),
    "python": RewardKind("", limit=60.0, columns=()),
    "environment": RewardKind("", limit=60.0, columns=()),
    REWARD_MODEL: RewardKind("answer:Unscored", columns=()),
    UNSCORED: RewardKind("answer:Unscored", columns=()),
}
ENVIRONMENT = "environment"  # key of a role's arguments with its environment


def columns_of(role: RewardRole) -> tuple[str, ...]:
    """Return the columns that a row needs for this reward."""
    if role.kind != "swift":
        return KINDS[role.kind].columns
    from megatune.rl.rewards.swift import needs_solution

    return ("solution",) if needs_solution(role.arguments["reward_funcs"]) else ()


def load_reward(kind: str, function: str | None, arguments: Mapping[str, Any]) -> Reward:
    """Load the reward of a role.

    Args:
        function: "module:name" of a user's reward, with kind "python".
        arguments: None values are dropped; `timeout` is for the pool. ENVIRONMENT has the name of an environment, its
            arguments and max_turns: then the reward scores the last turn, with kind "environment" the environment does.

    Raises:
        MegatuneError: (SETTINGS) an unknown kind or function, or arguments that it does not have; (UNAVAILABLE) a
            required package is not installed.
    """
    given = {name: value for name, value in arguments.items() if value is not None and name != "timeout"}
    if (spec := given.pop(ENVIRONMENT, None)) is not None:
        reward = None if kind == "environment" else load_reward(kind, function, given)
        return EnvironmentReward(_environment_factory(spec["name"], spec["arguments"]), spec["max_turns"], reward)
    if kind == "python":
        return _user_reward(function or "", given)
    if kind not in KINDS:
        finding = Finding(f"rewards: {kind!r} is not a known kind of reward", fix=f"one of {', '.join(KINDS)}")
        raise MegatuneError(finding, ExitCode.SETTINGS)
    library = KINDS[kind].library
    if library is not None and importlib.util.find_spec(library) is None:
        finding = Finding(f"{kind} needs the package {library}", fix="pip install 'megatune[rl]'")
        raise MegatuneError(finding, ExitCode.UNAVAILABLE)
    module, _, name = KINDS[kind].target.partition(":")
    found: Reward = _construct(getattr(importlib.import_module(f"megatune.rl.rewards.{module}"), name), kind, given)
    return found


def _construct(reward: type, name: str, arguments: Mapping[str, Any]) -> Any:
    try:
        inspect.signature(reward).bind(**arguments)
    except TypeError as error:
        known = ", ".join(inspect.signature(reward).parameters) or "none"
        finding = Finding(f"rewards: {name}: {error}", why=f"its arguments are {known}")
        raise MegatuneError(finding, ExitCode.SETTINGS) from error
    try:
        return reward(**arguments)
    except (ValueError, TypeError, re.error) as error:
        raise MegatuneError(Finding(f"rewards: {name}: {error}"), ExitCode.SETTINGS) from error


def _environment_factory(path: str, arguments: Mapping[str, Any]) -> Callable[[], Environment]:
    """Return a factory of environments, by name or "module:class", after constructing one as a check."""
    kind = import_object(BUILT_IN.get(path, path), "environment")
    if not isinstance(kind, type) or not all(callable(getattr(kind, name, None)) for name in ("reset", "step")):
        finding = Finding(f"environment {path!r} is not a class with reset(row) and step(action)")
        raise MegatuneError(finding, ExitCode.SETTINGS)
    _construct(kind, path, arguments)
    return partial(kind, **arguments)


def _user_reward(path: str, arguments: Mapping[str, Any]) -> Reward:
    found = import_object(path, "reward function")
    if isinstance(found, type):
        return _with_verdicts(_construct(found, path, arguments))
    if not callable(found):
        raise MegatuneError(Finding(f"reward function {path!r} cannot be called"), ExitCode.SETTINGS)
    if arguments:
        finding = Finding(f"reward function {path!r} takes no {', '.join(arguments)}", fix="make it a class that does")
        raise MegatuneError(finding, ExitCode.SETTINGS)
    return _with_verdicts(found)


def _with_verdicts(function: Callable[[Answer], Any]) -> Reward:
    """Convert a number or (number, details) that a function returns; without `correct`, 1 or more is correct."""

    def reward(answer: Answer) -> Verdict:
        result = function(answer)
        if isinstance(result, Verdict):
            return result
        score, details = result if isinstance(result, tuple) else (result, {})
        details = dict(details)
        correct = details.pop("correct", float(score) >= 1)
        return Verdict(float(score), float(correct), details)

    return reward
