"""Chat templates that would take minutes, or all memory, to render: refused by name, in a moment; and what published
templates write is what Transformers makes of them."""

from __future__ import annotations

import json
import signal
import threading
import time
from pathlib import Path

import pytest
from tokenizer_kit import chat_template, qwen_tokenizer
from transformers.utils.chat_template_utils import render_jinja_template

from megatune.data.bad_rows import RowError
from megatune.data.conversation import Conversation, Message
from megatune.data.templates import Thinking, load_template, rendering
from megatune.data.templates.chat_template import ChatTemplate
from megatune.data.templates.rendering import RenderLimitError, render, render_marked, run_limited, template_errors
from megatune.errors import ExitCode, MegatuneError

CHAT = [{"role": "user", "content": "1 + 1?"}, {"role": "assistant", "content": "2"}]
RANGES = "{% for i in range(100000) %}{% for j in range(100000) %}{% endfor %}{% endfor %}"
DOUBLED = "{% set ns = namespace(x='a') %}{% for i in range(60) %}{% set ns.x = VALUE %}{% endfor %}"

LONG = {
    "loops": RANGES,
    "a loop's condition": "{% for i in range(100000) %}{% for j in range(100000) if false %}{% endfor %}{% endfor %}",
    "recursion": "{% macro f(n) %}{% if n %}{{ f(n-1) }}{{ f(n-1) }}{% endif %}{% endmacro %}{{ f(60) }}",
    "lists in lists": DOUBLED.replace("VALUE", "[ns.x, ns.x]") + "{{ ns.x }}",
    "dicts in dicts": DOUBLED.replace("VALUE", "dict(a=ns.x, b=ns.x)") + "{{ ns.x }}",
}
LARGE = {
    "times": "{{ ('a' * 100000000000)|length }}",
    "times a list": "{{ (100000000000 * [messages])|length }}",
    "power": "{{ 10 ** 1000000000 }}",
    "square": DOUBLED.replace("'a'", "10").replace("VALUE", "ns.x * ns.x"),
    "joined": DOUBLED.replace("VALUE", "ns.x ~ ns.x"),
    "added": DOUBLED.replace("VALUE", "ns.x + '' + ns.x"),
    "handed on": "{% macro f(x) %}{{ f(x + '' + x) }}{% endmacro %}{{ f('a') }}",
    "written": "{% macro f(n) %}{% if n %}{% set a = f(n-1) %}{{ a }}{{ a }}{% else %}a{% endif %}{% endmacro %}"
    "{{ f(60) }}",
    "kept": "{% set ns = namespace(l=[]) %}{% set x = 'a' * 60000000 %}"
    "{% for i in range(1000) %}{% set ns.l = ns.l + [x ~ i] %}{% endfor %}",
    "output": "{% set x = 'a' * 60000000 %}{% for i in range(1000) %}{{ x }}{% endfor %}",
    "center": "{{ 'a'|center(100000000000) }}",
    "mapped": "{{ ['a']|map('center', 100000000000)|list }}",
    "format": "{{ '{:100000000000}'.format(1) }}",
    "format with a width": "{{ '{:{}}'.format(1, 100000000000) }}",
    "%": "{{ '%100000000000d' % 1 }}",
    "% with a width": "{{ '%*d' % (100000000000, 1) }}",
    "format filter": "{{ '%100000000000d'|format(1) }}",
    "replace": DOUBLED.replace("VALUE", "ns.x.replace('a', 'aaaaaaaaaa')"),
    "replace filter": DOUBLED.replace("VALUE", "ns.x|replace('a', 'aaaaaaaaaa')"),
    "join": "{{ ('a' * 10000000).join(range(100000)|map('string')) }}",
    "join filter": "{{ range(100000)|join('a' * 10000000) }}",
    "indent": "{{ ('\n' * 10000000)|indent(100000) }}",
    "tojson": "{{ messages|tojson(indent=100000000000) }}",
    "round": "{{ 1.5|round(1000000000, 'ceil') }}",
    "source": "a" * 2**21,
}
LONG |= {
    "filters of a filter": "{% set x = 'ab' * 20000000 %}{{ range(100000)|map('replace', 'c', x)|list|length }}"
    "{% for i in range(100000) %}{{ x|upper|length }}{% endfor %}",
    "comparisons": "{% set x = 'a' * 30000000 %}{% set y = x ~ '' %}"
    "{% for i in range(100000) %}{{ x == y }}{% endfor %}",
    "slices": "{% set x = 'a' * 30000000 %}{% for i in range(100000) %}{{ x[1:]|length }}{% endfor %}",
}
UNSAFE = {
    "ljust": "{{ 'a'.ljust(100000000000) }}",
    "attr": "{{ ('a'|attr('zfill'))(100000000000) }}",
    "to_bytes": "{{ (1).to_bytes(100000000000) }}",
    "lipsum": "{{ lipsum(n=10000000) }}",
    "object": "{{ messages.__class__.__mro__ }}",
    "item": "{{ ''['__class__']['__subclasses__']() }}",
    "depth": "{{ " + "(" * 100000 + "1" + ")" * 100000 + " }}",
}


ENDED = r"more than 0\.25 seconds to render|more memory than|at most 1,048,576 are read"


@pytest.mark.parametrize("source", [*LONG.values(), *LARGE.values()], ids=[*LONG, *LARGE])
def test_rendering_ends(source: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rendering, "MAX_SECONDS", 0.25)
    with pytest.raises(RenderLimitError, match=ENDED):
        render(source, CHAT)
    assert render("{{ messages[0].content }}", CHAT) == "1 + 1?"  # nothing is raised in what comes after


