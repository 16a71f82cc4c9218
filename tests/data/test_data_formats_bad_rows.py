"""What is wrong with rows, word for word: "code: reason (detail)"."""

from __future__ import annotations

import ast
import pickle
import re
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
from formats_kit import ALPACA, OPENAI, QUERY, SHAREGPT, TEXT, openai, said, sharegpt
from hypothesis import given, settings
from hypothesis import strategies as st

import megatune.data
from megatune.data.bad_rows import RowError, UnsupportedRow
from megatune.data.formats import RowFormat, detect
from megatune.data.formats.swift import SwiftFormat

HALF = "\ud83d"  # of a surrogate pair


def complaint(row: dict[str, Any], source: RowFormat, stage: str = "sft") -> str:
    with pytest.raises(RowError) as caught:
        source.to_example(row, stage)
    return f"{caught.value.code}: {caught.value}"


@pytest.mark.parametrize(
    ("row", "message"),
    [
        ({"instruction": "a"}, "missing-field: field 'output' is missing (the row has 'instruction')"),
        ({}, "missing-field: field 'instruction' is missing (the row has no fields)"),
        ({"instruction": "a", "output": None}, "null-content: field 'output' is null"),
        ({"instruction": None, "output": "b"}, "null-content: field 'instruction' is null"),
        ({"instruction": "a", "output": 5}, "wrong-type: field 'output': expected a string, got a number"),
        ({"instruction": ["a"], "output": "b"}, "wrong-type: field 'instruction': expected a string, got a list"),
        (
            {"instruction": "a", "output": "b", "input": {}},
            "wrong-type: field 'input': expected a string, got an object",
        ),
        (
            {"instruction": "a", "output": "b", "system": True},
            "wrong-type: field 'system': expected a string, got a boolean",
        ),
        ({"instruction": "a", "output": " \n"}, "empty-message: an empty assistant message (field 'output')"),
        ({"instruction": "", "output": "b"}, "empty-message: an empty user message (field 'instruction')"),
        (
            {"instruction": " ", "input": "", "output": "b"},
            "empty-message: an empty user message (fields 'instruction' and 'input')",
        ),
        (
            {"instruction": "a", "output": f"Hi {HALF}"},
            "lone-surrogate: field 'output': half of a surrogate pair (character 4)",
        ),
        ({"instruction": "a\0b", "output": "b"}, "nul-character: field 'instruction': a NUL character (character 2)"),
        ({"instruction": "a", "output": "ö\0"}, "nul-character: field 'output': a NUL character (character 2)"),
        (
            {"instruction": "a", "output": "b", "history": "h"},
            "bad-history: field 'history': expected a list of [question, answer] pairs (got \"h\")",
        ),
        (
            {"instruction": "a", "output": "b", "history": [["q", "a"], ["q"]]},
            "bad-history: field 'history': expected a list of [question, answer] pairs (pair 2 is [\"q\"])",
        ),
        (
            {"instruction": "a", "output": "b", "history": [["q", None]]},
            "bad-history: field 'history': expected a list of [question, answer] pairs (pair 1 is [\"q\", null])",
        ),
        (
            {"instruction": "a", "output": "b", "history": [["q", " "]]},
            "empty-message: an empty assistant message (field 'history', pair 1)",
        ),
        (
            {"instruction": "a", "output": "b", "history": [["q", HALF]]},
            "lone-surrogate: field 'history': half of a surrogate pair (pair 1, character 1)",
        ),
        (
            {"instruction": "a", "output": "b", "tools": "f"},
            "bad-tools: field 'tools' is not JSON (Expecting value at character 1)",
        ),
    ],
)
def test_bad_alpaca_rows(row: dict[str, Any], message: str) -> None:
    assert complaint(row, ALPACA) == message


Q, A = ("human", "q"), ("gpt", "a")


