"""ms-swift's flags of export and infer: the verbs here take them by their names, in the one spelling that they read."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from megatune.config.dialects.swift import kinds, negatable
from megatune.config.dialects.swift_syntax import read_command_line, read_variables
from megatune.config.entry import SettingEntry, read_file
from megatune.config.values import Value, shown
from megatune.errors import Finding

# What `megatune export` reads.
_EXPORT: dict[str, type] = {
    **dict.fromkeys(("to_mcore", "to_hf", "merge_lora", "exist_ok", "test_convert_precision"), bool),
    **dict.fromkeys(("model", "mcore_model", "load", "model_revision", "output_dir", "torch_dtype"), str),
    **dict.fromkeys(("max_shard_size", "test_convert_dtype", "mcore_adapter"), str),
    "adapters": list,
}
_LAYOUT = (
    "tensor_model_parallel_size", "pipeline_model_parallel_size", "context_parallel_size", "expert_model_parallel_size",
    "expert_tensor_parallel_size", "sequence_parallel",
)  # fmt: skip
_QUANTIZED = "quantizing is not built: a tool for that takes the exported model"
# Flag -> its type, what passes, and why the rest is refused.
_REFUSED: dict[str, tuple[type, tuple[object, ...], str]] = {
    "quant_method": (str, (), _QUANTIZED),
    "quant_bits": (int, (), _QUANTIZED),
    "to_ollama": (bool, (False,), "files for Ollama are not written"),
    "to_cached_dataset": (
        bool,
        (False,),
        "rows are cached when a run first reads them; tokenized_path names the folder",
    ),
    "to_peft_format": (bool, (False,), "adapters are in peft's form as they are"),
    "push_to_hub": (bool, (False,), "a run pushes what it trained; an exported folder goes up with the hub's own tool"),
    "safe_serialization": (bool, (True,), "weights are written as safetensors, and never as pickles"),
    "mcore_adapter": (str, (), "adapters of Megatron's form are not read: a run here writes peft's"),
    "adapter_load": (str, (), "adapters of Megatron's form are not read: a run here writes peft's"),
}
_IGNORED = {
    **dict.fromkeys(("quant_n_samples", "quant_batch_size", "group_size"), (int, "it is of quantizing")),
    **dict.fromkeys(("hub_model_id", "commit_message"), (str, "nothing is pushed")),
    "hub_private_repo": (bool, "nothing is pushed"),
    "template_mode": (str, "it is of cached data sets"),
    "thread_count": (int, "tensors go one by one, so that memory does not grow"),
    "use_hf": (bool, "it says which hub names are of"),
}


# What ms-swift does where nothing is said, in words of `megatune infer`.
_INFER_DEFAULTS = {
    "temperature": ("model", "as generation_config.json says"),
    "max_new_tokens": ("1000000000", "as many as the model's context holds"),
}


@dataclass(slots=True)
class Words:
    """The words for a verb of this program.

    Attributes:
        variables: environment variables that the command line asks for.
        lines: for the user, one for each flag that is ignored.
    """

    words: list[str] = field(default_factory=list)
    variables: dict[str, str] = field(default_factory=dict)
    lines: list[str] = field(default_factory=list)
    findings: list[Finding] = field(default_factory=list)


def export_words(words: Sequence[str]) -> Words:
    """Read a command line of `megatron export` or `swift export`.

    Raises:
        MegatuneError: the file of flags is missing or unreadable (exit 66). Everything else is a finding.
    """
    of_export = {**{name: row[0] for name, row in _REFUSED.items()}, **{name: row[0] for name, row in _IGNORED.items()}}
    line = read_command_line(words, {**kinds(), **of_export, **_EXPORT}, negatable())
    found = Words(variables=line.variables, findings=line.findings)
    for name, entry in line.flags.items():
        left = f"swift      --{name} {_text(entry.value)}"
        if name in _REFUSED:
            _, passing, why = _REFUSED[name]
            if entry.value.data not in passing:
                what = f"{name}: {shown(entry.value.data)} is not supported"
                found.findings.append(Finding(what, entry.where, why, f"remove --{name}"))
        elif name == "hub_token":
            found.variables |= {"HF_TOKEN": _text(entry.value), "MODELSCOPE_API_TOKEN": _text(entry.value)}
        elif name in _EXPORT:
            found.words += [f"--{name}", *_spelled(entry)]
        elif name in _LAYOUT:
            found.lines.append(f"{left}  ignored: the files are the same for every layout")
        else:
            why = _IGNORED[name][1] if name in _IGNORED else "it is of training"
            found.lines.append(f"{left}  ignored: {why}")
    _choose_hub(found, line.flags.get("use_hf"))
    return found


def infer_words(words: Sequence[str]) -> Words:
    """Read a command line of `swift infer`, which `megatune infer` understands but for a file of flags, and the hub."""
    found = Words()
    rest = list(words)
    if rest and rest[0].endswith((".yaml", ".yml", ".json")):
        entries, found.findings = read_file(rest.pop(0))
        for entry in entries:
            if entry.key == "ENV":
                found.variables = read_variables(entry, found.findings)
            elif entry.value.data is not None:
                found.words += [f"--{entry.key}", *_spelled(entry)]
    use_hf = None
    while rest:
        word = rest.pop(0)
        name, equals, text = word.removeprefix("--").replace("-", "_").partition("=")
        if word.startswith("--") and name == "use_hf":
            text = text if equals else rest.pop(0) if rest and not rest[0].startswith("--") else "true"
            use_hf = SettingEntry(name, Value(text.lower() in ("true", "1", "yes", "y", "t"), text), word, "flag")
        else:
            found.words.append(word)
    given = {word.partition("=")[0].replace("-", "_") for word in found.words if word.startswith("--")}
    for name, (value, why) in _INFER_DEFAULTS.items():
        if f"__{name}" not in given:
            found.words += [f"--{name}", value]
            found.lines.append(f"swift      --{name} {value}  ms-swift's default: {why}")
    _choose_hub(found, use_hf)
    return found


def _choose_hub(found: Words, use_hf: SettingEntry | None) -> None:
    if use_hf is not None:
        found.variables["USE_MODELSCOPE_HUB"] = "0" if use_hf.value.data is True else "1"


def hub_variables(found: Words, env: Mapping[str, str]) -> dict[str, str]:
    """Return the variables that a command line asks for; names of a hub are ModelScope's where nothing else is said."""
    on_hugging_face = env.get("USE_HF", "0").lower() in ("1", "true")
    return {"USE_MODELSCOPE_HUB": "0" if on_hugging_face else "1", **found.variables}


def _text(value: Value) -> str:
    if isinstance(value.data, list):
        return " ".join(item.text or shown(item.data) for item in value.items)
    return value.text or shown(value.data)


def _spelled(entry: SettingEntry) -> list[str]:
    if isinstance(entry.value.data, list):
        return [item.text or shown(item.data) for item in entry.value.items]
    return [entry.value.text or shown(entry.value.data)]