@pytest.mark.parametrize("source", UNSAFE.values(), ids=UNSAFE)
def test_the_sandbox_holds(source: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rendering, "MAX_SECONDS", 0.25)
    with pytest.raises(template_errors()):
        render(source, CHAT)


def test_a_large_text_is_refused() -> None:
    assert render("{{ ('F' * 30000000)|int(0, 16) % 7 }}", CHAT) == "0"  # a large number is none
    source = "{% set x = 'a' * 1000000 %}{% for i in range(100) %}{{ x }}{% endfor %}"
    with pytest.raises(RenderLimitError, match="more than 67,108,864 characters"):
        render(source, CHAT)


def test_each_thread_has_its_own_limit(monkeypatch: pytest.MonkeyPatch) -> None:
    """One thread's rendering ends; another one's, and what the first does after it, do not."""
    monkeypatch.setattr(rendering, "MAX_SECONDS", 0.25)
    ended: list[str] = []

    def endless() -> None:
        with pytest.raises(RenderLimitError):
            render(RANGES, CHAT)
        ended.append(render("{{ messages[1].content }}", CHAT))

    thread = threading.Thread(target=endless)
    thread.start()
    while thread.is_alive():
        assert render("{{ messages[0].content }}", CHAT) == "1 + 1?"
        time.sleep(0.01)
    assert ended == ["2"]


def test_threads_do_not_share_what_is_marked() -> None:
    """Rows are rendered in two threads; answers that the template marks are each conversation's own."""
    source = "{% for m in messages %}{% generation %}{{ m.content }}{% endgeneration %}|{% endfor %}"
    found: dict[int, tuple[str, list[tuple[int, int]]]] = {}

    def rendered(size: int) -> None:
        chat = [{"role": "assistant", "content": "x" * size}] * 5000
        found[size] = run_limited(render_marked, source, chat)

    threads = [threading.Thread(target=rendered, args=(size,)) for size in (1, 2, 3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for size in (1, 2, 3):
        text, spans = found[size]
        assert [text[start:stop] for start, stop in spans] == ["x" * size] * 5000


def test_the_row_and_the_template_are_named(monkeypatch: pytest.MonkeyPatch) -> None:
    """A template that a row makes endless refuses the row; one that no conversation can be written with is refused."""
    monkeypatch.setattr(rendering, "MAX_SECONDS", 0.25)
    tokenizer = qwen_tokenizer()
    usual = tokenizer.chat_template
    tokenizer.chat_template = "{% if messages[0].content == 'bomb' %}" + RANGES + "{% endif %}" + usual
    template = load_template(None, tokenizer)
    assert isinstance(template, ChatTemplate)
    with pytest.raises(RowError) as refused:
        template.render(Conversation((Message("user", "bomb"), Message("assistant", "2"))), Thinking())
    bomb, fine = (Conversation((Message("user", text), Message("assistant", "2"))) for text in ("bomb", "1 + 1"))
    written = template.render_all([fine, bomb, fine], Thinking())
    assert [isinstance(each, RowError) for each in written] == [False, True, False]
    assert refused.value.code == "template-limit"
    assert "more than 0.25 seconds" in refused.value.detail
    for source in (
        RANGES + usual,
        "{% if add_generation_prompt and messages|length == 1 %}" + RANGES + "{% endif %}" + usual,
    ):
        tokenizer.chat_template = source
        with pytest.raises(MegatuneError, match=r"more than 0\.25 seconds to render") as error:
            load_template(None, tokenizer)
        assert error.value.exit_code == ExitCode.INPUT


TOOL = {"type": "function", "function": {"name": "look", "description": "x", "parameters": {"type": "object"}}}
CALL = {"type": "function", "id": "call00000", "function": {"name": "look", "arguments": {"at": ["a", "b"]}}}
TOOLS = [
    *CHAT,
    {"role": "user", "content": "Look."},
    {"role": "assistant", "content": "", "tool_calls": [CALL]},
    {"role": "tool", "content": "found", "tool_call_id": "call00000"},
    {"role": "assistant", "content": "<think>\nSo\n</think>\n\nDone"},
]


@pytest.mark.parametrize("name", sorted(path.stem for path in (Path(__file__).parent / "chat_templates").iterdir()))
def test_what_is_written_is_what_transformers_writes(name: str) -> None:
    """Measuring changes no text, nor where {% generation %} marks it."""
    source = chat_template(name, marked=True)
    given = {"bos_token": "<s>", "eos_token": "</s>", "date_string": "26 Jul 2024", "add_generation_prompt": True}
    written = 0
    for chat, tools in ((CHAT, None), (TOOLS, [TOOL]), ([{"role": "system", "content": "Be brief."}, *CHAT], None)):
        options = {"tools": tools, "chat_template": source, "return_assistant_tokens_mask": "generation" in source}
        try:
            (text,), spans = render_jinja_template([json.loads(json.dumps(chat))], **options, **given)
        except template_errors() as refused:
            with pytest.raises(type(refused)):
                render(source, chat, tools, **given)
            continue
        assert render(source, chat, tools, **given) == text
        assert run_limited(render_marked, source, chat, tools, **given) == (text, spans[0] if spans else [])
        written += 1
    assert written


def test_a_process_that_somebody_ends_is_started_again() -> None:
    assert render("{{ messages[0].content }}", CHAT) == "1 + 1?"
    for process in rendering._idle:
        process.send_signal(signal.SIGTERM)  # as to all processes of a run that is stopped
    assert render("{{ messages[0].content }}", CHAT) == "1 + 1?"
    for process in rendering._idle:
        process.kill()
        process.wait()
    assert render("{{ messages[0].content }}", CHAT) == "1 + 1?"
