"""ms-swift's `reward_funcs`: the weighted sum of built-in rewards and rewards of the user's files.

Built-in rewards score as in ms-swift 4.6 (`swift/rewards/orm.py`, tests/rl/swift_rewards.json). A file of
`external_plugins` runs unchanged: it can import `ORM`, `AsyncORM` and `orms` as from ms-swift, and registers its
classes in `orms`.
"""

from __future__ import annotations

import asyncio
import importlib.util
import inspect
import math
import re
import runpy
import sys
from collections.abc import Callable, Collection, Sequence
from dataclasses import replace
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

from megatune.errors import ExitCode, Finding, MegatuneError
from megatune.rl.rewards.answer import Answer, RewardError, Verdict, repetition_ratio
from megatune.rl.rewards.rules import has_equal_value

_NEED_SOLUTION = ("accuracy", "cosine")
_FORMAT = r"^<think>.*?</think>\s*<answer>.*?</answer>(?![\s\S])"
_REACT_FORMAT = r"^<think>.*?</think>\s*Action:.*?Action Input:.*?$"
_TAGGED = re.compile(r"<answer>(.*?)</answer>", re.DOTALL)
_MODULES = ("swift.rewards", "swift.rewards.orm", "swift.plugin", "swift.plugin.orm")  # with orms, in versions 4 and 3

Score = Callable[[Answer], float | None]


def needs_solution(names: Collection[str]) -> bool:
    """Return whether these rewards need the column solution."""
    return any(name in names for name in _NEED_SOLUTION)


def accuracy(answer: Answer) -> float:
    """Return 1 if the response, or its <answer> if it has one, equals the solution by math-verify, else 0."""
    from math_verify import LatexExtractionConfig, parse
    from math_verify.errors import TimeoutException

    solution, text = str(_solution(answer)), _tagged(answer.text)
    truth = _tagged(solution)
    golds = parse(solution if truth is None else truth, extraction_mode="first_match")
    if not golds:
        return 0.0  # no answer can match an unparsable solution
    if text is not None:
        found = parse(text, extraction_mode="first_match")
    else:
        usual = LatexExtractionConfig()
        rules = replace(usual.normalization_config, nits=False, malformed_operators=False, boxed=True)
        latex = replace(usual, normalization_config=rules, boxed_match_priority=0, try_extract_without_anchor=False)
        found = parse(answer.text, extraction_config=[latex], extraction_mode="first_match")
    try:
        return float(any(has_equal_value(gold, each) for gold in golds for each in found))
    except TimeoutException:  # not a subclass of Exception
        return 0.0


def cosine(answer: Answer, args: SimpleNamespace) -> float:
    """Score the length by half a cosine: short correct answers and long wrong ones score higher (arXiv:2502.03373)."""
    is_right = accuracy(answer) >= 1
    longest, shortest = args.cosine_max_len_value_wrong, args.cosine_min_len_value_wrong
    if is_right:
        longest, shortest = args.cosine_max_len_value_correct, args.cosine_min_len_value_correct
    share = answer.num_tokens / args.cosine_max_len
    return float(longest + (shortest - longest) * (1 + math.cos(share * math.pi)) / 2)


