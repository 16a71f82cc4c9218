"""A template of the user's own in a YAML file."""

from __future__ import annotations

import pickle
from pathlib import Path

import pytest
from tokenizer_kit import deepseek_tokenizer, mistral_tokenizer, plain_tokenizer, qwen_tokenizer

from megatune.data.bad_rows import RowError
from megatune.data.conversation import Conversation, Message, ToolCall
from megatune.data.templates import Thinking, load_template, template_source
from megatune.data.templates.named import NAMED_TEMPLATES, read_template
from megatune.errors import MegatuneError

EXAMPLE = Path(__file__).parents[2] / "examples" / "templates" / "chatml.yaml"
SHORT = 'user: "[INST] {content}[/INST]"\nassistant: " {content}{eos}"\nsystem: "{bos}{content}"\n'
CHAT = Conversation((Message("user", "1 + 1?"), Message("assistant", "2")))
CALL = Conversation((CHAT.messages[0], Message("assistant", "", (ToolCall("add", {"a": 1}),))))


def write(tmp_path: Path, text: str) -> str:
    path = tmp_path / "mine.yaml"
    path.write_text(text, encoding="utf-8")
    return str(path)


def test_the_example_is_chatml() -> None:
    assert read_template(str(EXAMPLE)) == NAMED_TEMPLATES["chatml"]
    template = load_template(str(EXAMPLE), qwen_tokenizer())
    assert template == load_template("chatml", qwen_tokenizer())
    assert pickle.loads(pickle.dumps(template)) == template


def test_every_named_template_without_rules_of_its_own_can_be_written(tmp_path: Path) -> None:
    text = (
        'name: qwen\nprefix: ""\ndefault_system: You are Qwen, created by Alibaba Cloud. You are a helpful assistant.\n'
        'user: "<|im_start|>user\\n{content}<|im_end|>\\n<|im_start|>assistant\\n"\n'
        'assistant: "{content}<|im_end|>\\n"\n'
        "system: |\n  <|im_start|>system\n  {content}<|im_end|>\n"
        'observation: "<|im_start|>user\\n<tool_response>\\n{content}\\n</tool_response><|im_end|>\\n'
        '<|im_start|>assistant\\n"\nobservation_separator: "\\n</tool_response>\\n<tool_response>\\n"\ntools: qwen\n'
        'special_tokens: ["<|im_start|>", "<|im_end|>"]\n'
    )
    assert read_template(write(tmp_path, text)) == NAMED_TEMPLATES["qwen"]


def test_defaults_and_the_tokenizers_own_tokens(tmp_path: Path) -> None:
    template = load_template(write(tmp_path, SHORT), mistral_tokenizer(), "Be brief.")
    assert template.name == "mine"
    (turn,) = template.render(CHAT, Thinking())
    assert [*filter(None, turn.prompt)] == ["<s>Be brief.", "[INST] 1 + 1?[/INST]"]
    assert turn.completion == (" 2</s>",)


@pytest.mark.parametrize(
    "conversation",
    [
        CALL,
        Conversation(CHAT.messages, tools=({"name": "add"},)),
        Conversation((*CALL.messages[:1], CHAT.messages[1], Message("tool", "3"), CHAT.messages[1])),
    ],
)
def test_without_tools_such_conversations_are_refused(tmp_path: Path, conversation: Conversation) -> None:
    template = load_template(write(tmp_path, SHORT), mistral_tokenizer())
    with pytest.raises(RowError, match="no text for tools") as caught:
        template.render(conversation, Thinking())
    assert caught.value.code == "no-tools-in-template"


def test_braces_that_are_text_stay(tmp_path: Path) -> None:
    path = write(tmp_path, SHORT.replace('"[INST] {content}[/INST]"', "'{\"content\": {content}}[/INST]'"))
    (turn,) = load_template(path, mistral_tokenizer()).render(CHAT, Thinking())
    assert turn.prompt[-1] == '{"content": 1 + 1?}[/INST]'


def test_thinks_is_taken(tmp_path: Path) -> None:
    path = write(tmp_path, SHORT + "thinks: true\n")
    (turn,) = load_template(path, mistral_tokenizer()).render(CHAT, Thinking(enable=None))
    assert turn.prompt[-1] == "<think>\n\n</think>\n\n"


