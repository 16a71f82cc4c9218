"""What a trained model is asked with: the chat template of its tokenizer, which other programs read.

A named template is compared with it; where the tokenizer has none, the named template is written as one.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from itertools import takewhile
from typing import TYPE_CHECKING

from megatune.data.conversation import Conversation, Message
from megatune.data.templates.chat_template import CALL_FORMS, FIXED_DATE, as_dicts
from megatune.data.templates.named import NamedTemplate
from megatune.data.templates.rendering import render, template_errors
from megatune.data.templates.turns import PROBE, Template, Thinking, Turn, needs_whole_text

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

_LONG = Conversation((Message("user", "Add 1."), Message("assistant", "One.\n"), *PROBE.messages), "Be brief.")
# Begins what is written here, which is no part of the tokenizer that a run was given.
MARK = "{#- Written by megatune from the template that the model was trained with. #}\n"
_SHOWN = 60  # characters of a difference


def prompt_difference(template: Template, tokenizer: PreTrainedTokenizerBase, thinking: Thinking, system: str) -> str:
    """Say where the tokenizer's chat template writes another prompt than a template; "" where it writes the same.

    It is asked for what it writes before the only answer, and before the second one after a system message.

    Args:
        thinking: of the run; whether earlier answers keep their reasoning makes no difference here.
        system: the message of the system that the run adds, which whoever asks adds, too; "" where it adds none.
    """
    given = {**tokenizer.special_tokens_map, **FIXED_DATE, "add_generation_prompt": True}
    if thinking.enable is not None:
        given["enable_thinking"] = thinking.enable
    for probe in (PROBE, _LONG):
        ours = _prompt(template.render(probe, Thinking(thinking.enable, drop_history=True)))
        chat = as_dicts(probe.messages[:-1], probe.system or system, CALL_FORMS[0])
        try:
            theirs = render(tokenizer.get_chat_template(), chat, **given)
        except template_errors():  # such as for a system message: whoever asks so is told
            continue
        if ours != theirs:
            same = list(takewhile(lambda pair: pair[0] == pair[1], zip(ours, theirs, strict=False)))
            # Of lines that differ from their first character on, the one before is shown, too.
            line = ours.rfind("\n", 0, max(0, len(same) - 1)) + 1
            begin = max(line, len(same) - _SHOWN // 2)
            return f"{theirs[begin : begin + _SHOWN]!r} instead of {ours[begin : begin + _SHOWN]!r}"
    return ""


def _prompt(turns: Sequence[Turn]) -> str:
    """Join what a model is given before the last answer."""
    return "".join(piece for turn in turns for piece in turn.pieces).removesuffix("".join(turns[-1].completion))


def as_jinja(template: Template, tokenizer: PreTrainedTokenizerBase) -> str:
    """Write a template as a chat template of Transformers; tools and turns that do not alternate are refused by it.

    Args:
        template: loaded with the tokenizer.

    Raises:
        ValueError: it cannot be written as one, or gives other tokens there; the text says which.
    """
    if not isinstance(template, NamedTemplate):
        raise ValueError("it is ms-swift's")
    if template.thinks:
        raise ValueError("it writes reasoning, which differs with the settings")
    source = MARK + _source(template)
    for probe in (PROBE, _LONG):
        turns = template.render(probe, Thinking())
        written = render(source, as_dicts(probe.messages, probe.system or "", CALL_FORMS[0]))
        whole = "".join(piece for turn in turns for piece in turn.pieces)
        parts = [whole] if needs_whole_text(template, tokenizer) else [p for turn in turns for p in turn.pieces]
        trained = [token for part in parts for token in tokenizer.encode(part, add_special_tokens=False)]
        if trained != tokenizer.encode(written, add_special_tokens=False):
            raise ValueError("texts that are joined become other tokens than those that are trained one by one")
    return source


def _source(template: NamedTemplate) -> str:
    is_last = "loop.index0 == asked" if template.system_in_question == "last" else "loop.first"
    said = f"(head ~ {_text_of(template, 'user')} if {is_last} else {_text_of(template, 'user')})"
    user = _around(template.user, said if template.system_in_question else _text_of(template, "user"))
    answer = _text_of(template, "assistant")
    last, followed = (_around(text, answer) for text in (template.assistant, template.followed or template.assistant))
    shown = "" if template.system_in_question else "{{- head }}"
    alternate = "messages of the user and of the assistant take turns, and the user begins"
    return f"""\
{{%- if tools %}}{{{{- raise_exception("tools are not written here") }}}}{{%- endif %}}
{{%- set has_system = messages and messages[0].role == "system" %}}
{{%- set turns = messages[1:] if has_system else messages %}}
{{%- set system = (messages[0].content if has_system else "") or {_quoted(template.default_system)} %}}
{{%- set head = {_around(template.system, _text_of(template, "system", "system"))} if system else "" %}}
{{%- set asked = (turns | length - 1) // 2 * 2 %}}
{{{{- {_quoted(template.prefix)} }}}}{shown}
{{%- for message in turns %}}
{{%- if message.role != ("assistant" if loop.index0 % 2 else "user") or message.tool_calls %}}
{{{{- raise_exception({_quoted(alternate)}) }}}}
{{%- elif message.role == "user" %}}
{{{{- {user} }}}}
{{%- elif loop.last %}}
{{{{- {last} }}}}
{{%- else %}}
{{{{- {followed} }}}}
{{%- endif %}}
{{%- endfor %}}
"""


def _quoted(text: str) -> str:
    return json.dumps(text, ensure_ascii=False)


def _around(text: str, content: str) -> str:
    """Write a text with {content} as an expression."""
    before, _, after = text.partition("{content}")
    return f"{_quoted(before)} ~ {content} ~ {_quoted(after)}"


def _text_of(template: NamedTemplate, role: str, content: str = "message.content") -> str:
    return f"({content} | trim)" if role in template.trims else content