@pytest.mark.parametrize(
    ("row", "message"),
    [
        (
            {"conversations": "hi"},
            "messages-not-a-list: field 'conversations': expected a list of messages, got a string",
        ),
        ({"conversations": None}, "messages-not-a-list: field 'conversations': expected a list of messages, got null"),
        ({"messages": []}, "missing-field: field 'conversations' is missing (the row has 'messages')"),
        ({"conversations": []}, "no-messages: field 'conversations': no messages"),
        (sharegpt(("system", "s")), "no-messages: field 'conversations': no messages (a system message only)"),
        (
            {"conversations": [{"from": "human", "value": "q"}, "hi"]},
            "message-not-an-object: field 'conversations': a message is not an object (message 2 is a string)",
        ),
        (
            {"conversations": [{"value": "x"}]},
            "missing-field: field 'conversations[].from' is missing (message 1 has 'value')",
        ),
        (
            {"conversations": [{"from": "human"}]},
            "missing-field: field 'conversations[].value' is missing (message 1 has 'from')",
        ),
        (sharegpt(Q, ("gpt", None)), "null-content: field 'conversations[].value' is null (message 2)"),
        (
            sharegpt(Q, ("gpt", 7)),
            "wrong-type: field 'conversations[].value': expected a string, got a number (message 2)",
        ),
        (sharegpt((3, "q")), "wrong-type: field 'conversations[].from': expected a string, got a number (message 1)"),
        (
            sharegpt(Q, ("gpt", f"a{HALF}")),
            "lone-surrogate: field 'conversations[].value': half of a surrogate pair (message 2, character 2)",
        ),
        (
            sharegpt(("human", "\0"), A),
            "nul-character: field 'conversations[].value': a NUL character (message 1, character 1)",
        ),
        (
            sharegpt(Q, ("bot", "a")),
            "unknown-role: unknown role "
            '(message 2 has role "bot", expected one of system, human, gpt, observation, function_call)',
        ),
        (sharegpt(("system", "a"), Q, ("system", "b")), "two-system-messages: two system messages (messages 1 and 3)"),
        (sharegpt(Q, ("system", "b")), "system-not-first: the system message is not the first (message 2)"),
        (sharegpt(Q), "no-answer: the last message is not the assistant's (message 1 is 'human')"),
        (
            sharegpt(("system", "s"), Q, A, Q),
            "no-answer: the last message is not the assistant's (message 4 is 'human')",
        ),
        (sharegpt(A), "roles-out-of-order: roles out of order (message 1 is 'gpt', expected 'human')"),
        (
            sharegpt(("observation", "1"), A),
            "roles-out-of-order: roles out of order (message 1 is 'observation', expected 'human')",
        ),
        (
            sharegpt(("system", "s"), Q, Q),
            "roles-out-of-order: roles out of order (message 3 is 'human', expected 'gpt')",
        ),
        (
            sharegpt(Q, A, A),
            "roles-out-of-order: roles out of order (message 3 is 'gpt', expected 'human' or 'observation')",
        ),
        (sharegpt(Q, ("gpt", "")), "empty-message: an empty assistant message (message 2)"),
        (sharegpt(("system", "s"), ("human", " ")), "empty-message: an empty user message (message 2)"),
        (
            sharegpt(Q, ("function_call", "f(x)")),
            'bad-tool-call: a function call is not JSON (message 2: Expecting value at character 1 of "f(x)")',
        ),
        (sharegpt(Q, ("function_call", "[]")), "bad-tool-call: a function call is empty (message 2)"),
        (
            sharegpt(Q, ("function_call", '{"name": "f", "arguments": [1]}')),
            "bad-tool-call: a tool call needs a name and an object of arguments "
            '(message 2: {"name": "f", "arguments": [1]})',
        ),
        (
            sharegpt(Q, ("function_call", '{"arguments": {}}')),
            'bad-tool-call: a tool call needs a name and an object of arguments (message 2: {"arguments": {}})',
        ),
        (
            sharegpt(Q, ("function_call", '{"name": "f", "arguments": {"x": "\\ud83d"}}')),
            "lone-surrogate: field 'conversations[].value': half of a surrogate pair (message 2)",
        ),
        (
            sharegpt(Q, A, tools="{"),
            "bad-tools: field 'tools' is not JSON (Expecting property name enclosed in double quotes at character 2)",
        ),
        (
            sharegpt(Q, A, tools={"name": "f"}),
            'bad-tools: field \'tools\': expected a list of tool schemas (got {"name": "f"})',
        ),
        (sharegpt(Q, A, tools=["f"]), "bad-tools: field 'tools': expected a list of tool schemas (got [\"f\"])"),
        (sharegpt(Q, A, tools=[{"name": HALF}]), "lone-surrogate: field 'tools': half of a surrogate pair"),
    ],
)
def test_bad_conversations(row: dict[str, Any], message: str) -> None:
    assert complaint(row, SHAREGPT) == message


