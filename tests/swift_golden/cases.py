"""The golden cases: command lines and rows, chosen so that every pair of values of the axes of a group meets.

A case is `{"name", "version": 3 or 4, "verb": "sft", "pt" or "rlhf", "model": a key of models.MODELS, "flags": words of
the command line, "rows": rows of a JSONL file}`, with "env" (variables) and "files" (name: text) where it needs them.
"""

from __future__ import annotations

import itertools
import json
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
    """The conversation as a row of the stage: with a rejected answer, or a label."""
    row: Row = {"messages": messages, **more}
    if stage in ("dpo", "rm"):
        row["rejected_response"] = f"No, {number}."
    if stage == "kto":
        row["label"] = number % 2 == 0
    return row


def flag(name: str, value: str | None) -> list[str]:
    """The two words of a flag; none where the value is None."""
    return [] if value is None else [f"--{name}", value]


# --- thoughts -----------------------------------------------------------------------------------------------------

THOUGHTS = {
    "none": [turns("Hi?", "Yes."), turns("Hi?", "Yes.", "And you?", "Good day."),
             turns("One", "two", "three", "four", "five", "six")],
    "last": [turns("Sum?", "<think>\n1 and 1\n</think>\n\nTwo."),
             turns("Hi?", "Yes.", "Sum?", "<think>\n1 and 1\n</think>\n\nTwo again.")],
    "earlier": [turns("Sum?", "<think>\n1 and 1\n</think>\n\nTwo.", "And?", "Three."),
                turns("Sum?", "<think>\na\n</think>\n\nTwo.", "And?", "<think>\nb\n</think>\n\nThree.", "So?", "Four."),
                turns("Sum?", "<think>\na\n</think>\n\nTwo.", "And?", "<think>\nb\n</think>\n\nThree.")],
    "empty": [turns("Hi?", "<think>\n\n</think>\n\nYes."),
              turns("Hi?", "<think>\n\n</think>\n\nYes.", "So?", "<think>\n\n</think>\n\nGood."),
              turns("Hi?", "<think></think>Yes.", "So?", "<think>\nb\n</think>\n\nGood.")],
    "odd": [turns("Hi?", "Well <think>\na\n</think>\n\nYes."), turns("Hi?", "<think>\nunclosed"),
            turns("Hi?", "a\n</think>\n\nYes.", "So?", "Good."),
            turns("Hi?", "\n<think>\na\n</think>\n\nYes.", "So?", " <think>\nb\n</think>\n\nGood. "),
            turns("Hi?", "<think>a</think><think>b</think>Yes.", "So?", "Fine.")],
    "reasoning": [[*turns("Hi?"), {"role": "assistant", "content": "Yes.", "reasoning_content": "They greet."}],
                  [*turns("Hi?"), {"role": "assistant", "content": "Yes.", "reasoning_content": "They greet."},
                   *turns("So?", "Good.")]],
}  # fmt: skip


def thoughts() -> None:
    """Answers with and without thoughts, by model, stage and every flag that bears on them."""
    axes = {
        "model": (*THINKING, *PLAIN, "DeepSeek-R1", "Qwen3-30B-A3B-Thinking-2507", "DeepSeek-R1-Distill-Llama-8B"),
        "rows": list(THOUGHTS),
        "stage": ("sft", "dpo", "kto", "rm"),
        "loss_scale": (None, "default", "last_round", "all", "ignore_empty_think", "last_round+ignore_empty_think",
                       "all+ignore_empty_think"),
        "enable_thinking": (None, "false", "true"),
        "add_non_thinking_prefix": (None, "false"),
    }  # fmt: skip
    new = {"preserve_thinking": (None, "true", "false"), "disable_ignore_empty_think": (None, "true")}
    for version in (3, 4):
        for number, case in enumerate(pairwise(axes if version == 3 else axes | new)):
            rows = [for_stage(case["stage"], messages, at) for at, messages in enumerate(THOUGHTS[case["rows"]])]
            flags = [word for name in ("loss_scale", "enable_thinking", "add_non_thinking_prefix", *new)
                     for word in flag(name, case.get(name))]  # fmt: skip
            add(f"thoughts/{number}-{case['rows']}", case["model"], case["stage"], rows, flags, versions=(version,))


# --- the defaults of every model ----------------------------------------------------------------------------------


def defaults() -> None:
    """A plain conversation and one of two rounds, for every model and stage."""
    for model in TEXT_MODELS:
        for stage in STAGES:
            rows = [for_stage(stage, turns("Where is it?", "On the table.", "Sure?", "Quite."), 0),
                    for_stage(stage, turns("今天天气怎么样？", "晴。"), 1),
                    for_stage(stage, turns("Go", "ok", system="Be brief."), 2)]  # fmt: skip
            add("defaults", model, stage, rows)


# --- system messages ----------------------------------------------------------------------------------------------


