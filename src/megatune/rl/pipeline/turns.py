"""What an environment says, as tokens between two turns of the model."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import lru_cache
from typing import TYPE_CHECKING

import numpy as np

from megatune.config.rl.settings import RLSettings
from megatune.data.bad_rows import RowError
from megatune.errors import ExitCode, Finding, MegatuneError
from megatune.rl.prompts import prompt_writer
from megatune.rl.samples import Problem, Response

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

_QUESTION, _TURN, _OBSERVATION = "a question", "a turn of the model", "an observation"

# (problem, its response so far, what was observed) -> the response with the observation, which goes on
Extend = Callable[[Problem, Response, str], Response]


def turn_writer(settings: RLSettings, tokenizer: PreTrainedTokenizerBase) -> Extend:
    """Return what writes observations: as messages of the user's in the prompt's template; as they are after a prompt
    that is text, or whose template takes one question.

    The template is asked once for what stands between a turn and the next: it writes a conversation of known texts.
    The writer raises MegatuneError (INPUT), where the template writes none of several turns.
    """
    rollout, data = settings.rollout, settings.data
    default = rollout.global_template or data.template

    @lru_cache
    def around(tag: str) -> tuple[str, str]:
        """Return what stands before an observation, after the turn's text, and what stands behind it."""
        write = prompt_writer((rollout.tag_to_template or {}).get(tag, default), tokenizer)
        said = [(_QUESTION, "user"), (_TURN, "assistant"), (_OBSERVATION, "user")]
        try:
            text = write([{"role": role, "content": content} for content, role in said])
        except RowError as error:
            if error.code == "not-one-question":
                return "", ""
            raise _writes_no_turns(str(error)) from error
        before, found, after = text.partition(_TURN)[2].partition(_OBSERVATION)
        if not found:
            raise _writes_no_turns("it leaves messages out")
        return before, after

    def extend(problem: Problem, response: Response, observation: str) -> Response:
        is_text = [each["content"] for each in problem.messages] in ([], [problem.prompt])
        before, after = ("", "") if is_text else around(problem.tag)
        ended = str(tokenizer.decode([int(response.response_ids[-1])]))
        # The token that has ended the turn is what the template ends it with.
        text = before.removeprefix(ended) + observation + after
        ids = np.array(tokenizer(text, add_special_tokens=False)["input_ids"], np.int64)
        begun = len(response.response_ids)
        return replace(
            response,
            response_ids=np.concatenate([response.response_ids, ids]),
            log_probs=np.concatenate([response.log_probs, np.zeros(len(ids), np.float32)]),
            finish="abort",
            routing=None,
            observed=(*response.observed, (begun, begun + len(ids))),
        )

    return extend


def _writes_no_turns(why: str) -> MegatuneError:
    what = "the prompt's template does not write a conversation of several turns"
    return MegatuneError(Finding(what, "environment", why, "write template: NAME of one that does"), ExitCode.INPUT)
