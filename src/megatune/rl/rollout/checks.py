"""Checks at the start of an engine: its version, its arguments, and the context of its model."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from importlib.metadata import PackageNotFoundError, version
from typing import Any

from megatune.config.rl.settings import InferRole
from megatune.errors import ExitCode, Finding, MegatuneError, did_you_mean
from megatune.families.rope import context_length

INSTRUCTION_TOKENS = 512  # of a judge's prompt, without question and response


def check_version(engine: str, packages: Sequence[str], tested: str, role: InferRole) -> None:
    """Refuse another version of an engine than the tested one.

    Args:
        packages: names of packages that provide the engine.
        tested: prefix of the version, such as "0.32".

    Raises:
        MegatuneError: UNAVAILABLE.
    """
    fix = f"pip install '{packages[0]}~={tested}.0' into the environment that py_executable of {role.name} names"
    found = next((each for name in packages if (each := _version_of(name)) is not None), None)
    if found is None:
        what, why = f"{engine} is not installed", f"this environment has no package {' or '.join(packages)}"
        raise MegatuneError(Finding(what, role.name, why, fix), ExitCode.UNAVAILABLE)
    if found != tested and not found.startswith(f"{tested}."):
        what = f"{engine} {found} is installed"
        why = f"weights are updated in the form of {tested}, and another version may load them wrongly without an error"
        raise MegatuneError(Finding(what, role.name, why, fix), ExitCode.UNAVAILABLE)


def _version_of(package: str) -> str | None:
    try:
        return version(package)
    except PackageNotFoundError:
        return None


def check_arguments(engine: str, given: Mapping[str, object], known: Collection[str], role: InferRole) -> None:
    """Refuse arguments that an engine does not have.

    Raises:
        MegatuneError: SETTINGS, with a finding for each.
    """
    findings = []
    for key in given:
        if key not in known:
            fix = did_you_mean(key, known, "leave it out")
            where = f"{role.name}.strategy_args.strategy_config"
            findings.append(Finding(f"{engine} has no argument {key}", where, "", fix))
    if findings:
        raise MegatuneError(findings, ExitCode.SETTINGS)


def check_context(config: Mapping[str, Any], context: int, role: InferRole) -> None:
    """Refuse sequences that are longer than a model's context.

    Args:
        config: the content of config.json.
        context: maximum number of tokens of a prompt and its response.

    Raises:
        MegatuneError: INPUT.
    """
    limit = longest = context_length(config)
    if limit is None or context <= limit:
        return
    what, more = f"prompts and responses of {context} tokens do not fit the model", ""
    if role.name != "actor_infer":  # a judge also reads its instructions, and writes an answer
        what += f" of {role.name}"
        more = f", a smaller max_new_tokens of {role.name}, or a model with a longer context"
        limit -= INSTRUCTION_TOKENS + role.generating_args.max_tokens
    fix = f"prompt_length and response_length of {limit} together at most{more}" if limit > 0 else more[2:]
    why = f"its context is {longest} tokens"
    raise MegatuneError(Finding(what, role.model_name_or_path, why, fix), ExitCode.INPUT)
