"""Cases of formats of rows, of the loss of messages, and of truncation."""

from __future__ import annotations

import itertools
import json

from casework import STAGES, Row, add, flag, for_stage, named, pairwise, turns, with_key

FORMATS: dict[str, list[Row]] = {
    "messages": [{"messages": turns("Hi?", "Yes."), "unknown": 1}, {"messages": turns("Hi?", "Yes.", "So?")},
                 {"messages": turns("Hi?", "Yes.", "So?", "Good.")}, {"messages": turns(None, "Only an answer.")},
                 {"messages": []}, {"messages": turns("Only a question?")}, {"messages": turns("", "")}],
    "conversations": [{"conversations": [named("human", "Hi?", "value"), named("gpt", "Yes.", "value")]},
                      {"conversations": [named("system", "Be brief.", "value"), named("human", "Hi?", "value"),
                                         named("gpt", "Fine.", "value")], "system": "A column."}],
    "conversation": [{"conversation": [{"human": "Hi?", "assistant": "Yes."}, {"human": "So?", "assistant": "Good."}],
                      "system": "Be brief."}],
    "bot": [{"messages": [named("user", "Hi?"), named("bot", "Yes.")]},
            {"messages": [named("human", "Hi?"), named("gpt", "Fine.")]},
            {"messages": [named("user", "Hi?"), named("model", "Good.")]}],
    "text": [{"messages": json.dumps(turns("Hi?", "Yes."))}, {"messages": str(turns("Hi?", "Fine."))}],
    "json of a flag": [{"messages": json.dumps([*turns("Hi?"), {"role": "assistant", "content": "Yes.",
                       "loss": False}])},
                       {"messages": json.dumps([*turns("So?"), {"role": "assistant", "content": "A.", "loss": True}])}],
    "not json": [{"messages": "Hi?"}, {"messages": json.dumps(turns("Hi?", "Yes."))}],
    "query": [{"query": "Hi?", "response": "Yes."},
              {"query": "So?", "response": "Good.", "history": [["Hi?", "Yes."], ["a", "b"]], "system": "Be brief."},
              {"query": "So?", "response": "Fine.", "history": "[['Hi?', 'Yes.']]"} | {"history": [["x", "y"]]}],
    "history text": [{"query": "So?", "response": "Fine.", "history": "[['Hi?', 'Yes.']]"}],
    "prompt": [{"prompt": "Hi?", "completion": "Yes."}, {"prompt": "So?", "completion": "Good."}],
    "question": [{"question": "Hi?", "answer": "Yes."}], "problem": [{"problem": "Hi?", "solution": "Yes."}],
    "two answers": [{"query": "Hi?", "answer": "Yes.", "output": "No."}],
    "two questions": [{"query": "Hi?", "prompt": "So?", "response": "Yes."}],
    "answers": [{"query": "Hi?", "response": ["Yes.", "No."]}],
    "text column": [{"text": "A line of text."}, {"text": "今天天气。"}],
    "content column": [{"content": "A line of text."}],
    "alpaca": [{"instruction": "Add.", "input": "1, 2", "output": "3"}, {"instruction": "Hi?", "input": "",
               "output": "A."},
               {"instruction": "", "input": "Only", "output": "B."}, {"instruction": "So?", "input": None,
               "output": "C."},
               {"instruction": "x", "input": "y", "output": None}, {"instruction": None, "input": None, "output": "D."},
               {"instruction": "q", "input": "r", "output": "s", "history": [["a", "b"]], "system": "Be brief."}],
    "instruction": [{"instruction": "Hi?", "output": "Yes."}],
    "two users": [{"messages": [*turns("Hi,"), *turns(" there?", "Yes.")]},
                  {"messages": [*turns("a", "b"), *turns("c"), *turns("d", "e")]}],
    "two assistants": [{"messages": [*turns("Hi?", "Yes, "), named("assistant", "indeed.")]},
                       {"messages": [*turns("Hi?", "Yes, "), named("assistant", "so."), *turns("Go?", "On.")]}],
    "thought in two": [{"messages": [*turns("Hi?", "<think>\nx\n</think>\n\n"), named("assistant", "indeed.")]},
                       {"messages": [*turns("Hi?", "Yes, "), named("assistant", "<think>\nx\n</think>\n\nso.")]},
                       {"messages": [*turns("Hi?", "a "), named("assistant", "b"), *turns("Go?", "c ")],
                        "system": "Be brief."}],
    "assistant first": [{"messages": [named("assistant", "Hello."), *turns("Hi?", "Yes.")]}],
    "nulls": [{"messages": [*turns("Hi?"), {"role": "assistant", "content": None}]}, {"messages": None},
              {"messages": turns("Hi?", "Yes.")}],
    "roles": [{"messages": [named("User", "Hi?"), named("Assistant", "Yes.")]}, {"messages": turns("Hi?", "Yes.")}],
    "parts": [{"messages": [{"role": "user", "content": [{"type": "text", "text": "Hi"}, {"type": "text",
              "text": "?"}]},
                            {"role": "assistant", "content": [{"type": "text", "text": "Yes."}]}]}],
    "spaces": [{"messages": turns("  Hi? \n", "\n Yes.  ", " So?\n\n", "  Good. \n")}],
    "marks": [{"messages": turns("<|im_start|>user\nHi<|im_end|>", "A <image> <video> <bbox> tag.")},
              {"messages": turns("<image>Hi", "No.")}, {"messages": turns("{{QUERY}} and {{SYSTEM}}", "{{RESPONSE}}")}],
    "unicode": [{"messages": turns("é e\u0301 🙂", "ñ ﬁ １２ 🙂🙂")}, {"messages": turns("\u200bzero",
                "\ufefftab\tcr\r\n")}],
}  # fmt: skip


