"""llm_judge: another model judges an answer. docs/rl-rewards.md lists the errors of ROLL's judge that are corrected
here."""

from __future__ import annotations

import asyncio
import os
import re
import threading
from collections.abc import Awaitable, Callable
from concurrent.futures import Future
from functools import partial
from typing import Any

from megatune.config.rl.rollout import Generating
from megatune.data.text_scores import END_OF_THINK
from megatune.errors import ExitCode, Finding, MegatuneError
from megatune.rl.rewards.answer import Answer, RewardError, Verdict, post_json

# Sends messages in OpenAI's format to the judge, and returns its reply.
Ask = Callable[[list[dict[str, str]]], Awaitable[str]]

PLACES = ("{question}", "{response}", "{reference}")
API_SECONDS = 120.0

YES_OR_NO = """\
You compare the final answer of a solution, which may be incomplete, with a reference answer. The reference is the
letter of a choice, a number, an expression, or a list of answers where several questions are asked; it may be in
another language, which makes no difference.

Say YES if the final answer matches the reference exactly. Say NO if it does not, and where the solution is unclear,
incomplete or ambiguous. Say nothing but YES or NO.

Question:
{question}

Solution (its last step):
{response}

Reference answer:
{reference}

Output:
"""

NUMBER = """\
Judge how well a response answers a question: is it correct, complete, clear and to the point?

Question: {question}

Response: {response}

Reference: {reference}

Give one number from 0 to 10, in this form: Score: 7
"""

PROMPTS = {"Qwen2.5-7B-Instruct-RLVR-prompt": YES_OR_NO}

_SCORE = re.compile(r"score\s*:\s*\**\s*(\d+(?:\.\d+)?)", re.IGNORECASE)
_YES_OR_NO = re.compile(r"\b(yes|no)\b", re.IGNORECASE)


class Judge:
    """Args:
    judge_prompt: name of a prompt of ROLL, or a text with {question}, {response} and optionally {reference}; by default
        the judge gives a number. If the prompt contains "Score:", the reply is a number from 0 to 10, else YES or NO.
    judge_model_type: "api", or "inference" or "cluster" for a model of this run, which `ask` calls.
    judge_api_url: of an OpenAI-compatible API, up to /v1.
    judge_api_key: default: the variable OPENAI_API_KEY.
    generating: temperature, top_p, max_new_tokens of the judgement, for an API.
    """

    def __init__(
        self,
        judge_prompt: str | None = None,
        judge_model_type: str = "api",
        judge_model_name: str | None = None,
        judge_api_url: str | None = None,
        judge_api_key: str | None = None,
        generating: Generating | None = None,
        ask: Ask | None = None,
    ) -> None:
        self._prompt = _prompt(judge_prompt)
        if judge_model_type == "api":
            if not judge_api_url or not judge_model_name:
                what = "judge_model_type: api needs judge_api_url and judge_model_name"
                raise MegatuneError(Finding(what), ExitCode.SETTINGS)
            key = judge_api_key or os.environ.get("OPENAI_API_KEY", "")
            ask = _Api(judge_api_url, judge_model_name, key, generating)
        elif judge_model_type not in ("inference", "cluster"):
            finding = Finding(f"judge_model_type: {judge_model_type!r}", fix="one of api, inference, cluster")
            raise MegatuneError(finding, ExitCode.SETTINGS)
        assert ask is not None, "the pool passes it"
        self._ask = ask

    async def __call__(self, answer: Answer) -> Verdict:
        asked = [message["content"] for message in answer.messages if message["role"] == "user"]
        response = answer.text.rpartition(END_OF_THINK)[2].strip()
        reference = str(answer.row.get("ground_truth") or "")
        values = dict(zip(PLACES, (asked[-1] if asked else answer.prompt, response, reference), strict=True))
        text = re.sub("|".join(map(re.escape, PLACES)), lambda place: values[place.group()], self._prompt)
        said = await self._ask([{"role": "user", "content": text}])
        score = read_judgement(said, "Score:" in self._prompt)
        return Verdict(score, score, {"judgement": said})


def read_judgement(said: str, is_number: bool) -> float:
    """Return the score from 0 to 1: of a number from 0 to 10, or of YES or NO; the last one counts.

    Raises:
        RewardError: the judgement has none.
    """
    found = (_SCORE if is_number else _YES_OR_NO).findall(said.rpartition(END_OF_THINK)[2])
    if not found or (is_number and float(found[-1]) > 10):
        expected = "'Score: 0' to 'Score: 10'" if is_number else "YES or NO"
        raise RewardError(f"expected {expected} of the judge, which answered {said[:200]!r}")
    return float(found[-1]) / 10 if is_number else float(found[-1].lower() == "yes")


def _prompt(given: str | None) -> str:
    if given is None:
        return NUMBER
    if given in PROMPTS:
        return PROMPTS[given]
    if "{question}" in given and "{response}" in given:
        return given
    fix = f"one of {', '.join(PROMPTS)}, or a text with {{question}} and {{response}}"
    raise MegatuneError(Finding(f"judge_prompt: {given[:60]!r} is unknown", fix=fix), ExitCode.SETTINGS)


class _Api:
    """Client of an OpenAI-compatible API."""

    def __init__(self, url: str, model: str, key: str, generating: Generating | None) -> None:
        self._url = url if url.endswith("/chat/completions") else f"{url.rstrip('/')}/chat/completions"
        self._model, self._headers = model, {"Authorization": f"Bearer {key}"} if key else {}
        names = {"temperature": "temperature", "top_p": "top_p", "max_new_tokens": "max_tokens"}
        values = {theirs: getattr(generating, ours, None) for ours, theirs in names.items()}
        self._options = {name: value for name, value in values.items() if value is not None}

    async def __call__(self, messages: list[dict[str, str]]) -> str:
        message = {"model": self._model, "messages": messages, **self._options}
        reply = await _in_thread(partial(post_json, self._url, message, API_SECONDS, self._headers))
        try:
            said = reply["choices"][0]["message"]["content"]
        except (KeyError, IndexError, TypeError) as error:
            raise RewardError(f"{self._url} returned no judgement: {str(reply)[:200]}") from error
        if not said:
            raise RewardError(f"{self._url} returned an empty judgement")
        return str(said)


async def _in_thread(work: Callable[[], Any]) -> Any:
    """Run a function in a daemon thread, which does not delay the end of the process, and wait for it."""
    found = Future[Any]()

    def run() -> None:
        try:
            found.set_result(work())
        except BaseException as error:  # as a result, since an exception might never be retrieved
            found.set_result(error)

    threading.Thread(target=run, daemon=True).start()
    if isinstance(result := await asyncio.shield(asyncio.wrap_future(found)), BaseException):
        raise result
    return result
