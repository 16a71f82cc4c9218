"""`megatune train FILE.yaml`, and `megatune sft | pt | dpo | kto | rm | cls` from flags: train a model."""

from __future__ import annotations

import shlex
from collections.abc import Sequence
from dataclasses import replace

from megatune.cli.command import Command
from megatune.config.load import Loaded
from megatune.config.options import NoOptions, ParsedArguments
from megatune.errors import ExitCode, Finding, MegatuneError

_STAGE = "run.stage"
_EPILOG = """Settings are LLaMA-Factory's keys. From a file, with overrides:

    megatune train run.yaml learning_rate=1e-5 output_dir=out/second

From flags:

    megatune sft --model_name_or_path Qwen3-0.6B --dataset my.jsonl --output_dir out/first

`megatune explain KEY` explains a setting, `megatune explain FILE.yaml` a whole file; docs/settings.md lists all
settings. Under torchrun, the command runs in torchrun's processes; otherwise it starts one process per GPU, or on a
CPU the minimum for the layout (num_processes)."""
_ABOUT = {
    "train": "Train a model from a YAML file.",
    "sft": "Supervised fine-tuning.",
    "pt": "Continued pretraining on plain text.",
    "dpo": "Preference training on pairs of answers.",
    "kto": "Preference training on desirable and undesirable answers.",
    "rm": "Train a reward model on pairs of answers.",
    "cls": "Train a classifier on conversations or texts with labels.",
}


def run(verb: str, words: Sequence[str]) -> int:
    """Read the settings, and start the run.

    Raises:
        MegatuneError: everything that is wrong, before any process starts.
    """
    usage = "FILE.yaml [key=value ...] [--key value ...]"
    command = Command(
        name=verb, usage=usage if verb == "train" else f"[{usage[:9]}]{usage[9:]}", about=_ABOUT[verb], epilog=_EPILOG,
        options=NoOptions, takes_settings=True,
    )  # fmt: skip
    given = command.read(words)
    refuse_roles(given, "describes reinforcement learning: it has roles", "", "megatune rl {}")
    loaded = given.load() if verb == "train" else _of_stage(verb, given)

    from megatune.training.start import start

    return start(loaded)


def refuse_roles(given: ParsedArguments, what: str, why: str, fix: str) -> None:
    """Raise an error (exit code 64) if the file is an RL file or another file of ROLL."""
    from megatune.config.entry import is_rl_file, read_file

    file = given.settings.source
    if file is not None and is_rl_file(file):
        from megatune.config.dialects.roll import other_pipeline

        other = other_pipeline([entry.key for entry in read_file(file)[0]], file)
        finding = other or Finding(f"{file} {what}", "", why, fix.format(shlex.quote(file)))
        raise MegatuneError(finding, ExitCode.SETTINGS)


def _of_stage(verb: str, given: ParsedArguments) -> Loaded:
    """Read settings with the stage of the verb; report another stage in a file, an override or a flag."""
    loaded = given.load()
    entry, stage = loaded.entries.get(_STAGE), loaded.settings.run.stage
    if entry is None or entry.value.data is None or _STAGE in loaded.invalid or stage == verb:
        given.settings.flags.extend(("--stage", verb))
        return given.load()
    fix = f"megatune {stage} ..., or write stage: {verb}"
    finding = Finding(f"stage {stage} contradicts `megatune {verb}`", entry.where, f"the verb trains stage {verb}", fix)
    return replace(loaded, findings=[*loaded.findings, finding], invalid=loaded.invalid | {_STAGE})