@pytest.mark.parametrize(
    ("row", "message"),
    [
        ({"messages": "hi"}, "messages-not-a-list: field 'messages': expected a list of messages, got a string"),
        (openai(said("user"), said("assistant", None)), "null-content: field 'messages[].content' is null (message 2)"),
        (openai(said("system"), said("developer")), "two-system-messages: two system messages (messages 1 and 2)"),
        (openai(said("user"), said("developer")), "system-not-first: the system message is not the first (message 2)"),
        (
            openai(said("user"), said("assistant"), said("tool")),
            "no-answer: the last message is not the assistant's (message 3 is 'tool')",
        ),
        (
            openai(said("human")),
            "unknown-role: unknown role "
            '(message 1 has role "human", expected one of system, user, assistant, tool, function_call)',
        ),
        (
            openai(said("user", [{"type": "file", "id": 1}])),
            "bad-content-part: a part of a message is not text, an image or a video "
            '(message 1 has {"type": "file", "id": 1})',
        ),
        (
            openai(said("user", [{"type": [], "text": "hi"}])),
            "bad-content-part: a part of a message is not text, an image or a video "
            '(message 1 has {"type": [], "text": "hi"})',
        ),
        (
            openai(said("user", ["hi"])),
            'bad-content-part: a part of a message is not text, an image or a video (message 1 has "hi")',
        ),
        (
            openai(said("user", [{"type": "text", "text": HALF}])),
            "lone-surrogate: field 'messages[].content': half of a surrogate pair (message 1, character 1)",
        ),
        (openai(said("user", [])), "empty-message: an empty user message (message 1)"),
        (
            openai(said("user", {"text": "hi"})),
            "wrong-type: field 'messages[].content': expected a string, got an object (message 1)",
        ),
        (
            openai(said("user"), said("assistant", [{"type": "tool_use", "name": "f", "input": {}}])),
            "anthropic-blocks: Anthropic's content blocks are not supported "
            "(message 2 has a part of type 'tool_use'; use OpenAI's tool_calls, role tool and reasoning_content)",
        ),
        (
            openai(said("user"), said("assistant", None, tool_calls="f")),
            "bad-tool-call: tool calls are not a list (message 2: got a string)",
        ),
        (
            openai(said("user"), said("assistant", None, tool_calls=["f"])),
            'bad-tool-call: a tool call needs a name and an object of arguments (message 2: "f")',
        ),
        (
            openai(said("user"), said("assistant", None, tool_calls=[{"function": {"name": "f", "arguments": "{x"}}])),
            "bad-tool-call: the arguments of a tool call are not JSON "
            '(message 2: {"function": {"name": "f", "arguments": "{x"}})',
        ),
        (
            openai(said("user"), said("assistant", reasoning_content=5)),
            "wrong-type: field 'messages[].reasoning_content': expected a string, got a number (message 2)",
        ),
        (
            openai(said("user"), said("assistant", loss="no")),
            "bad-loss: 'loss' of a message: expected true or false, 1 or 0 (message 2 has \"no\")",
        ),
        (
            openai(said("user"), said("assistant", weight=0.5)),
            "bad-loss: 'weight' of a message: expected true or false, 1 or 0 (message 2 has 0.5)",
        ),
    ],
)
def test_bad_openai_messages(row: dict[str, Any], message: str) -> None:
    assert complaint(row, OPENAI) == message


