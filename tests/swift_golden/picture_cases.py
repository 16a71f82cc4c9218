"""Cases of pictures."""

from __future__ import annotations

import itertools
import json

from casework import Row, add, flag, for_stage, pairwise, turns, with_key
from tool_cases import ROME, WEATHER, told

VISION = ("Qwen2-VL-7B-Instruct", "Qwen2.5-VL-7B-Instruct", "Qwen3-VL-8B-Instruct", "Qwen3-VL-8B-Thinking",
          "Qwen3-VL-30B-A3B-Instruct")  # fmt: skip


def media() -> None:
    """Pictures by tag, without tags, of every size, under --max_pixels and MAX_PIXELS."""
    path = "pictures/{}.png".format
    parts = [{"type": "image", "image": path("a")}, {"type": "text", "text": "What?"}]
    forms: dict[str, list[Row]] = {
        "tag": [{"messages": turns("<image>What?", "A."), "images": [path("a")]},
                {"messages": turns("What is <image> here?", "A."), "images": [path("b")]}],
        "two": [{"messages": turns("<image><image>What?", "A."), "images": [path("a"), path("b")]},
                {"messages": turns("<image>What?", "A.", "And <image>?", "B."), "images": [path("a"), path("b")]}],
        "no tag": [{"messages": turns("What?", "A.", "So?", "B."), "images": [path("a"), path("b")]},
                   {"messages": turns("What?", "A.", system="Look."), "images": [path("b")]}],
        "fewer tags": [{"messages": turns("<image>What?", "A."), "images": [path("a"), path("b")]},
                       {"messages": turns("What?", "A.", "<image>So?", "B."), "images": [path("a"), path("b")]}],
        "more tags": [{"messages": turns("<image><image>What?", "A."), "images": [path("a")]}],
        "in answer": [{"messages": turns("Draw.", "<image>Here."), "images": [path("b")]}],
        "in system": [{"messages": turns("What?", "A.", system="Look: <image>"), "images": [path("b")]}],
        "text": [{"messages": turns("What?", "A.")}, {"messages": turns("<image>What?", "B."), "images": [path("b")]},
                 {"messages": turns("<image>What?", "C."), "images": []}],
        "one text": [{"messages": turns("<image>What?", "A."), "images": path("b")}],
        "image column": [{"query": "<image>What?", "response": "A.", "image": path("b")}],
        "query": [{"query": "<image>What?", "response": "A.", "images": [path("b")], "history": [["a", "b"]]}],
        "img": [{"messages": turns(f"<img>{path('b')}</img>What?", "A.")},
                {"messages": turns(f"See <img>{path('a')}</img>", "A.", f"<img>{path('b')}</img>?", "B.")}],
        "img lost": [{"messages": turns("<img>no.png</img>What?", "A.")}, {"messages": turns("So?", "B.")}],
        "parts": [{"messages": [{"role": "user", "content": parts}, *turns(None, "A.")]}],
        "bytes": [{"messages": turns("<image>What?", "A."), "images": [{"bytes": None, "path": path("b")}]}],
        "lost": [{"messages": turns("<image>What?", "A."), "images": ["no.png"]},
                 {"messages": turns("So?", "B."), "images": [path("b")]}],
        "sizes": [{"messages": turns(f"<image>{name}?", "A."), "images": [path(name)]}
                  for name in ("a", "b", "tiny", "line", "odd", "dot", "big", "thin")],
        "thought": [{"messages": turns("<image>What?", "<think>\nx\n</think>\n\nA.", "So?", "B."),
                    "images": [path("b")]}],
        "false": [{"messages": with_key(turns("<image>What?", "A.", "So?", "B."), "loss", False),
                  "images": [path("b")]}],
        "tools": [{"messages": [*turns("<image>Weather?"), ROME, told("<image>"), *turns(None, "Sun.")],
                   "tools": [WEATHER], "images": [path("b"), path("a")]}],
        "video tag": [{"messages": turns("<video>What?", "A.")}],
    }  # fmt: skip
    for model in VISION[:3]:
        for name, rows in forms.items():
            add(f"picture/{name.replace(' ', '-')}", model, "sft", rows)
    for model in VISION[3:]:
        for name in ("tag", "sizes", "thought"):
            add(f"picture/{name}", model, "sft", forms[name])
    for model in VISION:
        for stage in ("dpo", "rm", "kto", "pt"):
            rows = [for_stage(stage, row["messages"], at, images=row["images"])
                    for at, row in enumerate((*forms["tag"], *forms["no tag"]))]  # fmt: skip
            rows = [{**row, "messages": [*row["messages"][:-1], {"role": "assistant", "content": f"Answer {at}."}]}
                    for at, row in enumerate(rows)]  # fmt: skip
            add("picture", model, stage, rows)
        for pixels in ("400", "5000", "20000", "300000", "10"):
            add(f"picture/max_pixels-{pixels}", model, "sft", forms["sizes"], ["--max_pixels", pixels])
    for model in VISION[:3]:
        for env in ({"MAX_PIXELS": "50176"}, {"MAX_PIXELS": "4000"}, {"MAX_PIXELS": "100352", "MIN_PIXELS": "50176"},
                    {"MIN_PIXELS": "100352"}, {"IMAGE_MAX_TOKEN_NUM": "16"},
                    {"IMAGE_MIN_TOKEN_NUM": "30"}):  # fmt: skip
            title = "-".join(f"{name}={value}" for name, value in env.items())
            add(f"picture/{title}", model, "sft", forms["sizes"], env=env)
        add("picture/both", model, "sft", forms["sizes"], ["--max_pixels", "20000"], env={"MAX_PIXELS": "8000"})
        for strategy, length in itertools.product(("delete", "left", "right"), ("12", "30", "45")):
            add(f"picture/cut-{strategy}-{length}", model, "sft", [*forms["tag"], *forms["two"]],
                ["--max_length", length, "--truncation_strategy", strategy])  # fmt: skip
        add("picture/rejected", model, "dpo", [
            {"messages": turns("<image>What?", "A."), "images": [path("b")],
             "rejected_messages": turns("<image>What?", "B."), "rejected_images": [path("a")]},
            {"messages": turns("<image>What?", "A."), "images": [path("b")],
            "rejected_messages": turns("<image>What?", "B.")},
        ])  # fmt: skip


