"""Cases of thoughts, system messages, templates by name, stop words, pretraining, and the defaults of every model."""

from __future__ import annotations

import itertools

from casework import PLAIN, STAGES, TEXT_MODELS, THINKING, add, flag, for_stage, pairwise, turns
from tool_cases import TOOL_ROWS, WEATHER

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


def thoughts_of_rows() -> None:
    """Choices that v4 reads from a row, and flags that only bear on inference."""
    chosen = ({"preserve_thinking": True}, {"preserve_thinking": False}, {"enable_thinking": True},
              {"enable_thinking": False}, {"enable_thinking": False, "preserve_thinking": False}, None)  # fmt: skip
    conversation = turns(
        "Sum?", "<think>\na\n</think>\n\nTwo. ", "And?", "Three.", "So?", "<think>\nb\n</think>\n\nFour."
    )
    for model in ("Qwen3-8B", "Qwen3-4B-Thinking-2507", "Qwen2.5-7B-Instruct", "DeepSeek-R1-Distill-Qwen-7B"):
        for stage, scale in (("sft", None), ("sft", "last_round"), ("dpo", None), ("dpo", "default")):
            rows = [for_stage(stage, conversation, at, chat_template_kwargs=value) for at, value in enumerate(chosen)]
            add(f"thoughts/rows-{scale}", model, stage, rows, flag("loss_scale", scale))
        for name, value in (("response_prefix", "<think>\\n"), ("response_prefix", ""), ("padding_side", "left")):
            add(f"thoughts/{name}-{value}", model, "sft", [{"messages": conversation}], flag(name, value))


def defaults() -> None:
    """A plain conversation and one of two rounds, for every model and stage."""
    for model in TEXT_MODELS:
        for stage in STAGES:
            rows = [for_stage(stage, turns("Where is it?", "On the table.", "Sure?", "Quite."), 0),
                    for_stage(stage, turns("今天天气怎么样？", "晴。"), 1),
                    for_stage(stage, turns("Go", "ok", system="Be brief."), 2)]  # fmt: skip
            add("defaults", model, stage, rows)


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


def pretraining() -> None:
    """`megatron pt`: texts, conversations and alpaca rows, and flags that change or do not change them."""
    rows = [turns("Hi?", "Yes.", "So?", "Good."), turns(None, "A line of text."), turns("A question?"),
            turns("Hi?", "<think>\n\n</think>\n\nYes."), turns("Hi?", "<think>\na\n</think>\n\nYes."),
            turns("<think>\n\n</think>\n\nHi?", "Yes.", system="Be brief.")]  # fmt: skip
    axes = {
        "model": ("Qwen3-8B", "Qwen3-4B-Thinking-2507", "Qwen2.5-7B-Instruct", "Meta-Llama-3.1-8B-Instruct",
                  "DeepSeek-R1-Distill-Qwen-7B", "DeepSeek-V3", "Mixtral-8x7B-Instruct-v0.1", "Qwen3-8B-Base"),
        "use_chat_template": (None, "true", "false"),
        "loss_scale": (None, "default", "last_round", "all", "all+ignore_empty_think"),
        "template": (None, "qwen", "llama3"),
    }  # fmt: skip
    for version in (3, 4):
        for number, case in enumerate(pairwise(axes)):
            flags = [
                word for name in ("use_chat_template", "loss_scale", "template") for word in flag(name, case[name])
            ]
            made = [{"messages": messages} for messages in rows]
            add(f"pt/{number}", case["model"], "pt", made, flags, versions=(version,))
    for model in ("Qwen3-8B", "Meta-Llama-3.1-8B-Instruct"):
        add(
            "pt/chat-sft", model, "sft", [{"messages": messages} for messages in rows], ["--use_chat_template", "false"]
        )
        add("pt/tools", model, "pt", [{"tools": [WEATHER], "messages": TOOL_ROWS["round"]},
                                      {"messages": TOOL_ROWS["round"]}])  # fmt: skip