class SwiftRewards:
    """The weighted sum of rewards; a reward that returns None is left out.

    Args:
        reward_funcs: names of the rewards.
        reward_weights: one per reward; all 1 by default.
        external_plugins: Python files that register further rewards.
        args: arguments of the rewards by ms-swift's flags: cosine_max_len, repetition_n_grams, soft_cache_length, ...

    Raises:
        MegatuneError: (SETTINGS) an unknown name, or a file that cannot be run; (UNAVAILABLE) math-verify is needed and
            not installed.
    """

    def __init__(
        self,
        reward_funcs: Sequence[str],
        reward_weights: Sequence[float] = (),
        external_plugins: Sequence[str] = (),
        **args: Any,
    ) -> None:
        if needs_solution(reward_funcs) and importlib.util.find_spec("math_verify") is None:
            finding = Finding("accuracy needs the package math_verify", fix="pip install 'megatune[rl]'")
            raise MegatuneError(finding, ExitCode.UNAVAILABLE)
        given = SimpleNamespace(**args)
        known: dict[str, Score] = {
            "accuracy": accuracy,
            "format": lambda answer: float(bool(re.match(_FORMAT, answer.text, re.DOTALL | re.MULTILINE))),
            "react_format": lambda answer: float(bool(re.match(_REACT_FORMAT, answer.text, re.DOTALL | re.MULTILINE))),
            "cosine": lambda answer: cosine(answer, given),
            # arXiv:2502.03373
            "repetition": lambda answer: (
                repetition_ratio(answer.text, given.repetition_n_grams) * given.repetition_max_penalty
            ),
            # 0 up to max_length - cache_length, then decreasing by 1 per cache_length (DAPO, arXiv:2503.14476).
            "soft_overlong": lambda answer: min(
                (given.soft_max_length - given.soft_cache_length - answer.num_tokens) / given.soft_cache_length, 0.0
            ),
        }
        known |= {name: _called(made, name, given) for name, made in _plugins(external_plugins).items()}
        if unknown := [name for name in reward_funcs if name not in known]:
            what = f"reward_funcs has {', '.join(unknown)}"
            fix = f"one of {', '.join(known)}, or a class in `orms` of a file that external_plugins names"
            raise MegatuneError(Finding(what, fix=fix), ExitCode.SETTINGS)
        self._weights = reward_weights or [1.0] * len(reward_funcs)
        self._rewards = {name: known[name] for name in reward_funcs}

    def __call__(self, answer: Answer) -> Verdict:
        said = {name: reward(answer) for name, reward in self._rewards.items()}
        weighed = zip(said.values(), self._weights, strict=True)
        score = sum(weight * value for value, weight in weighed if value is not None and not math.isnan(value))
        right = said.get("accuracy")
        correct = float(score >= 1) if right is None else float(right >= 1)
        return Verdict(score, correct, {name: value for name, value in said.items() if value is not None})


def _solution(answer: Answer) -> Any:
    truth = answer.row.get("solution")
    if truth is None:
        raise RewardError("the row has no solution")
    return truth


def _tagged(text: str) -> str | None:
    found = _TAGGED.search(text)
    return found[1].strip() if found else None


def _plugins(paths: Sequence[str]) -> dict[str, Any]:
    """Run the user's files, and return the rewards that they register in `orms`, by name."""

    class ORM:
        def __init__(self, args: Any = None, **kwargs: Any) -> None:
            self.args = args

    class AsyncORM(ORM):
        pass

    orms: dict[str, Any] = {}
    for module in _MODULES:
        for name in (module.partition(".")[0], module):
            sys.modules.setdefault(name, ModuleType(name)).__path__ = []  # type: ignore[attr-defined]
        vars(sys.modules[module]).update(ORM=ORM, AsyncORM=AsyncORM, orms=orms)
    for path in paths:
        try:
            runpy.run_path(path, run_name=Path(path).stem)
        except Exception as error:  # of the user's file, of any class
            what = f"external_plugins: {path} cannot be run: {type(error).__name__}: {error}"
            finding = Finding(what, why="it is run without ms-swift")
            raise MegatuneError(finding, ExitCode.SETTINGS) from error
    return orms


def _called(made: Any, name: str, args: SimpleNamespace) -> Score:
    """Return a function that scores one answer with an ms-swift class or function."""
    reward = made(args=args) if isinstance(made, type) else made

    def score(answer: Answer) -> float | None:
        turns = [*map(dict, answer.messages), {"role": "assistant", "content": answer.text}]
        columns: dict[str, Sequence[Any]] = {key: [value] for key, value in answer.row.items()}
        columns |= {"messages": [turns], "response_token_ids": [list(answer.token_ids)]}
        columns |= {"finish_reason": [answer.finish], "is_truncated": [answer.finish == "length"]}
        found = reward([answer.text], trainer_state=None, **columns)
        if inspect.isawaitable(found):
            found = asyncio.run(_awaited(found))
        if not isinstance(found, Sequence) or len(found) != 1:
            raise RewardError(f"{name} returned {found!r}, not a list of one number")
        return None if found[0] is None else float(found[0])

    return score


async def _awaited(found: Any) -> Any:
    return await found
