"""ms-swift's agent templates: how tools, calls of tools and what tools return are written, by name and version."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import cache
from pathlib import Path
from typing import Any, Protocol

import yaml

from megatune.data.conversation import ToolCall
from megatune.data.templates.agent_texts import ChatText, Keywords, TextTemplate
from megatune.errors import ExitCode, Finding, MegatuneError, closest

__all__ = ["AGENT_TEMPLATES", "NOT_SUPPORTED", "AgentTemplate", "ChatText", "agent_template"]


class AgentTemplate(Protocol):
    """A way of writing tools, their calls and their results."""

    def offer(self, tools: Sequence[Mapping[str, Any]], system: str | None, question: str) -> tuple[str, str]:
        """Return the system message and the first user's message, with the tools in one of them."""
        ...

    def calls(self, calls: Sequence[ToolCall], before: str | None) -> tuple[str | None, str]:
        """Return the text of the assistant's message right before the calls (None: there is none; some templates
        change it), and the text of a run of calls."""
        ...

    def results(self, answer: str, results: Sequence[str], chat: ChatText) -> tuple[str, str]:
        """Return the answer before the results (ReAct ends it with "Observation:"), and all text from there to where
        the next answer starts.

        Where several messages of the assistant precede the results, ms-swift 3 takes all of their text for the answer,
        and ms-swift 4 the last of them.
        """
        ...

    def standalone(self, results: Sequence[str], chat: ChatText) -> str | None:
        """Return text to append to a user's message that results follow without a call; None where ms-swift refuses
        that, which version 3 always does."""
        ...


# ms-swift's names that have no texts here: languages of their own, of models that are not supported.
NOT_SUPPORTED = (
    "gemma4", "hy_v3", "hy_v3_preview", "kimi_k25", "kimi_k3", "minicpm5", "minimax_m2", "minimax_m3", "seed_oss",
)  # fmt: skip

# Version 3 has two templates under other names than version 4.
_NAMES_IN_3 = {"glm4": "chatglm4", "glm4_0414": "glm4"}


@cache
def _entries() -> dict[str, dict[str, Any]]:
    text = Path(__file__).with_suffix(".yaml").read_text(encoding="utf-8")
    entries: dict[str, dict[str, Any]] = yaml.load(text, getattr(yaml, "CSafeLoader", yaml.SafeLoader))
    return entries


def _texts(name: str, version: int) -> dict[str, Any]:
    """Return the texts of an entry, with those that it takes from the one it is like."""
    entry = dict(_entries()[name])
    like, in_3 = entry.pop("like", None), entry.pop("in_3", {})
    entry.pop("since", None)
    return (_texts(like, version) if like else {}) | entry | (in_3 if version < 4 else {})


def _names(version: int) -> dict[str, str]:
    """Return the names that a version of ms-swift has, each with the name of its entry."""
    names = {name: name for name, entry in _entries().items() if version >= entry.get("since", 3)}
    return names if version >= 4 else names | _NAMES_IN_3


def _build(name: str, version: int) -> TextTemplate:
    texts = _texts(name, version)
    if texts.get("keywords"):
        texts["keywords"] = Keywords(*texts["keywords"])
    return TextTemplate(**texts, version=version)


AGENT_TEMPLATES: dict[str, AgentTemplate] = {name: _build(name, 4) for name in _names(4)}


@cache
def agent_template(name: str, version: int) -> AgentTemplate:
    """Return an agent template of ms-swift's version 3 or 4.

    Raises:
        MegatuneError: the version has none of this name, or it is not supported.
    """
    names = _names(version)
    if name in names:
        return _build(names[name], version)
    if name in NOT_SUPPORTED:
        what = f"agent template {name} is not supported"
    else:
        what = f"ms-swift {version} has no agent template {name!r}"
    near = closest(name, names, cutoff=0)
    fix = f"take {near}, the nearest that is supported, or another of: {', '.join(sorted(names))}"
    raise MegatuneError(Finding(what, fix=fix), ExitCode.SETTINGS)
