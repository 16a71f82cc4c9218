"""What ends an answer: a model learns to stop only where its answers end with one token that says so."""

from __future__ import annotations

from typing import TYPE_CHECKING

from megatune.data.templates.borders import PROBE, needs_whole_text, prompt_and_whole, prompts_stay, shown
from megatune.data.templates.turns import Template, Thinking
from megatune.errors import ExitCode, Finding, MegatuneError

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


def check_tokens(template: Template, tokenizer: PreTrainedTokenizerBase, fix: str) -> None:
    """Refuse a template whose answers do not end with one special token, or whose prompts and answers share tokens.

    Args:
        fix: what to change where nothing ends an answer.

    Raises:
        MegatuneError: exit code 66, with the ids and the text of the tokens.
    """
    end = _end(template, tokenizer)
    if not end or not _is_special(end[-1], tokenizer):
        last = shown(end[-4:], tokenizer) if end else "nothing"
        what = f"template: {template.name} does not teach the model to stop"
        why = f"the last tokens of an answer are {last}; none is a special token that ends it"
        raise MegatuneError(Finding(what, tokenizer.name_or_path, why, fix), ExitCode.INPUT)
    if needs_whole_text(template, tokenizer) and not prompts_stay(template, tokenizer):
        what = f"template: {template.name} cannot be used with this model's tokenizer"
        prompt, whole = prompt_and_whole(PROBE, template, tokenizer)
        why = (
            "a prompt becomes other tokens when an answer follows: "
            f"{shown(prompt[-4:], tokenizer)}, not {shown(whole[: len(prompt)][-4:], tokenizer)}"
        )
        fix = "use a template whose prompts end with a special token, such as a YAML file of your own"
        raise MegatuneError(Finding(what, tokenizer.name_or_path, why, fix), ExitCode.INPUT)


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
