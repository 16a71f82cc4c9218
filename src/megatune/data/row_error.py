"""Why a row of a file is no sample."""

from __future__ import annotations

# Every code that a RowError has, with what it means; reports print this table.
CODES: dict[str, str] = {
    # The row cannot be read.
    "invalid-json": "the line, or the row, is not JSON",
    "not-an-object": "the row is JSON, but not an object with fields",
    "not-utf8": "the row has bytes that are not UTF-8",
    "nul-bytes": "the row has NUL bytes, as files have that were not written to their end",
    "wrong-field-count": "a CSV row has more or fewer fields than the header",
    "duplicate-key": "an object has one key twice",
    # The row is not of the form of its data set.
    "missing-field": "a field that the form needs is not there",
    "null-content": "a text is null",
    "wrong-type": "a field is not of the type that the form needs: a number where a string is expected",
    "empty-text": "the text of a row of stage pt is empty or blank",
    "nul-character": "a text has a NUL character",
    "lone-surrogate": "a text has half of a surrogate pair, which cannot be encoded",
    "bad-history": "the history is not a list of [question, answer] pairs",
    # Messages.
    "messages-not-a-list": "the messages are not a list: a string, for example",
    "no-messages": "the list of messages is empty, or has a system message only",
    "message-not-an-object": "a message is not an object",
    "unknown-role": "a message has a role that the form does not know",
    "two-system-messages": "there is more than one system message",
    "system-not-first": "the system message is not the first message",
    "roles-out-of-order": "messages do not take turns: user, assistant, user or tool, assistant",
    "no-answer": "the last message is not the assistant's",
    "empty-message": "a user's or the assistant's message is empty or blank",
    "bad-content-part": "a part of a message's content is not text",
    "anthropic-blocks": "a message has Anthropic's content blocks for tools or thinking",
    "bad-loss": "loss or weight of a message is neither true nor false, neither 1 nor 0",
    # Tools.
    "bad-tool-call": "a tool call is malformed: not JSON, no name, or arguments that are not an object",
    "bad-tools": "the tools on offer are not a list of schemas, or not JSON of one",
    # Preference pairs.
    "prompt-ends-with-answer": "the prompt of a pair ends with the assistant's message",
    "answer-not-assistant": "chosen or rejected is not the assistant's message",
    "answer-without-prompt": "chosen or rejected is a system message and an answer, and no question",
    "different-prompts": "chosen and rejected answer different prompts",
    "same-answers": "chosen and rejected are the same",
    # The template cannot write the conversation.
    "no-question": "no message of the user's takes up the system message and tools, which the template writes into one",
    "turns-do-not-alternate": "the template writes an answer after one message of the user, or after tools, only",
    "no-tools-in-template": "the template has no text for tools",
    "refused-by-template": "the chat template raises an error for the conversation",
    "not-marked": "the chat template marks some answers and not others",
    "answer-not-found": "the chat template writes an answer otherwise than it asks for it",
    "text-left-out": "the chat template leaves out, or changes, what someone says",
    "calls-left-out": "the chat template leaves out calls of tools",
    "thought-left-out": "the chat template leaves out the reasoning of the last answer",
    # Tokens.
    "too-long": "the row is longer than cutoff_len, and truncation says to drop such rows",
    "nothing-to-train": "no token of the row is trained",
    "nothing-left": "no trained token is left after cutting to cutoff_len",
}


class RowError(Exception):
    """A row that cannot be trained on.

    Args:
        code: the kind of problem, one of `CODES`, for programs: "missing-field".
        reason: what is wrong, in words that are the same for all such rows (they are counted by it).
        detail: what is special about this row.
    """

    def __init__(self, code: str, reason: str, detail: str = "") -> None:
        super().__init__(code, reason, detail)
        self.code = code
        self.reason = reason
        self.detail = detail

    def __str__(self) -> str:
        return f"{self.reason} ({self.detail})" if self.detail else self.reason


class UnsupportedRow(Exception):  # noqa: N818 - not an error of the row
    """A row that asks for what is not built, or not of this stage; dropping it would hide that.

    Its data set is refused.

    Args:
        what: what it asks for.
        fix: what to do about it, "" where there is nothing to say.
    """

    def __init__(self, what: str, fix: str = "") -> None:
        super().__init__(what, fix)
        self.what = what
        self.fix = fix

    def __str__(self) -> str:
        return self.what
