"""What ends an answer: a model learns to stop only where its answers end with one token that says so."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING

from megatune.data.conversation import Conversation, Message
from megatune.data.templates.turns import Template, Thinking
from megatune.errors import ExitCode, Finding, MegatuneError

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

PROBE = Conversation((Message("user", "Hello"), Message("assistant", "Hi")))
# A prompt that opens a thought and an answer that has none meet in the middle of an empty line, which is one token.
_THINKING_PROBE = Conversation((PROBE.messages[0], Message("assistant", "<think>\nGreet.\n</think>\n\nHi")))


def check_tokens(template: Template, tokenizer: PreTrainedTokenizerBase, mend: str) -> None:
    """Refuse a template whose answers do not end with one special token, or whose pieces are other tokens as a whole.

    Args:
        mend: what to change where nothing ends an answer.

    Raises:
        MegatuneError: exit code 66, with the ids and the text of the tokens.
    """
    end = _end(template, tokenizer)
    if not end or not _is_special(end[-1], tokenizer):
        shown = _shown(end[-4:], tokenizer) if end else "nothing"
        what = f"template: {template.name} does not teach the model to stop"
        why = f"the last tokens of an answer are {shown}; none is a special token that ends it"
        raise MegatuneError(Finding(what, tokenizer.name_or_path, why, mend), ExitCode.INPUT)
    probes = [_apart_and_whole(probe, template, tokenizer) for probe in (PROBE, _THINKING_PROBE)]
    if not any(apart == whole for apart, whole in probes):
        apart, whole = probes[0]
        what = f"template: {template.name} cannot be used with this model's tokenizer"
        why = (
            "a prompt and its answer become other tokens than their text as a whole: "
            f"{_shown(apart[-6:], tokenizer)}, not {_shown(whole[-6:], tokenizer)}"
        )
        mend = "use a template whose prompts end with a special token, such as a YAML file of your own"
        raise MegatuneError(Finding(what, tokenizer.name_or_path, why, mend), ExitCode.INPUT)


def _apart_and_whole(
    probe: Conversation, template: Template, tokenizer: PreTrainedTokenizerBase
) -> tuple[list[int], list[int]]:
    """Tokens of a conversation's pieces one by one, and of its text."""
    pieces = [piece for turn in template.render(probe, Thinking()) for piece in (*turn.prompt, *turn.answer) if piece]
    apart = [token for piece in pieces for token in tokenizer.encode(piece, add_special_tokens=False)]
    return apart, tokenizer.encode("".join(pieces), add_special_tokens=False)


def stop_note(template: Template, tokenizer: PreTrainedTokenizerBase) -> str:
    """For the report: that answers end with another token than the tokenizer's eos_token; "" where they end with it.

    A model that is trained so stops there only where its generation_config.json names the token.
    """
    end = _end(template, tokenizer)[-1]
    if end == tokenizer.eos_token_id:
        return ""
    answers_end = f"answers end with {tokenizer.convert_ids_to_tokens(end)} (id {end})"
    if tokenizer.eos_token_id is None:
        return f"{answers_end}; the tokenizer has no eos_token"
    return f"{answers_end}; the tokenizer's eos_token is {tokenizer.eos_token} (id {tokenizer.eos_token_id})"


def _end(template: Template, tokenizer: PreTrainedTokenizerBase) -> list[int]:
    """Tokens of the last piece of an answer, less white space after it."""
    turns = template.render(PROBE, Thinking())
    tokens: list[int] = tokenizer.encode(turns[-1].answer[-1], add_special_tokens=False)
    while tokens and not _is_special(tokens[-1], tokenizer) and not tokenizer.decode(tokens[-1:]).strip():
        tokens.pop()
    return tokens


def _is_special(token: int, tokenizer: PreTrainedTokenizerBase) -> bool:
    return token == tokenizer.eos_token_id or token in tokenizer.added_tokens_decoder


def _shown(tokens: Iterable[int], tokenizer: PreTrainedTokenizerBase) -> str:
    return " ".join(f"{token} {tokenizer.decode([token])!r}" for token in tokens)
