"""Cases of families that joined later: Qwen3.5, Kimi-K2, Gemma 3 and 4, Mistral Small, Phi-3, gpt-oss, MiniMax-M2."""

from __future__ import annotations

from casework import add, flag, for_stage, turns
from chat_cases import THOUGHTS
from models import LATER

# Text that says nothing of the day, which ms-swift writes into some.
_SYSTEM = ("--system", "Be brief.")
_DATED = ("gpt-oss-20b", "Mistral-Small-3.1-24B-Instruct-2503")
_PLAIN = [
    turns("Where is it?", "On the table.", "Sure?", "Quite."),
    turns("今天天气怎么样？", "晴。"),
    turns("Go", "ok", system="Be brief."),
    turns(" a \n", "\n b \n", "c", " d\n", system=" Be brief.\n"),
]
# Templates by name, on models whose tokens they write.
_NAMED = {"gemma-3-1b-it": ("gemma", "gemma4", "gemma4_nothinking"), "Phi-3-mini-4k-instruct": ("phi4",),
          "MiniMax-M2": ("minimax_m2_5", "minimax_m2_7"), "Qwen3-8B": ("qwen3_5",),
          "Mistral-Small-3.1-24B-Instruct-2503": ("mistral_2501", "mistral_2506")}  # fmt: skip


def families() -> None:
    """Conversations with and without reasoning, of every stage, with what bears on them."""
    for model in LATER:
        for stage in ("sft", "dpo", "pt"):
            rows = [for_stage(stage, messages, at) for at, messages in enumerate(_PLAIN)]
            if model not in _DATED or stage == "pt":
                add("families/plain", model, stage, rows, versions=(4,))
            elif model != "gpt-oss-20b":
                add("families/plain", model, stage, rows, _SYSTEM, versions=(4,))
        for name, conversations in THOUGHTS.items() if model not in _DATED else ():
            rows = [for_stage("sft", messages, at) for at, messages in enumerate(conversations)]
            for scale in (None, "last_round"):
                for thinking in (None, "true", "false"):
                    words = [*flag("loss_scale", scale), *flag("enable_thinking", thinking)]
                    add(f"families/{name}-{scale}-{thinking}", model, "sft", rows, words, versions=(4,))
    for model, names in _NAMED.items():
        for name in names:
            rows = [for_stage("sft", messages, at) for at, messages in enumerate(_PLAIN)]
            system = _SYSTEM if model in _DATED else ()
            add(f"families/{name}", model, "sft", rows, ["--template", name, *system], versions=(4,))
            add(
                f"families/{name}-thinking",
                model,
                "sft",
                rows,
                ["--template", name, "--enable_thinking", "true", *system],
                versions=(4,),
            )