def in_conversations() -> None:
    """Pictures in conversations with thoughts, system messages, losses and tools, by model, stage and flags."""
    picture = ["pictures/b.png"]
    rows = {
        "plain": turns("<image>What?", "A.", "So?", "B."),
        "system": turns("<image>What?", "A.", system="Look."),
        "empty system": turns("<image>What?", "A.", system=""),
        "thoughts": turns("What is <image>?", "<think>\nx\n</think>\n\nA.", "So?", "<think>\n\n</think>\n\nB."),
        "earlier": turns("<image>", "<think>\nx\n</think>\n\nA.", "So?", "B."),
        "loss": with_key(turns("So?", "A.", "<image> is?", "B.", "Sure?", "C."), "loss", False, True),
        "late": turns("Hi?", "A.", "What?", "B."),
        "stop": turns("<image>What?", "A.<|im_end|>"),
        "tools": [*turns("<image>Weather?"), ROME, told("rain"), *turns(None, "Rain.")],
        "two users": [*turns("<image>"), *turns("What?", "A.")],
        "bot": [{"from": "human", "value": "<image>What?"}, {"from": "gpt", "value": "A."}],
    }
    axes = {
        "rows": list(rows),
        "model": VISION,
        "stage": ("sft", "dpo", "rm", "kto"),
        "loss_scale": (None, "default", "last_round", "all"),
        "system": (None, "", "Be brief."),
        "max_pixels": (None, "2000"),
        "enable_thinking": (None, "true", "false"),
        "cut": (None, ("40", "left"), ("40", "right")),
    }
    for number, case in enumerate(pairwise(axes)):
        messages = rows["plain"] if case["rows"] == "bot" else rows[case["rows"]]
        made = [{**for_stage(case["stage"], messages, 0), "images": picture},
                {**for_stage(case["stage"], turns("<image>Which?", "This."), 1), "images": picture}]  # fmt: skip
        if case["rows"] == "bot":
            messages = rows["bot"]
            made = [{"conversations": messages, "images": picture, "rejected_response": "No.", "label": True},
                    {"conversations": [*messages[:1], {"from": "gpt", "value": "B."}], "images": picture,
                     "rejected_response": "Not.", "label": False}]  # fmt: skip
        if case["rows"] == "tools":
            made = [{**row, "tools": json.dumps([WEATHER])} for row in made]
        flags = [
            word
            for name in ("loss_scale", "system", "max_pixels", "enable_thinking")
            for word in flag(name, case[name])
        ]
        if case["cut"]:
            flags += ["--max_length", case["cut"][0], "--truncation_strategy", case["cut"][1]]
        add(f"vision/{number}-{case['rows'].replace(' ', '-')}", case["model"], case["stage"], made, flags)
    for model, name in itertools.product(VISION[:3], ("qwen", "qwen2_vl", "qwen2_5_vl", "qwen3_vl", "chatml")):
        add(
            f"vision/template-{name}",
            model,
            "sft",
            [{"messages": rows["plain"], "images": picture}],
            flag("template", name),
        )