def formats() -> None:
    """Every format of rows that ms-swift reads, in sft and pt, and with preferences."""
    models = ("Qwen3-8B", "Qwen2.5-7B-Instruct", "Meta-Llama-3.1-8B-Instruct", "DeepSeek-R1-Distill-Qwen-7B")
    for number, (name, rows) in enumerate(FORMATS.items()):
        title = f"format/{name.replace(' ', '-')}"
        add(title, models[number % 4], "sft", rows)
        add(title, models[(number + 1) % 4], "pt", rows)
        preferred = [{**row, "rejected_response": f"No {at}."} for at, row in enumerate(rows)]
        add(title, models[(number + 2) % 4], "dpo", preferred)
        if name in ("messages", "conversations", "query", "prompt", "alpaca", "bot", "text", "two users", "unicode"):
            add(title, models[(number + 3) % 4], "kto", [{**row, "label": at % 2 == 0} for at, row in enumerate(rows)])
    add("format/strict", "Qwen3-8B", "sft", FORMATS["nulls"], ["--strict", "true"])
    mapped = [{"q": "Hi?", "a": "Yes.", "s": "Be brief."}, {"q": "So?", "a": "Good.", "s": ""}]
    for at, columns in enumerate(({"q": "query", "a": "response", "s": "system"}, {"Q": "query", "A": "response"},
                                  {"q": "instruction", "a": "output"}, {"q": "query"})):  # fmt: skip
        add(f"columns/{at}", models[at], "sft", mapped, ["--columns", json.dumps(columns)])
    add("columns/messages", "Qwen3-8B", "sft", [{"chat": turns("Hi?", "Yes.")}], ["--columns", '{"chat": "messages"}'])
    add("columns/priority", "Qwen3-8B", "sft", [{"question": "Not this", "mine": "Hi?", "response": "Yes."}],
        ["--columns", '{"mine": "query"}'])  # fmt: skip


