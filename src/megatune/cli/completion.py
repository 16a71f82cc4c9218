"""`megatune completion`: prints scripts that complete verbs, flags, settings and their values in a shell.

A script contains everything, so completion does not start Python. Flags are read from the --help page of each verb.
"""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from importlib import import_module
from pathlib import Path

from megatune.cli.command import Command
from megatune.cli.pages import QUIET, RUNS, VERBS, Help
from megatune.config.options import NoOptions
from megatune.errors import ExitCode, Finding

_FLAG = re.compile(r"^  (--[a-z][\w-]*)(?: ([\w.-]+(?:\|[\w.-]+)+)(?=\s|$))?", re.MULTILINE)
_BELOW = {"data": ("preview", "stats"), "megatron": ("sft", "pt", "rlhf", "export"),
          "swift": ("export", "infer", "deploy", "merge-lora")}  # fmt: skip
_EPILOG = """    megatune completion bash > ~/.local/share/bash-completion/completions/megatune
    megatune completion zsh > ~/.megatune-completion.zsh     # and in ~/.zshrc: source ~/.megatune-completion.zsh
    megatune completion fish > ~/.config/fish/completions/megatune.fish

Settings are completed as key= and as --key, values from their choices, and everything else as files."""

COMMAND = Command(
    name="completion",
    usage="bash|zsh|fish",
    about="Prints a script that completes verbs, flags, settings and their values in a shell.",
    epilog=_EPILOG,
    options=NoOptions,
    most_words=1,
)


def run(verb: str, words: Sequence[str]) -> int:
    """Print the script.

    Raises:
        MegatuneError: SETTINGS for other shells.
    """
    given = COMMAND.read(words)
    shell = next(iter(given.words), "")
    scripts = {"bash": _bash, "zsh": _zsh, "fish": _fish}
    wrong = [] if shell in scripts else [Finding("which shell?", COMMAND.program, fix="bash, zsh or fish")]
    given.stop(wrong)
    print(scripts[shell](_verbs()), end="")
    return ExitCode.DONE


@dataclass(frozen=True, slots=True)
class _Verb:
    """A verb with its flags and their choices, its subverbs, and whether it takes settings."""

    name: str
    about: str
    flags: dict[str, list[str]] = field(default_factory=dict)
    below: tuple[str, ...] = ()
    takes_settings: bool = False


def _verbs() -> list[_Verb]:
    found = []
    for name, (module, about) in VERBS.items():
        below = _BELOW.get(name, ())
        pages = [_page(name, module, words) for words in ([], *([each] for each in below))]
        flags = {flag: choices.split("|") if choices else [] for page in pages for flag, choices in _FLAG.findall(page)}
        flags |= {QUIET: []} if name in RUNS.split() else {}
        settings = any(re.search(r"^usage:.*(key=value|SETTING)", page, re.MULTILINE) for page in pages)
        # RL files have other keys.
        found.append(_Verb(name, about, {**flags, "--help": []}, below, settings and name != "rl"))
    return found


def _page(name: str, module: str, words: Sequence[str]) -> str:
    """Return a --help page."""
    try:
        import_module(f"megatune.cli.{module}").run(name, [*words, "--help"])
    except Help as page:
        return str(page)
    raise AssertionError(f"`megatune {name} --help` shows no page")


def _settings() -> Iterator[tuple[str, list[str]]]:
    """Yield the settings of training with their choices."""
    from megatune.config.settings import all_settings

    for info in all_settings().values():
        yield info.name, ["true", "false"] if info.kinds == {bool} else [str(each) for each in info.choices or ()]


def _bash(verbs: Sequence[_Verb]) -> str:
    keys = " ".join(name for name, _ in _settings())
    own = [f"        {verb.name}) flags={shlex.quote(' '.join(verb.flags))} below={shlex.quote(' '.join(verb.below))}"
           f"{' settings=$_megatune_settings' if verb.takes_settings else ''} ;;" for verb in verbs]  # fmt: skip
    choices = [f"        {verb.name}:{flag[2:].replace('-', '_')}) words={shlex.quote(' '.join(values))} ;;"
               for verb in verbs for flag, values in verb.flags.items() if values]  # fmt: skip
    values = [f"            {key}) words={shlex.quote(' '.join(each))} ;;" for key, each in _settings() if each]
    script = Path(__file__).with_suffix(".bash").read_text(encoding="utf-8")
    parts = {
        "@VERBS@": " ".join(verb.name for verb in verbs),
        "@FLAGS@": "\n".join(own),
        "@CHOICES@": "\n".join(choices),
        "@VALUES@": "\n".join(values),
        "@SETTINGS@": shlex.quote(keys),
    }
    for place, part in parts.items():
        script = script.replace(place, part)
    return script


def _zsh(verbs: Sequence[_Verb]) -> str:
    # Without compopt, omit all spaces: one after key= would be worse than none after a verb.
    script = _bash(verbs).replace("complete -F", "complete -o nospace -F")
    return "autoload -Uz compinit bashcompinit && compinit && bashcompinit\n" + script


def _fish(verbs: Sequence[_Verb]) -> str:
    lines = ["# Completions of megatune for fish, by `megatune completion fish`."]
    for verb in verbs:
        lines.append(f"complete -c megatune -n __fish_use_subcommand -f -a {verb.name} -d {shlex.quote(verb.about)}")
        seen = f"complete -c megatune -n '__fish_seen_subcommand_from {verb.name}'"
        lines += [f"{seen} -f -a {shlex.quote(' '.join(verb.below))}"] if verb.below else []
        lines += [f"{seen} -l {flag[2:]}" + (f" -x -a {shlex.quote(' '.join(values))}" if values else "")
                  for flag, values in verb.flags.items()]  # fmt: skip
    takers = " ".join(verb.name for verb in verbs if verb.takes_settings)
    seen = f"complete -c megatune -n '__fish_seen_subcommand_from {takers}'"
    for key, values in _settings():
        lines.append(f"{seen} -l {key}" + (f" -x -a {shlex.quote(' '.join(values))}" if values else ""))
        lines.append(f"{seen} -a {shlex.quote(' '.join(f'{key}={value}' for value in values) or f'{key}=')}")
    return "\n".join(lines) + "\n"
