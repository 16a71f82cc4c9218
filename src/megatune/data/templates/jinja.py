"""The chat template that a trained model is used with, which other programs read from its tokenizer.

A named template is compared with it; if the tokenizer has none, the named template is converted to one.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from itertools import takewhile
from typing import TYPE_CHECKING

from megatune.data.conversation import Conversation, Message
from megatune.data.templates.chat_template import CALL_FORMS, FIXED_DATE, to_openai
from megatune.data.templates.named import NamedTemplate
from megatune.data.templates.rendering import render, template_errors
from megatune.data.templates.turns import PROBE, Template, Thinking, Turn, needs_whole_text

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

_LONG = Conversation((Message("user", "Add 1."), Message("assistant", "One.\n"), *PROBE.messages), "Be brief.")
# Marks a chat template that is written here, and so is not part of the tokenizer that the run was given.
MARK = "{#- Written by megatune from the template that the model was trained with. #}\n"
_SHOWN = 60  # characters of a difference


def prompt_difference(template: Template, tokenizer: PreTrainedTokenizerBase, thinking: Thinking, system: str) -> str:
    """Describe where the prompt of the tokenizer's chat template differs from a template's prompt; "" if it does not.

    Two prompts are compared: before the only answer, and before the second answer after a system message.

    Args:
        thinking: the run's setting; whether earlier answers keep their reasoning makes no difference here.
        system: the system message that the run adds, and that must be passed at inference, too; "" if it adds none.
    """
    given = {**tokenizer.special_tokens_map, **FIXED_DATE, "add_generation_prompt": True}
    if thinking.enable is not None:
        given["enable_thinking"] = thinking.enable
    for probe in (PROBE, _LONG):
        ours = _prompt(template.render(probe, Thinking(thinking.enable, drop_history=True)))
        chat = to_openai(probe.messages[:-1], probe.system or system, CALL_FORMS[0])
        try:
            theirs = render(tokenizer.get_chat_template(), chat, **given)
        except template_errors():  # for example for a system message: such a request fails visibly at inference
            continue
        if ours != theirs:
            same = list(takewhile(lambda pair: pair[0] == pair[1], zip(ours, theirs, strict=False)))
            # If lines differ from their first character on, the line before is shown, too.
            line = ours.rfind("\n", 0, max(0, len(same) - 1)) + 1
            begin = max(line, len(same) - _SHOWN // 2)
            return f"{theirs[begin : begin + _SHOWN]!r} instead of {ours[begin : begin + _SHOWN]!r}"
    return ""


def _prompt(turns: Sequence[Turn]) -> str:
    """Join the texts before the last answer."""
    return "".join(piece for turn in turns for piece in turn.pieces).removesuffix("".join(turns[-1].completion))


def as_jinja(template: Template, tokenizer: PreTrainedTokenizerBase) -> str:
    """Convert a template to a chat template of Transformers; it rejects tools and turns that do not alternate.

    Args:
        template: loaded with the tokenizer.

    Raises:
        ValueError: the template cannot be converted, or gives other tokens when converted; the text says why.
    """
    if not isinstance(template, NamedTemplate):
        raise ValueError("it is ms-swift's")
    if template.thinks:
        raise ValueError("it writes reasoning, which differs with the settings")
    source = MARK + _source(template)
    for probe in (PROBE, _LONG):
        turns = template.render(probe, Thinking())
        written = render(source, to_openai(probe.messages, probe.system or "", CALL_FORMS[0]))
        whole = "".join(piece for turn in turns for piece in turn.pieces)
        parts = [whole] if needs_whole_text(template, tokenizer) else [p for turn in turns for p in turn.pieces]
        trained = [token for part in parts for token in tokenizer.encode(part, add_special_tokens=False)]
        if trained != tokenizer.encode(written, add_special_tokens=False):
            raise ValueError("its texts become other tokens when they are joined than in training, one by one")
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
    """Return a text with {content} as a Jinja expression."""
    before, _, after = text.partition("{content}")
    return f"{_quoted(before)} ~ {content} ~ {_quoted(after)}"


def _text_of(template: NamedTemplate, role: str, content: str = "message.content") -> str:
    return f"({content} | trim)" if role in template.trims else content