def test_every_fault_is_told_at_once(tmp_path: Path) -> None:
    path = write(
        tmp_path,
        'usr: "{content}"\nassistant: "{content}\\n"\nsystem: "{{content}}"\n'
        'observation: "{content} {content} {contnet}"\n'
        "tools: qwen2\nthinks: maybe\nspecial_tokens: <s>\nprefix: [1]\nobservation_separator: '{content}'\n"
        "default_system: 1 {anything} goes\n",
    )
    with pytest.raises(MegatuneError) as caught:
        load_template(path, qwen_tokenizer())
    assert caught.value.exit_code == 64
    assert str(caught.value).replace(path, "mine.yaml") == (
        "mine.yaml:1: usr is not a key of a template\n    fix: did you mean user?\n"
        "mine.yaml:2: assistant: nothing ends the answer\n    why: the model would not learn to stop\n"
        "    fix: write {eos} or a special token after {content}\n"
        "mine.yaml:3: system: {{content}} is not a known placeholder\n    fix: write {content} or {bos} or {eos}\n"
        "mine.yaml:4: observation: {contnet} is not a known placeholder\n    fix: write {content} or {bos} or {eos}\n"
        "mine.yaml:5: tools: 'qwen2' is not a known tool format\n    fix: one of qwen, llama3, mistral, plain\n"
        "mine.yaml:6: thinks must be true or false\n"
        'mine.yaml:7: special_tokens must be a list of texts\n    fix: write ["<token>"]\n'
        'mine.yaml:8: prefix must be text\n    fix: write it in quotes: "..."\n'
        "mine.yaml:9: observation_separator: {content} is not a known placeholder\n    fix: write {bos} or {eos}\n"
        "mine.yaml: user is missing\n"
        '    fix: for example user: "<|im_start|>user\\n{content}<|im_end|>\\n<|im_start|>assistant\\n"'
    )


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (SHORT.replace("[INST] {content}", "[INST]"), "mine.yaml:1: user has no {content}"),
        (SHORT + 'observation: "{content}{content}"\n', "mine.yaml:4: observation has {content} more than once"),
        (
            SHORT + "colour: red\n",
            "mine.yaml:4: colour is not a key of a template\n    fix: one of name, user, assistant,",
        ),
        (SHORT + 'user: "{content}"\n', "mine.yaml:4: user is written twice, first at mine.yaml:1"),
        (SHORT + "\tprefix: x\n", "mine.yaml:4: a tab where YAML allows only spaces"),
        ("", "mine.yaml: user is missing"),
    ],
)
def test_one_fault(tmp_path: Path, text: str, message: str) -> None:
    path = write(tmp_path, text)
    with pytest.raises(MegatuneError) as caught:
        read_template(path)
    assert caught.value.exit_code == 64
    assert str(caught.value).replace(path, "mine.yaml").startswith(message)


def test_a_file_that_is_not_there() -> None:
    with pytest.raises(MegatuneError, match=r"template: there is no file no/such\.yaml") as caught:
        load_template("no/such.yaml", qwen_tokenizer())
    assert caught.value.exit_code == 66


@pytest.mark.parametrize(
    ("extra", "tokenizer", "why"),
    [
        ("", plain_tokenizer(), "the tokenizer does not have a bos_token as one token"),
        ('special_tokens: ["[INST]", "</s>"]\n', deepseek_tokenizer(), "does not have [INST], </s> as one token"),
    ],
)
def test_a_tokenizer_without_its_tokens(tmp_path: Path, extra: str, tokenizer: object, why: str) -> None:
    with pytest.raises(MegatuneError, match="does not fit this model's tokenizer") as caught:
        load_template(write(tmp_path, SHORT + extra), tokenizer)  # type: ignore[arg-type]
    assert caught.value.exit_code == 66
    assert why in str(caught.value)


def test_the_source_of_a_template_is_what_a_cache_is_keyed_by(tmp_path: Path) -> None:
    path = write(tmp_path, SHORT)
    before = template_source(path)
    write(tmp_path, SHORT.replace("[INST]", "[ASK]"))
    assert template_source(path) != before
    assert [template_source(name) for name in (None, "qwen")] == ["default", "qwen"]
