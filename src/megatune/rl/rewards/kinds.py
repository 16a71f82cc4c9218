"""Which rewards there are, and what each takes.

A reward is a class that is made with its arguments and called with an `Answer`; a user's function may be one, or a
plain function that returns a number, (number, details) or a `Verdict`.
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
from megatune.rl.environments import BUILT_IN, Environment, Play
from megatune.rl.rewards.answer import Answer, Reward, Verdict

if TYPE_CHECKING:
    from megatune.config.rl.settings import RewardRole


@dataclass(frozen=True, slots=True)
class Kind:
    """One kind of reward.

    Attributes:
        place: "module:class" in this package.
        limit: seconds that one sample may take.
        columns: that a row needs.
        library: that must be installed.
        late_is_wrong: what takes longer is a wrong answer: time depends on the answer alone. Of other kinds it has no
            score, as a service or a user's program may be slow.
    """

    place: str
    limit: float = 10.0
    columns: tuple[str, ...] = ("ground_truth",)
    library: str | None = None
    late_is_wrong: bool = False


KINDS: dict[str, Kind] = {
    "math_rule": Kind("rules:MathRule", limit=20.0, library="math_verify", late_is_wrong=True),
    "code_sandbox": Kind("code.reward:CodeSandbox", limit=400.0, columns=("test_cases",)),
    "multiple_choice": Kind("rules:MultipleChoice"),
    "crossthinkqa": Kind("rules:CrossThinkQA"),
    "general_val": Kind("rules:GeneralValidation"),
    "general_rule": Kind("instructions:GeneralRule"),
    "format": Kind("rules:Format", columns=()),
    "length": Kind("rules:Length", columns=()),
    "llm_judge": Kind("judge:Judge", limit=600.0, columns=()),
    "swift": Kind("swift:SwiftRewards", limit=60.0, columns=()),
    "python": Kind("", limit=60.0, columns=()),
    "environment": Kind("", limit=60.0, columns=()),
    REWARD_MODEL: Kind("answer:Unscored", columns=()),
    UNSCORED: Kind("answer:Unscored", columns=()),
}
ENVIRONMENT = "environment"  # of a role's arguments: what a role that plays is made with


def columns_of(role: RewardRole) -> tuple[str, ...]:
    """Return the columns that a row needs to be scored."""
    if role.kind != "swift":
        return KINDS[role.kind].columns
    from megatune.rl.rewards.swift import needs_solution

    return ("solution",) if needs_solution(role.arguments["reward_funcs"]) else ()


def load_reward(kind: str, function: str | None, arguments: Mapping[str, Any]) -> Reward:
    """Return the reward of a role.

    Args:
        function: "module:name" of a user's, with kind "python".
        arguments: None is as if it were not there; `timeout` is the pool's. Under ENVIRONMENT are the name of one, its
            arguments, and the most turns: the reward plays then, and scores the last turn, or with kind "environment"
            as the environment says.

    Raises:
        MegatuneError: (SETTINGS) there is no such kind or function, or it does not take these arguments;
            (UNAVAILABLE) the library that it needs is not installed.
    """
    given = {name: value for name, value in arguments.items() if value is not None and name != "timeout"}
    if (playing := given.pop(ENVIRONMENT, None)) is not None:
        reward = None if kind == "environment" else load_reward(kind, function, given)
        return Play(_environments(playing["name"], playing["arguments"]), playing["max_turns"], reward)
    if kind == "python":
        return _users(function or "", given)
    if kind not in KINDS:
        finding = Finding(f"rewards: {kind!r} is not a known kind of reward", fix=f"one of {', '.join(KINDS)}")
        raise MegatuneError(finding, ExitCode.SETTINGS)
    library = KINDS[kind].library
    if library is not None and importlib.util.find_spec(library) is None:
        finding = Finding(f"{kind} needs the package {library}", fix="pip install 'megatune[rl]'")
        raise MegatuneError(finding, ExitCode.UNAVAILABLE)
    module, _, name = KINDS[kind].place.partition(":")
    made: Reward = _made(getattr(importlib.import_module(f"megatune.rl.rewards.{module}"), name), kind, given)
    return made


def _made(reward: type, name: str, arguments: Mapping[str, Any]) -> Any:
    try:
        inspect.signature(reward).bind(**arguments)
    except TypeError as error:
        known = ", ".join(inspect.signature(reward).parameters) or "none"
        finding = Finding(f"rewards: {name}: {error}", why=f"what it takes: {known}")
        raise MegatuneError(finding, ExitCode.SETTINGS) from error
    try:
        return reward(**arguments)
    except (ValueError, TypeError, re.error) as error:
        raise MegatuneError(Finding(f"rewards: {name}: {error}"), ExitCode.SETTINGS) from error


def _environments(path: str, arguments: Mapping[str, Any]) -> Callable[[], Environment]:
    """Return what makes environments, of a name or "module:class"; one is made here, to see whether it can be."""
    kind = import_object(BUILT_IN.get(path, path), "environment")
    if not isinstance(kind, type) or not all(callable(getattr(kind, name, None)) for name in ("reset", "step")):
        finding = Finding(f"environment {path!r} is not a class with reset(row) and step(action)")
        raise MegatuneError(finding, ExitCode.SETTINGS)
    _made(kind, path, arguments)
    return partial(kind, **arguments)


def _users(path: str, arguments: Mapping[str, Any]) -> Reward:
    found = import_object(path, "reward function")
    if isinstance(found, type):
        return _verdicts(_made(found, path, arguments))
    if not callable(found):
        raise MegatuneError(Finding(f"reward function {path!r} cannot be called"), ExitCode.SETTINGS)
    if arguments:
        finding = Finding(f"reward function {path!r} takes no {', '.join(arguments)}", fix="make it a class that does")
        raise MegatuneError(finding, ExitCode.SETTINGS)
    return _verdicts(found)


def _verdicts(function: Callable[[Answer], Any]) -> Reward:
    """Let a function return a number or (number, details); what scores 1 or more is correct then."""

    def reward(answer: Answer) -> Verdict:
        said = function(answer)
        if isinstance(said, Verdict):
            return said
        score, details = said if isinstance(said, tuple) else (said, {})
        details = dict(details)
        correct = details.pop("correct", float(score) >= 1)
        return Verdict(float(score), float(correct), details)

    return reward
