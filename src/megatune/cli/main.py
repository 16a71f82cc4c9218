"""`megatune VERB ...`: finds the verb, runs it, and turns whatever goes wrong into a report and an exit code."""

from __future__ import annotations

import argparse
import difflib
import os
import re
import sys
import tempfile
import traceback
from collections.abc import Sequence
from typing import Any, NoReturn

from megatune import __version__
from megatune.cli import (
    data,
    demo_model,
    doctor,
    explain,
    export,
    infer,
    plan,
    rehearse,
    rl,
    serve,
    shims,
    swift,
    train,
    verify,
)
from megatune.errors import ExitCode, Finding, MegatuneError, without_secrets
from megatune.launch.output import OutputLost, end_with_reader
from megatune.launch.torchrun import end_as_peers, is_first, tell

# In the order of --help. A module declares its verbs with add_parser, and each verb its function as the default `run`.
_MODULES = (train, plan, explain, data, verify, infer, serve, export, rl, rehearse, doctor, demo_model, swift, shims)

_NOT_BUILT = {
    "ppo": "PPO is not built; `megatune dpo` trains on pairs of answers, and `megatune rl` is what rewards are for",
}

# What LLaMA-Factory's verbs are here.
_LLAMAFACTORY = {
    "chat": "`megatune infer MODEL` chats with a model",
    "api": "`megatune serve MODEL` answers the OpenAI API",
    "eval": "`megatune infer MODEL --val_dataset NAME --metric acc` compares answers with those of a data set; "
    "eval_dataset and eval_strategy of a training file measure the loss during training",
    "webchat": "`megatune infer MODEL` chats on the terminal, and `megatune serve MODEL` answers clients over HTTP",
    "webui": "there is no web interface for settings; `megatune explain --all` lists them, and `megatune train "
    "FILE.yaml` runs LLaMA-Factory's files",
    "env": "`megatune doctor` shows versions and checks the machine",
    "version": "`megatune --version`",
}

_EPILOG = """\
exit codes: 0 done, 64 settings, 65 data, 66 input missing or refused, 69 a service or peer missing, 70 internal,
71 out of memory, 73 cannot write, 75 stopped and resumable, 76 a process died or hung, 77 numbers not finite"""


class _Parser(argparse.ArgumentParser):
    """argparse that reports mistakes as findings, and takes no abbreviations: a new flag would change their meaning."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **{"allow_abbrev": False, **kwargs})

    def error(self, message: str) -> NoReturn:
        raise _refusal(message, self.prog, fix=f"`{self.prog} --help` shows how it is called")


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command line and returns its exit code. Never raises what a user did wrong.

    Args:
        argv: the words after the program's name; None takes the process's own.
    """
    if argv is None:
        argv = sys.argv[1:]
        end_with_reader()  # a verb whose work must not end with it says so (`outlive_reader`)
        end_as_peers()
    try:
        code = _run(list(argv))
        sys.stdout.flush()  # here, where a lost output can still be answered
        return code
    except MegatuneError as error:
        return tell(report(error), error.exit_code, first=is_first())
    except KeyboardInterrupt:
        print("interrupted", file=sys.stderr)
        return int(ExitCode.INTERRUPTED)
    except OutputLost as lost:
        if lost.reason:
            print(f"cannot write the output: {lost.reason}", file=sys.stderr)
        return int(ExitCode.CANNOT_WRITE)
    except Exception as error:
        print(_internal(error), file=sys.stderr)
        return int(ExitCode.INTERNAL)


def report(error: MegatuneError) -> str:
    """Return all findings, a blank line between them, and their number where there are several."""
    parts = [str(finding) for finding in error.findings]
    return "\n\n".join([*parts, f"{len(parts)} problems"] if len(parts) > 1 else parts)