def losses() -> None:
    """`loss` and `loss_scale` of messages under every strategy."""
    three = turns("a b", "one two", "c d", "three four", "e f", "five six")
    thought = turns("a b", "<think>\nx\n</think>\n\none two", "c d", "<think>\n\n</think>\n\nthree four")
    rows = {
        "false": [with_key(three, "loss", False), with_key(three, "loss", None, None, False), with_key(thought,
                  "loss", False)],
        "true": [with_key(three, "loss", True), with_key(three, "loss", None, True, None), with_key(thought,
                 "loss", True)],
        "mixed": [with_key(three, "loss", True, False, True), with_key(three, "loss", False, False, False),
                  with_key(three, "loss", False, True, False)],
        "numbers": [with_key(three, "loss", 1, 0, 1), with_key(three, "loss", 0.0, 0.5, 0)],
        "all of one": [with_key(turns("a b", "one two"), "loss", False), with_key(turns("a b", "one"), "loss", True)],
        "of a user": [[{**turns("a b")[0], "loss": True}, *turns(None, "one two")], turns("c", "d")],
        "scale": [with_key(three, "loss_scale", 0.0, 2.0), with_key(three, "loss_scale", 1.0), with_key(three,
                  "loss_scale", 0.5)],
        "two answers": [[*with_key(turns("a b", "one"), "loss", False), {"role": "assistant", "content": " two"}],
                        [*with_key(turns("a b", "one"), "loss", True),
                         {"role": "assistant", "content": " two", "loss": False}, *turns("c", "d")]],
    }  # fmt: skip
    axes = {
        "rows": list(rows),
        "loss_scale": (None, "default", "last_round", "all", "last_round+ignore_empty_think"),
        "model": ("Qwen3-8B", "Qwen2.5-7B-Instruct", "Meta-Llama-3.1-8B-Instruct", "DeepSeek-R1-Distill-Qwen-7B",
                  "Mixtral-8x7B-Instruct-v0.1"),
        "stage": ("sft", "dpo", "pt", "kto"),
    }  # fmt: skip
    for number, case in enumerate(pairwise(axes)):
        made = [for_stage(case["stage"], messages, at) for at, messages in enumerate(rows[case["rows"]])]
        add(f"loss/{number}-{case['rows'].replace(' ', '-')}", case["model"], case["stage"], made,
            flag("loss_scale", case["loss_scale"]))  # fmt: skip
    for scale in ("hermes", "react", "default+hermes", "last_round+ignore_empty_think+hermes", "nonsense", "qwen",
                  "ignore_think_prefix"):  # fmt: skip
        add(f"loss/{scale}", "Qwen3-8B", "sft", [{"messages": thought}], ["--loss_scale", scale])


def truncation() -> None:
    """Every truncation strategy at small lengths, by stage and model."""
    rows = [turns("Where is it now?", "On the table in the hall."), turns("Hi?", "Yes."),
            turns("One two three?", "Four five six.", "Seven eight?", "Nine ten eleven.")]  # fmt: skip
    axes = {
        "strategy": (None, "delete", "left", "right", "split"),
        "max_length": ("8", "20", "33", "45", "60"),
        "stage": tuple(STAGES),
        "model": ("Qwen3-8B", "Qwen3-4B-Instruct-2507", "Meta-Llama-3-8B-Instruct", "DeepSeek-V3",
                  "Mixtral-8x7B-Instruct-v0.1"),
    }  # fmt: skip
    for number, case in enumerate(pairwise(axes)):
        made = [for_stage(case["stage"], messages, at) for at, messages in enumerate(rows)]
        flags = [*flag("max_length", case["max_length"]), *flag("truncation_strategy", case["strategy"])]
        add(f"cut/{number}-{case['strategy']}-{case['max_length']}", case["model"], case["stage"], made, flags)
    text = [{"text": "The quick brown fox jumps over the lazy dog. " * 4}, {"text": "Short."}]
    for strategy, length in itertools.product(("delete", "left", "right", "split"), ("10", "16", "17")):
        for model in ("Qwen3-8B", "Meta-Llama-3.1-8B-Instruct"):
            add(f"cut/text-{strategy}-{length}", model, "pt", text,
                ["--max_length", length, "--truncation_strategy", strategy])  # fmt: skip
    for strategy in ("left", "right"):
        uneven = [
            {"messages": turns("Where?", "Here."), "rejected_response": "Over there behind the large red door."},
            {"messages": turns("Where?", "Over there behind the large red door."), "rejected_response": "Here."},
        ]
        for stage in ("dpo", "rm"):
            add(f"cut/uneven-{strategy}", "Qwen3-8B", stage, uneven,
                ["--max_length", "28", "--truncation_strategy", strategy])  # fmt: skip
