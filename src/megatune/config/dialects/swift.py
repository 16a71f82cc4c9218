"""Megatron-SWIFT's command lines, of versions 3 and 4, as settings: `megatron sft | pt | rlhf` there."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache
from typing import Any

from megatune.config.dialects import swift_meaning, swift_run_meaning
from megatune.config.dialects.dialect import Dialect, Refused
from megatune.config.dialects.llamafactory_refused import NOT_BUILT
from megatune.config.dialects.swift_command import MEANT, Command, by_current_name
from megatune.config.dialects.swift_defaults import DEFAULTS, VERSION_3
from megatune.config.dialects.swift_ignored import IGNORED
from megatune.config.dialects.swift_keys import KEYS, SAME
from megatune.config.dialects.swift_refused import REFUSED
from megatune.config.dialects.swift_syntax import read_command_line
from megatune.config.entry import SettingEntry
from megatune.config.load import Loaded, load_entries
from megatune.config.settings import all_settings, setting_paths
from megatune.config.values import shown
from megatune.errors import Finding

# Booleans that are true by themselves: `--no_X` turns them off.
NEGATABLE = (
    "masked_softmax_fusion", "bias_dropout_fusion", "bias_activation_fusion", "gradient_accumulation_fusion",
    "cross_entropy_loss_fusion", "calculate_per_token_loss", "manual_gc_eval", "train_dataloader_shuffle",
    "dataset_shuffle", "dataloader_pin_memory", "padding_free", "finetune", "use_distributed_optimizer",
    "overlap_p2p_comm", "align_param_gather", "align_grad_reduce", "attention_softmax_in_fp32", "moe_grouped_gemm",
    "save_safetensors", "check_model", "add_version", "freeze_vit", "freeze_aligner", "add_non_thinking_prefix",
    "remove_unused_columns", "muon_split_qkv",
)  # fmt: skip


_COUNT = re.compile("[0-9]{1,9}")


def _keys(newest_first: bool) -> dict[str, Any]:
    """Return the keys of settings, those of one version before those of the other."""
    keys = {**{name: setting_paths()[name] for name in SAME if name in setting_paths()}, **KEYS}
    keys = {
        name: meaning for name, meaning in keys.items() if not isinstance(meaning, str) or meaning in all_settings()
    }
    ordered = sorted(keys, key=lambda name: (name in VERSION_3) is newest_first)
    return {name: keys[name] for name in ordered}


def _of_our_names() -> dict[str, Refused]:
    """Return what values are refused of settings that a command line may name as a file does."""
    return {name: refused for name, refused in NOT_BUILT.items() if refused.values and name in setting_paths()}


@cache
def dialect_of(generation: int) -> Dialect:
    """Return the dialect; its messages name flags as version 3 or 4 does."""
    return Dialect(
        name=f"Megatron-SWIFT {generation}",
        keys=_keys(generation == 4),
        not_built={**_of_our_names(), **REFUSED},
        prefix="--",
        separator=" ",
    )


@cache
def kinds() -> dict[str, type]:
    """Return every flag that is known, and our own names, with the type of its value."""
    found: dict[str, type] = {name: _kind_of_setting(path) for name, path in setting_paths().items()}
    for name, refused in REFUSED.items():
        found[name] = type(refused.off[0]) if refused.off else str
    found |= {name: kind for name, (kind, _) in IGNORED.items()}
    for name in dialect_of(4).keys:
        meaning = dialect_of(4).meaning_of(name)
        assert meaning is not None
        found[name] = bool if name == "strict" else _kind_of_setting(meaning.paths[0])
    return {**found, **MEANT, "main_grads_dtype": str, "loss_scale": str, "torch_dtype": str}


def _kind_of_setting(path: str) -> type:
    of_setting = all_settings()[path].kinds
    return next((kind for kind in (list, dict, float, int, str) if kind in of_setting), bool)


@dataclass(frozen=True, slots=True)
class SwiftRun:
    """What a command line asks for.

    Attributes:
        command: what was made of its flags.
        typed: its flags, in their order.
    """

    loaded: Loaded
    command: Command
    typed: tuple[SettingEntry, ...]


def read_swift(
    verb: str,
    words: Sequence[str],
    *,
    env: Mapping[str, str],
    config: Mapping[str, Any] | None = None,
    on_cpu: bool = False,
) -> SwiftRun:
    """Read a command line of Megatron-SWIFT.

    Args:
        verb: sft, pt or rlhf.
        words: behind the verb.
        config: the model's config.json, which decides what no flag says.
        env: NPROC_PER_NODE and its like, and bounds of pictures. It wins over ENV of the file of flags.

    Raises:
        MegatuneError: the file of flags is missing or unreadable (exit 66). Everything else is a finding of `loaded`.
    """
    line = read_command_line(words, kinds(), NEGATABLE)
    typed = tuple(line.flags.values())
    generation = 3 if any(entry.key in VERSION_3 for entry in typed) else 4
    flags = {by_current_name(entry.key): entry for entry in typed}
    env = {**line.variables, **env}
    command = Command(verb, generation, flags, config or {}, env, on_cpu)
    command.findings, command.variables = list(line.findings), dict(line.variables)
    for key, value in DEFAULTS[generation].items():
        command.default(key, value)
    _set_processes(command)
    _check_kinds(command)
    for meaning in (*swift_meaning.MEANINGS, *swift_run_meaning.MEANINGS):
        meaning(command)
    if verb != "rlhf":
        command.default("stage", command.verb)
    for name, entry in list(command.flags.items()):
        if entry.key in REFUSED:
            continue
        if entry.key in IGNORED:
            command.ignore(name, IGNORED[entry.key][1])
        elif entry.key in MEANT and dialect_of(generation).meaning_of(entry.key) is None:
            command.flags.pop(name)
    places = (command.defaults.values(), command.flags.values())
    loaded = load_entries(places, dialect_of(generation), command.findings)
    return SwiftRun(loaded, command, typed)


def _set_processes(command: Command) -> None:
    """One process on each machine, or NPROC_PER_NODE; a launcher that started this process knows better."""
    env = command.env
    machines, each = env.get("NNODES") or "1", env.get("NPROC_PER_NODE") or "1"
    # Clusters set RANK and WORLD_SIZE for whole machines; only a launcher sets LOCAL_RANK.
    is_launched = all(env.get(name) for name in ("RANK", "LOCAL_RANK", "WORLD_SIZE"))
    if is_launched or not (_COUNT.fullmatch(machines) and _COUNT.fullmatch(each)):
        return  # what is no number is found where the processes are decided
    sizes = ("tensor_model_parallel_size", "pipeline_model_parallel_size", "context_parallel_size")
    copy = math.prod(int(command.number(name)) or 1 for name in sizes)
    if not env.get("NPROC_PER_NODE") and int(machines) % copy:
        what = f"NPROC_PER_NODE is not set, and one process cannot hold what is spread over {copy}"
        why = "without it each machine has one process"
        fix = f"write NPROC_PER_NODE={max(copy // int(machines), 1)} before the command"
        command.findings.append(Finding(what, "environment", why, fix))
        return
    command.default("num_processes", int(machines) * int(each))
    if env.get("NPROC_PER_NODE"):
        said = f"NPROC_PER_NODE={each}"
        command.defaults["num_processes"] = replace(command.defaults["num_processes"], where=said, origin=said)


def _check_kinds(command: Command) -> None:
    """Find flags without a setting of their own whose value is of another type."""
    expected = {int: "a whole number", float: "a number", bool: "true or false", dict: "a mapping in JSON"}
    for name, entry in list(command.flags.items()):
        kind, value = MEANT.get(entry.key), entry.value.data
        fits = isinstance(value, kind) if kind else True
        if kind is float:
            fits = isinstance(value, int | float)
        if not fits or (kind in (int, float) and isinstance(value, bool)):
            assert kind is not None
            what = f"{entry.key} is {entry.value.text or shown(value)!r}"
            command.findings.append(Finding(what, entry.where, f"expected {expected.get(kind, 'one word')}"))
            del command.flags[name]