def _run(words: list[str]) -> int:
    parser, verbs = _build_parsers()
    if not words:
        parser.print_help(sys.stderr)
        return int(ExitCode.SETTINGS)
    if not words[0].startswith("-") and words[0] not in verbs:
        raise _unknown_verb(words[0], list(verbs))
    if all(word.startswith("-") for word in words) and not {*words} & {"-h", "--help", "--version"}:
        raise _unknown_words(words, parser)
    inner = _verbs_of(verbs[words[0]]) if words[0] in verbs else []
    if inner and len(words) > 1 and not words[1].startswith("-") and words[1] not in inner:
        raise _unknown_verb(words[1], inner, parent=words[0])
    arguments, unknown = parser.parse_known_args(words)
    if hasattr(arguments, "given"):  # a file's keys must not win over flags that repeat a default
        arguments.given = words
    if hasattr(arguments, "words"):
        # Settings, which the verb reads itself: argparse would take flags out of their order.
        arguments.words = words[words.index(arguments.verb) + 1 :]
    elif unknown:
        raise _unknown_words(unknown, verbs[arguments.verb])
    return int(arguments.run(arguments))


def _build_parsers() -> tuple[_Parser, dict[str, argparse.ArgumentParser]]:
    parser = _Parser(
        prog="megatune",
        description="Fine-tune large language models with Megatron-Core, from a Hugging Face checkpoint to a Hugging "
        "Face checkpoint.",
        epilog=_EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--version", action="version", version=f"megatune {__version__}")
    subparsers = parser.add_subparsers(title="verbs", metavar="VERB", dest="verb", required=True)
    for module in _MODULES:
        module.add_parser(subparsers)
    return parser, dict(subparsers.choices)


def _refusal(what: str, where: str = "", why: str = "", fix: str = "") -> MegatuneError:
    return MegatuneError(Finding(what, where, why, fix), ExitCode.SETTINGS)


def _unknown_verb(word: str, verbs: list[str], parent: str = "") -> MegatuneError:
    """Say what a word could be in place of a verb, or of a verb of the verb `parent`."""
    if word in _NOT_BUILT and not parent:
        return _refusal("not built yet", f"megatune {word}", _NOT_BUILT[word], "`megatune --help` lists what is built")
    before = f"megatune {parent}".rstrip()
    if word.endswith((".yaml", ".yml")):
        fix = f"{before} {verbs[0] if parent else 'train'} {word}"
        return _refusal(f"{word!r} is a settings file, not a verb", fix=fix)
    if (known := _LLAMAFACTORY.get(word)) is not None and not parent:
        return _refusal(f"{word!r} is LLaMA-Factory's verb", "megatune", fix=known)
    near = difflib.get_close_matches(word, verbs if parent else [*verbs, *_NOT_BUILT], n=1, cutoff=0.5)
    fix = f"did you mean `{before} {near[0]}`?" if near else f"one of: {', '.join(verbs)}"
    return _refusal(f"unknown verb {word!r}", before if parent else "", fix=fix)


def _verbs_of(parser: argparse.ArgumentParser) -> list[str]:
    """Return the verbs of a verb; most have none."""
    return [
        name for action in parser._actions if isinstance(action, argparse._SubParsersAction) for name in action.choices
    ]


def _unknown_words(unknown: list[str], parser: argparse.ArgumentParser) -> MegatuneError:
    flags = sorted(set(re.findall(r"--[a-z][\w-]*", parser.format_help())))
    findings = []
    for word in [word for word in unknown if word.startswith("-")] or unknown:  # not the values of unknown flags
        near = difflib.get_close_matches(word.partition("=")[0], flags, n=1)
        fix = f"did you mean {near[0]}?" if near else f"`{parser.prog} --help` lists what it takes"
        findings.append(Finding(f"{word!r} is not known here", parser.prog, fix=fix))
    return MegatuneError(findings, ExitCode.SETTINGS)


def _internal(error: Exception) -> str:
    """Return what is said of an error that should not occur: one line, and where the rest is."""
    text = without_secrets(traceback.format_exc())
    if os.environ.get("MEGATUNE_DEBUG", "0") not in ("", "0"):
        return text.rstrip()
    line = without_secrets(" ".join(f"{type(error).__name__}: {error}".split()))
    try:
        with tempfile.NamedTemporaryFile("wb", prefix="megatune-", suffix=".txt", delete=False) as file:
            file.write(text.encode())
    except OSError:
        return f"internal error: {line} (MEGATUNE_DEBUG=1 shows the traceback)"
    return f"internal error: {line}\n    traceback in {file.name}; MEGATUNE_DEBUG=1 shows it here"
