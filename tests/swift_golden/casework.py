"""What the files of cases share: the list, pairs of values of axes, and short ways to write messages and rows."""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

Row = dict[str, Any]

CASES: list[dict[str, Any]] = []

THINKING = ("Qwen3-8B", "Qwen3-30B-A3B", "Qwen3-4B-Thinking-2507", "DeepSeek-R1-Distill-Qwen-7B")
PLAIN = ("Qwen2.5-7B-Instruct", "Meta-Llama-3.1-8B-Instruct", "Qwen3-4B-Instruct-2507")
TEXT_MODELS = (
    *THINKING,
    *PLAIN,
    "Qwen3-8B-Base",
    "Qwen2-7B-Instruct",
    "Qwen2.5-7B",
    "Qwen1.5-MoE-A2.7B-Chat",
    "Qwen3-30B-A3B-Instruct-2507",
    "Qwen3-30B-A3B-Thinking-2507",
    "Meta-Llama-3-8B-Instruct",
    "Llama-3.2-3B-Instruct",
    "DeepSeek-R1-Distill-Llama-8B",
    "DeepSeek-V3",
    "DeepSeek-R1",
    "Mixtral-8x7B-Instruct-v0.1",
    "Qwen2.5-Coder-7B-Instruct",
    "Llama-3.3-70B-Instruct",
    "DeepSeek-V3-0324",
)
STAGES = {
    "sft": ("sft", ()),
    "pt": ("pt", ()),
    "dpo": ("rlhf", ("--rlhf_type", "dpo")),
    "rm": ("rlhf", ("--rlhf_type", "rm")),
    "kto": ("rlhf", ("--rlhf_type", "kto")),
}


def add(
    name: str,
    model: str,
    stage: str,
    rows: Sequence[Row],
    flags: Sequence[str] = (),
    *,
    versions: Iterable[int] = (3, 4),
    **more: Any,
) -> None:
    """Add the case once for each version."""
    verb, words = STAGES[stage]
    for version in versions:
        case = {"name": f"{name}/{stage}/{model}/v{version}", "version": version, "verb": verb, "model": model}
        CASES.append(case | {"flags": [*words, *flags], "rows": list(rows)} | more)


def pairwise(axes: Mapping[str, Sequence[Any]]) -> list[dict[str, Any]]:
    """Choose places in the product of the axes such that every two values of different axes meet in one."""
    names = list(axes)
    left = {
        (first, a, second, b)
        for first, second in itertools.combinations(range(len(names)), 2)
        for a in range(len(axes[names[first]]))
        for b in range(len(axes[names[second]]))
    }
    chosen = []
    while left:
        first, a, second, b = min(left)
        place = {first: a, second: b}
        for axis in range(len(names)):
            if axis not in place:
                place[axis] = max(
                    range(len(axes[names[axis]])),
                    key=lambda value: (
                        sum((*sorted([(axis, value), (other, place[other])])[0],
                             *sorted([(axis, value), (other, place[other])])[1]) in left for other in place),
                        -value,
                    ),
                )  # fmt: skip
        left -= {(i, place[i], j, place[j]) for i, j in itertools.combinations(range(len(names)), 2)}
        chosen.append({names[axis]: axes[names[axis]][place[axis]] for axis in range(len(names))})
    return chosen


def turns(*texts: str | None, system: str | None = None) -> list[dict[str, Any]]:
    """Messages of a user and an assistant in turn; None leaves a turn out."""
    head = [] if system is None else [{"role": "system", "content": system}]
    roles = itertools.cycle(("user", "assistant"))
    said = zip(roles, texts, strict=False)
    return [*head, *({"role": role, "content": text} for role, text in said if text is not None)]


def for_stage(stage: str, messages: list[dict[str, Any]], number: int, **more: Any) -> Row:
    """The conversation as a row of the stage: with a rejected answer, or a label.

    Last answers of kto are numbered: ms-swift drops a row whose answer is that of its neighbour.
    """
    if stage == "kto" and messages[-1]["role"] == "assistant":
        messages = [*messages[:-1], {**messages[-1], "content": f"{messages[-1]['content']} {number}"}]
    row: Row = {"messages": messages, **more}
    if stage in ("dpo", "rm"):
        row["rejected_response"] = f"No, {number}."
    if stage == "kto":
        row["label"] = number % 2 == 0
    return row


def flag(name: str, value: str | None) -> list[str]:
    """The two words of a flag; none where the value is None."""
    return [] if value is None else [f"--{name}", value]


def with_key(messages: list[dict[str, Any]], key: str, *values: Any) -> list[dict[str, Any]]:
    """The messages with the key set on the answers in turn; None leaves it out."""
    given = iter(values)
    marked = []
    for message in messages:
        value = next(given, None) if message["role"] == "assistant" else None
        marked.append(message if value is None else {**message, key: value})
    return marked


def named(name: str, text: str, key: str = "content") -> dict[str, Any]:
    """A message of a role by this name, under the keys of ShareGPT if `key` is "value"."""
    return {"from" if key == "value" else "role": name, key: text}
