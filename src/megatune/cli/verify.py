"""`megatune verify`: compares the logits, loss and gradients of a layout with Transformers or another layout, for the
user's checkpoint."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

from pydantic import Field

from megatune.cli.command import Command
from megatune.config.load import Loaded
from megatune.config.options import Flag, ParsedArguments
from megatune.config.setting import Count, Group
from megatune.errors import ExitCode, Finding, MegatuneError
from megatune.progress import say

if TYPE_CHECKING:
    from megatune.hub.models import Model


class VerifyOptions(Group):
    """The options of `megatune verify`."""

    samples: Count = 8
    """rows of random tokens"""
    length: Annotated[int, Field(ge=2)] = 64
    """tokens of the longest row, images aside"""
    layers: Count | None = None
    """compare only the first N layers, and the other parts of the model: to save memory or time"""
    verbose: bool = False
    """show every parameter, not only the worst 10"""
    against: Annotated[str | None, Flag("'SETTING ...'")] = None
    """compare with this layout instead of Transformers; omitted settings have their defaults, '' is one process"""


COMMAND = Command(
    name="verify",
    usage="MODEL [--OPTION ...] [SETTING ...] [--against 'SETTING ...']",
    about="Computes a Hugging Face checkpoint (a folder, or an id on a hub) in a parallel layout and with plain "
    "Transformers, and compares the logits, the loss and the gradient of every parameter. If they differ, it reports "
    "the first layer that differs, and the exit code is 1. Vision-language models also get images and videos. With "
    "--adapter_name_or_path, or if MODEL is the folder of an adapter, the reference is Transformers with peft, and the "
    "gradients are those of the adapter; with --finetuning_type lora they are those of random adapters.",
    epilog="""SETTING is a layout, precision, packing, recomputation or kernel as in a settings file, as --key value
or key=value: --tensor_model_parallel_size 2 --pipeline_model_parallel_size 2 --bf16; also --seed and
--num_processes. The default is fp32 in one process. For adapters: --adapter_name_or_path, or --finetuning_type lora
with --lora_rank, --lora_target and similar settings; --model_name_or_path is the base model if MODEL is an adapter.""",
    options=VerifyOptions,
    takes_settings=True,
)


def run(verb: str, words: Sequence[str]) -> int:
    """Compare and print."""
    return verify(words)


def verify(words: Sequence[str], reference: Path | None = None) -> int:
    """Compare and print.

    Args:
        reference: the Hugging Face checkpoint of the same weights, for a model in Megatron-Core's format; None writes
            a temporary one.

    Returns:
        DONE if everything is within its tolerance, DIFFERENT if not, or the exit code of failed processes.

    Raises:
        MegatuneError: SETTINGS, INPUT or the hub's reason to refuse the model, before any process starts.
    """
    from megatune.config.model import open_changed
    from megatune.generation.inputs import adapted_model
    from megatune.hub.vocabulary import as_adapted

    given = COMMAND.read(words)
    name, loaded, other = _read(given)
    base, adapters = loaded.settings.model.model_name_or_path, loaded.settings.finetuning.adapter_name_or_path
    named = adapted_model(name, base, adapters)
    count = given.options.layers
    if count is not None and named.adapters:
        why = "an adapter belongs to all layers"
        fix = "remove --layers, or write --finetuning_type lora for random adapters"
        raise MegatuneError(Finding(f"--layers {count} with an adapter", "", why, fix), ExitCode.SETTINGS)
    model = as_adapted(open_changed(loaded.settings, named.base, loaded.settings.model.model_revision), named.adapters)
    if count is None:
        return _compare(name, given.options, loaded, other, model, named.adapters, reference)

    from megatune.hub.models import Model
    from megatune.verify.checkpoints import first_layers

    with first_layers(model.fetch(), count) as folder:
        part = f"the first {count} layers of {name}"
        return _compare(part, given.options, loaded, other, Model(folder), (), None)


def _compare(
    name: str,
    options: VerifyOptions,
    loaded: Loaded,
    other: Loaded | None,
    model: Model,
    adapters: Sequence[Path],
    reference: Path | None,
) -> int:
    """Compare and print; see `verify`."""
    from megatune.families import load_architecture
    from megatune.families.peft_config import num_scores
    from megatune.families.scores import CLASSES
    from megatune.verify import question
    from megatune.verify.question import trained_settings

    architecture = load_architecture(model.config_dir())
    if count := max(architecture.num_labels, *map(num_scores, adapters), 0):
        architecture = load_architecture(model.config_dir(), CLASSES, count)
        loaded = question.with_num_labels(loaded, count)
        other = None if other is None else question.with_num_labels(other, count)
    finetuning = trained_settings(loaded, adapters, architecture)
    seed = loaded.settings.run.seed
    samples = question.samples_of(architecture, options.samples, options.length, seed)
    settings, world = question.checked(loaded, finetuning, architecture, samples, options.length)
    against = None if other is None else question.checked(other, finetuning, architecture, samples, options.length)

    from megatune.verify.checkpoints import as_hugging_face, with_adapters
    from megatune.verify.run import RanksFailed, show, verify_layout, verify_layouts

    described = question.describe(settings, world) + (f" against {question.describe(*against)}" if against else "")
    model_dir = model.fetch()
    say(f"{name}: {described}, {settings.precision.params_dtype}, {question.describe_samples(samples)}")
    with (
        with_adapters(settings, model_dir, architecture) as settings,
        as_hugging_face(model_dir, reference) as reference_dir,
    ):
        try:
            if against is None:
                verdict = verify_layout(model_dir, settings, samples, world, reference_dir=reference_dir)
            else:
                other_settings = against[0].model_copy(update={"finetuning": settings.finetuning})
                verdict = verify_layouts(model_dir, settings, world, other_settings, against[1], samples)
        except RanksFailed as failed:
            return int(failed.args[0])
    return show(verdict, verbose=options.verbose)


def _read(given: ParsedArguments[VerifyOptions]) -> tuple[str, Loaded, Loaded | None]:
    """Return the checkpoint, the layout, and the layout to compare with."""
    from megatune.verify.question import not_as_transformers, read_against, without_part

    name, against = given.settings.source, given.options.against
    given.settings = replace(given.settings, source=None)
    loaded = given.load()
    other = None if against is None else read_against(against, loaded.settings)
    findings = list(loaded.findings)
    if name is None:
        findings.append(Finding("no checkpoint is given", fix="megatune verify MODEL: its folder or id comes first"))
    findings += without_part(loaded)
    findings += not_as_transformers(loaded) if other is None else [*other.findings, *without_part(other)]
    if findings:
        raise MegatuneError(findings, ExitCode.SETTINGS)
    assert name is not None
    return name, loaded, other