@pytest.mark.parametrize(
    ("row", "source", "stage", "message"),
    [
        (
            {"query": "q"},
            QUERY,
            "sft",
            "missing-field: field 'response' is missing "
            "(expected one of response, answer, output, target, solution, completion; the row has 'query')",
        ),
        (
            {"response": "r"},
            QUERY,
            "sft",
            "missing-field: field 'query' is missing "
            "(expected one of query, prompt, input, instruction, question, problem; the row has 'response')",
        ),
        ({"question": None, "response": "r"}, QUERY, "sft", "null-content: field 'question' is null"),
        ({"prompt": "q", "answer": 4}, QUERY, "sft", "wrong-type: field 'answer': expected a string, got a number"),
        ({"prompt": "q", "answer": ""}, QUERY, "sft", "empty-message: an empty assistant message (field 'answer')"),
        ({"prompt": "\t", "answer": "a"}, QUERY, "sft", "empty-message: an empty user message (field 'prompt')"),
        ({"text": " \n"}, TEXT, "pt", "empty-text: the text is empty (field 'text')"),
        ({"body": "x"}, TEXT, "pt", "missing-field: field 'text' is missing (the row has 'body')"),
        ({"content": None}, TEXT, "pt", "null-content: field 'content' is null"),
        ({"text": "a\0"}, TEXT, "pt", "nul-character: field 'text': a NUL character (character 2)"),
    ],
)
def test_bad_rows_of_other_forms(row: dict[str, Any], source: RowFormat, stage: str, message: str) -> None:
    assert complaint(row, source, stage) == message


def test_long_values_are_cut() -> None:
    row = {"instruction": "a", "output": "b"}
    assert complaint({**row, "history": "h" * 1000}, ALPACA).endswith(f'(got "{"h" * 76}...)')
    assert complaint({**row, "history": HALF}, ALPACA).endswith('(got "?")'), "what cannot be printed is not"


NO_PICTURES = (
    "its rows have images or videos, but the model reads text only -> "
    'train a vision-language model, or turn the columns off in dataset_info.json: "images": null'
)


@pytest.mark.parametrize(
    ("row", "source", "stage", "problem"),
    [
        (
            {"instruction": "a", "output": "b", "images": ["1.jpg"]},
            ALPACA,
            "sft",
            NO_PICTURES,
        ),
        ({"instruction": "a", "audios": ["1.wav"]}, ALPACA, "pt", "field 'audios': training on audio is not supported"),
        (
            openai(said("user", [{"type": "image_url", "image_url": {"url": "x"}}]), said("assistant")),
            OPENAI,
            "sft",
            NO_PICTURES,
        ),
        (
            openai(said("user", [{"type": "input_audio", "input_audio": "x"}]), said("assistant")),
            OPENAI,
            "sft",
            "message 1 has a part of type 'input_audio': training on audio is not supported",
        ),
        (
            {"instruction": "a", "videos": "1.mp4"},
            ALPACA,
            "pt",
            "stage pt trains text, and field 'videos' has images or videos -> write stage: sft",
        ),
        (
            openai(said("user"), said("assistant")),
            OPENAI,
            "pt",
            "stage pt trains text, and its rows are conversations -> write stage: sft",
        ),
        (
            {"query": "q", "response": "r"},
            QUERY,
            "pt",
            "stage pt trains text, and field 'query' is the query of a conversation -> write stage: sft",
        ),
        (
            {"text": "x"},
            TEXT,
            "sft",
            "its rows are texts, which stage pt trains; stage sft trains conversations -> write stage: pt",
        ),
        (
            {"text": "x"},
            TEXT,
            "dpo",
            "its rows are texts, which stage pt trains; stage dpo trains conversations -> write stage: pt",
        ),
    ],
)
def test_what_refuses_the_data_set(row: dict[str, Any], source: RowFormat, stage: str, problem: str) -> None:
    with pytest.raises(UnsupportedRow) as caught:
        source.to_example(row, stage)
    fix = f" -> {caught.value.fix}" if caught.value.fix else ""
    assert f"{caught.value}{fix}" == problem
    assert pickle.loads(pickle.dumps(caught.value)).fix == caught.value.fix


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(st.characters(exclude_categories=()), max_size=3),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.sampled_from(["a", "name", "type", "text"]), inner),
    max_leaves=5,
)
ROLES = st.sampled_from(["system", "user", "human", "assistant", "gpt", "tool", "observation", "function_call"])
CONTENT = st.text(max_size=3) | JSON | st.just('{"name": "f"}')
KEYS = {"loss": JSON, "tool_calls": JSON, "reasoning_content": JSON}
MESSAGES = st.fixed_dictionaries({"role": ROLES | JSON, "content": CONTENT}, optional=KEYS) | st.fixed_dictionaries(
    {"from": ROLES | JSON, "value": CONTENT}, optional=KEYS
)
VALUES = st.lists(MESSAGES, max_size=4) | MESSAGES | JSON
FIELDS = (
    *("messages", "conversations", "chosen", "rejected", "rejected_messages", "prompt", "instruction", "output"),
    *("query", "response", "text", "system", "history", "tools", "image"),
)


