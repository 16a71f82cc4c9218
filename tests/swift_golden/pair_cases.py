"""Cases of preferences: pairs and labels."""

from __future__ import annotations

import json

from casework import Row, add, flag, named, pairwise, turns, with_key
from tool_cases import ADD, ASKED, TOOL_ROWS, WEATHER, call, told


def preferences() -> None:
    """Rejected answers and messages of every form, labels, and the flags that train more than the last answer."""
    two = turns("Hi?", "Yes.", "So?", "Good.")
    round_ = TOOL_ROWS["two rounds"]
    forms: dict[str, list[Row]] = {
        "response": [{"messages": two, "rejected_response": "Bad."}, {"messages": two, "rejected_response": ""}],
        "same": [{"messages": two, "rejected_response": "Good."}, {"messages": two, "rejected_response": "Bad."}],
        "null": [{"messages": two, "rejected_response": None}, {"messages": two, "rejected_response": "Bad."}],
        "list": [{"messages": two, "rejected_response": turns(None, "Bad.")}],
        "messages": [{"messages": two, "rejected_messages": turns("Hi?", "Yes.", "So?", "Bad.")},
                     {"messages": two, "rejected_messages": turns("Other?", "No.", "Why?", "Bad.")},
                     {"messages": turns("Hi?", "Yes.", system="Be brief."), "rejected_messages": turns("Hi?", "No.")}],
        "histories": [{"messages": two, "rejected_messages": turns("One?", "Bad.")},
                      {"messages": turns("Hi?", "Yes."), "rejected_messages": two}],
        "systems": [{"messages": turns("Hi?", "Yes.", system="A."), "rejected_messages": turns("Hi?",
                    "No.", system="B.")},
                    {"messages": turns("Hi?", "Yes."), "rejected_messages": turns("Hi?", "No."), "system": "Column."}],
        "missing": [{"messages": two}, {"messages": turns("Hi?", "Yes."), "rejected_response": "No."}],
        "query": [{"query": "Hi?", "response": "Yes.", "rejected_response": "No."},
                  {"query": "So?", "response": "Good.", "rejected_response": "Bad.", "history": [["a", "b"]]}],
        "alpaca": [{"instruction": "Hi?", "input": "x", "output": "Yes.", "rejected_response": "No."}],
        "sharegpt": [{"conversations": [named("human", "Hi?", "value"), named("gpt", "Yes.", "value")],
                      "rejected_response": "No."}],
        "thoughts": [{"messages": turns("a", "<think>\nx\n</think>\n\nb", "c", "<think>\ny\n</think>\n\nd"),
                      "rejected_response": "e"},
                     {"messages": turns("a", "b", "c", "d"), "rejected_response": "<think>\ny\n</think>\n\ne"}],
        "loss": [{"messages": with_key(two, "loss", None, False), "rejected_response": "Bad."},
                 {"messages": with_key(two, "loss", True, None), "rejected_response": "Bad."},
                 {"messages": with_key(two, "loss", False, None), "rejected_response": "Bad."}],
        "tools": [{"tools": json.dumps([WEATHER, ADD]), "messages": round_, "rejected_response": "No."},
                  {"tools": json.dumps([WEATHER]), "messages": TOOL_ROWS["round"], "rejected_response": "No."}],
        "tools list": [{"tools": [WEATHER], "messages": TOOL_ROWS["round"],
                        "rejected_response": [call("get_weather", city="Oslo"), told("snow"), *turns(None, "Snow.")]}],
        "tools messages": [{"tools": [WEATHER], "messages": TOOL_ROWS["round"],
                            "rejected_messages": [*ASKED, call("get_weather", city="Oslo")]}],
        "ends in user": [{"messages": turns("Hi?", "Yes.", "So?"), "rejected_response": "Bad."}],
        "stop": [{"messages": turns("Hi?", "Yes.<|im_end|>"), "rejected_response": "No.<|im_end|>"},
                 {"messages": turns("Hi?", "Yes.<|eot_id|>"), "rejected_response": "No.<|eot_id|>"}],
    }  # fmt: skip
    axes = {
        "form": list(forms),
        "stage": ("dpo", "rm"),
        "model": ("Qwen3-8B", "Qwen2.5-7B-Instruct", "Meta-Llama-3.1-8B-Instruct", "Qwen3-4B-Thinking-2507",
                  "DeepSeek-R1-Distill-Qwen-7B"),
        "loss_scale": (None, "default", "last_round", "all"),
    }  # fmt: skip
    for number, case in enumerate(pairwise(axes)):
        add(f"pair/{number}-{case['form'].replace(' ', '-')}", case["model"], case["stage"], forms[case["form"]],
            flag("loss_scale", case["loss_scale"]))  # fmt: skip
    labels = {"bool": (True, False, True), "int": (1, 0, 1), "float": (1.0, 0.0, 1.0), "text": ("true", "false", "1"),
              "null": (True, None, False), "all true": (True, True, True), "two": (2, 0, 1)}  # fmt: skip
    answers = ("Yes.", "Good.", "Fine.")
    for name, values in labels.items():
        for model in ("Qwen3-8B", "Meta-Llama-3.1-8B-Instruct"):
            rows = [{"messages": turns("Hi?", "Oh.", "So?", answer), "label": value}
                    for answer, value in zip(answers, values, strict=True)]  # fmt: skip
            add(f"kto/{name.replace(' ', '-')}", model, "kto", rows)
    for scale in ("default", "last_round", "all"):
        rows = [{"messages": turns("Hi?", "Oh.", "So?", answer), "label": True} for answer in answers]
        add(f"kto/{scale}", "Qwen3-8B", "kto", rows, ["--loss_scale", scale])
    add("kto/query", "Qwen3-8B", "kto", [{"query": "Hi?", "response": "Yes.", "label": True},
                                         {"query": "So?", "response": "No.", "label": False}])  # fmt: skip
    add(
        "kto/unlabelled", "Qwen3-8B", "kto", [{"query": "Hi?", "response": "Yes."}, {"query": "So?", "response": "No."}]
    )
    add("kto/one", "Qwen3-8B", "kto", [{"query": "Hi?", "response": "Yes.", "label": True}])
    add("kto/loss", "Qwen3-8B", "kto", [{"messages": with_key(two, "loss", None, False), "label": True},
                                        {"messages": turns("a", "b"), "label": False}])  # fmt: skip