def systems() -> None:
    """System messages of rows, of columns, of the command line and of the template."""
    rows = {
        "none": {"messages": turns("a b c", "d e f")},
        "row": {"messages": turns("a b c", "d e f", system="You write.")},
        "empty": {"messages": turns("a b c", "d e f", system="")},
        "column": {"messages": turns("a b c", "d e f"), "system": "From a column."},
        "empty column": {"messages": turns("a b c", "d e f"), "system": ""},
        "both": {"messages": turns("a b c", "d e f", system="In the row."), "system": "From a column."},
        "query": {"query": "a b c", "response": "d e f", "system": "You write."},
        "alpaca": {"instruction": "a b c", "input": "", "output": "d e f", "system_prompt": "You write."},
        "late": {"messages": [*turns("a b c", "d e f"), {"role": "system", "content": "Late."}, *turns("g", "h")]},
    }
    axes = {
        "model": TEXT_MODELS,
        "row": list(rows),
        "flag": (None, "", "Be brief.", "Two\\nlines.", "A real\nbreak.", "system.txt"),
        "stage": ("sft", "dpo"),
    }
    for number, case in enumerate(pairwise(axes)):
        row = dict(rows[case["row"]])
        if case["stage"] == "dpo":
            row["rejected_response"] = "No."
        files = {"system.txt": "A file.\nOf lines.\n"}
        name = f"system/{number}-{case['row'].replace(' ', '-')}"
        add(name, case["model"], case["stage"], [row], flag("system", case["flag"]), files=files)
    for word in ("missing.txt", "Be brief.", ""):
        add(f"system/{word or 'none'}", "Qwen3-8B", "pt", [rows["none"]], flag("system", word))
    add("system/missing", "Qwen3-8B", "sft", [rows["none"]], flag("system", "missing.txt"))
    add("system/rows", "Qwen3-8B", "sft", [rows[name] for name in ("none", "row", "empty", "late")])


# --- templates by name --------------------------------------------------------------------------------------------


def templates() -> None:
    """`--template NAME` of the families, on models whose tokens it writes."""
    names = {
        ("Qwen3-8B", "Qwen2.5-7B-Instruct", "Qwen3-4B-Instruct-2507"): (
            "qwen", "qwen2_5", "qwen3", "qwen3_nothinking", "qwen3_thinking", "chatml", "qwq", "qwen2_5_math",
            "qwen3_coder", "qwq_preview", "qwen2_vl", "qwen3_vl", "qwen2_5_vl", "dummy",
        ),
        ("Meta-Llama-3.1-8B-Instruct", "DeepSeek-R1-Distill-Llama-8B"): ("llama3", "llama3_2"),
        ("DeepSeek-V3", "DeepSeek-R1-Distill-Qwen-7B"): ("deepseek", "deepseek_v2_5", "deepseek_r1", "deepseek_v3_1"),
        ("Mixtral-8x7B-Instruct-v0.1",): ("llama", "mistral_nemo", "chatml"),
        ("Qwen3-8B",): ("deepseek_r1", "llama3", "no_such_template"),
    }  # fmt: skip
    rows = [turns("Hi?", "Yes.", "Sum?", "<think>\n1\n</think>\n\nTwo."), turns("Hi?", "Yes.", system="Be brief."),
            turns("Sum?", "<think>\n1\n</think>\n\nTwo.", "So?", "Good.")]  # fmt: skip
    for models, all_names in names.items():
        for model, name in itertools.product(models, all_names):
            for stage in ("sft", "dpo"):
                add(f"template/{name}", model, stage, [for_stage(stage, row, at) for at, row in enumerate(rows)],
                    flag("template", name))  # fmt: skip


# --- stop words ---------------------------------------------------------------------------------------------------


def stop_words() -> None:
    """Answers that end in a stop word of the template, or hold one."""
    stops = {
        "Qwen3-8B": ("<|im_end|>", "<|im_end|>\n", "<|endoftext|>"),
        "Qwen2.5-7B-Instruct": ("<|im_end|>", "<|im_end|>\n", "<|endoftext|>"),
        "Qwen3-4B-Instruct-2507": ("<|im_end|>", "<|endoftext|>"),
        "Meta-Llama-3.1-8B-Instruct": ("<|eot_id|>", "<|end_of_text|>", "<|eom_id|>"),
        "DeepSeek-R1-Distill-Qwen-7B": ("<｜end▁of▁sentence｜>",),
        "DeepSeek-V3": ("<｜end▁of▁sentence｜>",),
    }
    for model, words in stops.items():
        for stage in ("sft", "dpo", "kto", "pt"):
            rows = []
            for word in words:
                rows += [turns("Hi?", f"Yes.{word}"), turns("Hi?", f"Yes.{word}", "So?", f"Good {len(rows)}."),
                         turns("Hi?", f"A {word} in the middle.")]  # fmt: skip
            add("stop", model, stage, [for_stage(stage, row, at) for at, row in enumerate(rows)])


thoughts()
defaults()
systems()
templates()
stop_words()