@settings(max_examples=300, deadline=None)
@given(row=st.dictionaries(st.sampled_from(FIELDS), VALUES, max_size=5), stage=st.sampled_from(["pt", "sft", "dpo"]))
def test_no_row_gives_another_error(row: dict[str, Any], stage: str) -> None:
    form = detect(row)
    sources = [ALPACA, SHAREGPT, OPENAI, QUERY, TEXT]
    if form is not None:
        sources.append(form)
    for source in sources:
        with suppress(RowError, UnsupportedRow):
            source.to_example(row, stage)


def test_every_code_is_documented() -> None:
    """The codes that the sources write are those of the table."""
    files = Path(megatune.data.__file__).parent.rglob("*.py")
    nodes = [node for file in files for node in ast.walk(ast.parse(file.read_text(encoding="utf-8")))]
    errors = {"RowError"} | {
        node.name
        for node in nodes
        if isinstance(node, ast.ClassDef) and any(_name(b) == "RowError" for b in node.bases)
    }
    constants = {
        _name(node.targets[0]): node.value.value
        for node in nodes
        if isinstance(node, ast.Assign) and isinstance(node.value, ast.Constant)
    }
    used = set()
    for node in nodes:
        if isinstance(node, ast.Call) and _name(node.func) in errors:
            code = node.args[0]
            used.add(code.value if isinstance(code, ast.Constant) else constants.get(_name(code)))
    page = (Path(__file__).parents[2] / "docs" / "data-formats.md").read_text(encoding="utf-8")
    documented = set(re.findall(r"^\| `([a-z0-9]+-[a-z0-9-]+)` \| \w", page, re.MULTILINE))
    assert used - documented == set(), "codes without a line in the page"
    assert documented - used == {"held-out-copy"}, "lines of the page without a use"


def _name(node: ast.AST) -> str:
    return getattr(node, "id", "")


@pytest.mark.parametrize(("history", "shown"), [(5, "5"), (True, "true"), ({"a": 1}, '{"a": 1}'), ("{}", "{}")])
def test_what_ms_swift_reads_as_a_history_is_a_list(history: object, shown: str) -> None:
    told = complaint({"query": "a", "response": "b", "history": history}, SwiftFormat(swift_version=4))
    assert told == f"bad-history: field 'history': expected a list of [question, answer] pairs ({shown})"


@pytest.mark.parametrize(
    ("ids", "of_results", "in_order"),
    [
        ([["x"], {"y": 1}], [{"y": 1}, ["x"]], True),
        ([1, 2], [2, 1], True),
        ([1, 2], ["2", "1"], False),
        (["a", "a"], ["a", "a"], False),
        ([None, "a"], ["a", None], False),
    ],
)
def test_results_follow_the_order_of_their_calls_whatever_their_ids_are(
    ids: list[object], of_results: list[object], in_order: bool
) -> None:
    calls = [{"id": each, "function": {"name": f"f{number}", "arguments": "{}"}} for number, each in enumerate(ids)]
    results = [said("tool", f"of {each}", tool_call_id=each) for each in of_results]
    row = openai(said("user"), said("assistant", "", tool_calls=calls), *results, said("assistant"))
    example = SwiftFormat(swift_version=4).to_example(row, "sft")
    found = [message.content for message in example.messages if message.role == "tool"]
    assert found == [f"of {each}" for each in (ids if in_order else of_results)]
