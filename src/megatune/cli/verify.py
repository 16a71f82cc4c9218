"""`megatune verify`: a layout's logits, loss and gradients against plain Transformers or against another layout, on the
user's own checkpoint."""

from __future__ import annotations

import shlex
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

from pydantic import Field

from megatune.cli.command import Command, Flag, Given
from megatune.config.setting import Count, Group
from megatune.errors import ExitCode, Finding, MegatuneError

if TYPE_CHECKING:
    from megatune.architecture import Architecture
    from megatune.config.load import Loaded
    from megatune.config.settings import FinetuningSettings, Settings
    from megatune.launch.world import World
    from megatune.verify.samples import Sample

# What a comparison depends on; any other setting would be without effect, and is refused.
_GROUPS = ("parallel", "precision", "experts", "recompute", "performance")
_OF_HUB = ("model.model_revision", "model.cache_dir")
_SETTINGS = ("data.packing", "run.seed", "run.num_processes", "run.ddp_timeout", "model.model_name_or_path", *_OF_HUB)
_NO_PART = ("experts.moe_router_bias_update_rate", "performance.manual_gc", "performance.manual_gc_interval")
# What two layouts have in common, and so the first one says.
_SHARED = ("run.seed", "run.ddp_timeout")
_SHARED_GROUPS = ("precision.", "model.", "finetuning.")
# What only a training run has; rules about it have nothing to say here.
_NOT_HERE = ("model.model_name_or_path", "data.dataset", "data.cutoff_len", "run.output_dir")


class VerifyOptions(Group):
    """The options of `megatune verify`."""

    samples: Count = 8
    """rows of random tokens"""
    length: Annotated[int, Field(ge=2)] = 64
    """tokens of the longest row, images aside"""
    verbose: bool = False
    """show every parameter, not only the worst 10"""
    against: Annotated[str | None, Flag("'SETTING ...'")] = None
    """compare with this layout instead of Transformers; what it leaves out has its default, '' is one process"""


COMMAND = Command(
    name="verify",
    usage="MODEL [--OPTION ...] [SETTING ...] [--against 'SETTING ...']",
    about="Computes a Hugging Face checkpoint (a folder, or an id on a hub) in a parallel layout and with plain "
    "Transformers, and compares the logits, the loss and the gradient of every parameter. Where they differ, it says "
    "in which layer that begins, and ends with 1. Vision-language models are given images and videos, too. With "
    "--adapter_name_or_path, or where MODEL is the folder of an adapter, it is Transformers with peft, and the "
    "gradients are the adapter's; with --finetuning_type lora those of random adapters.",
    epilog="""SETTING is a layout, a precision, packing, recomputation or a kernel as in a settings file, as --key value
or key=value: --tensor_model_parallel_size 2 --pipeline_model_parallel_size 2 --bf16; also --seed and
--num_processes. Without any: fp32 in one process. Of adapters: --adapter_name_or_path, --finetuning_type lora with --lora_rank,
--lora_target and others that say which, --model_name_or_path for the base of MODEL.""",
    options=VerifyOptions,
    takes_settings=True,
)


def run(verb: str, words: Sequence[str]) -> int:
    """Compare and print."""
    return verify(words)


def verify(words: Sequence[str], reference: Path | None = None) -> int:
    """Compare and print.

    Args:
        reference: the Hugging Face checkpoint of the same weights, for those in Megatron-Core's format; None writes one
            for the time of the comparison.

    Returns:
        DONE where everything is within its tolerance, DIFFERENT where something is not, or the exit code of processes
        that failed.

    Raises:
        MegatuneError: SETTINGS, INPUT or what a hub refuses the model with, before any process is started.
    """
    from megatune.cli.verify_adapters import trained_in
    from megatune.families import load_architecture, read_config
    from megatune.families.peft_config import has_score
    from megatune.families.scores import STAGE
    from megatune.generation.adapters import adapted_model
    from megatune.hub.models import open_model

    given = COMMAND.read(words)
    options = given.options
    name, loaded, other = _read(given)
    base, adapters = loaded.settings.model.model_name_or_path, loaded.settings.finetuning.adapter_name_or_path
    named = adapted_model(name, base, adapters)
    model = open_model(named.base, loaded.settings.model.model_revision, loaded.settings.model.cache_dir)
    architecture = load_architecture(model.config_dir())
    if architecture.num_labels or any(map(has_score, named.adapters)):
        architecture = load_architecture(model.config_dir(), STAGE)
        loaded, other = _of_reward_model(loaded), None if other is None else _of_reward_model(other)
    finetuning = trained_in(loaded, named.adapters, architecture)
    samples = _samples(architecture, read_config(model.config_dir()), options, loaded.settings.run.seed)
    longest = max(len(sample.input_ids) for sample in samples)
    settings, world = _checked(loaded, finetuning, architecture, options, longest)
    against = None if other is None else _checked(other, finetuning, architecture, options, longest)

    from megatune.verify.adapters import with_adapters
    from megatune.verify.reference_files import as_hugging_face
    from megatune.verify.run import RanksFailed, show, verify_layout, verify_layouts

    described = _describe(settings, world) + (f" against {_describe(*against)}" if against else "")
    model_dir = model.fetch()
    print(f"{name}: {described}, {settings.precision.params_dtype}, {_describe_samples(samples)}", flush=True)
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


def _of_reward_model(loaded: Loaded) -> Loaded:
    run = loaded.settings.run.model_copy(update={"stage": "rm"})
    return replace(loaded, settings=loaded.settings.model_copy(update={"run": run}))


def _samples(architecture: Architecture, config: Mapping[str, Any], options: VerifyOptions, seed: int) -> list[Sample]:
    """Return rows of random tokens, for a vision-language model with pictures in some of them."""
    from megatune.verify.samples import random_pictures, random_samples, uneven_lengths

    vision, text = architecture.vision, config.get("text_config") or config
    return random_samples(
        architecture.vocab_size,
        uneven_lengths(options.samples, options.length),
        seed,
        padding=text.get("pad_token_id"),
        pictures=random_pictures(options.samples, vision) if vision is not None else (),
        vision=vision,
    )


def _describe_samples(samples: list[Sample]) -> str:
    lengths, pictures = (
        [len(sample.input_ids) for sample in samples],
        [each for one in samples for each in one.pictures],
    )
    kinds = {kind: sum(picture.kind == kind for picture in pictures) for kind in ("image", "video")}
    counted = [f"{count} {kind}{'s' * (count > 1)}" for kind, count in kinds.items() if count]
    return f"{len(samples)} rows of {min(lengths)} to {max(lengths)} tokens" + "".join(f", {each}" for each in counted)


def _read(given: Given[VerifyOptions]) -> tuple[str, Loaded, Loaded | None]:
    """Return the checkpoint, the layout, and the one to compare it with."""
    name, against = given.settings.source, given.options.against
    given.settings = replace(given.settings, source=None)
    loaded = given.load()
    other = None if against is None else _read_against(against, loaded.settings)
    findings = list(loaded.findings)
    if name is None:
        findings.append(Finding("which checkpoint?", fix="megatune verify MODEL: its folder or id comes first"))
    findings += _without_part(loaded)
    findings += _not_as_transformers(loaded) if other is None else [*other.findings, *_without_part(other)]
    if findings:
        raise MegatuneError(findings, ExitCode.SETTINGS)
    assert name is not None
    return name, loaded, other


def _read_against(text: str, first: Settings) -> Loaded:
    """The other layout; it shares the precision and the tokens of the first one."""
    from megatune.config.entry import split_arguments
    from megatune.config.load import load

    try:
        words = split_arguments(shlex.split(text))
    except ValueError as error:
        raise MegatuneError(Finding(f"--against {text}: {error}"), ExitCode.SETTINGS) from None
    loaded = load(overrides=words.overrides, flags=words.flags)
    findings = [replace(finding, where="--against") for finding in loaded.findings]
    if words.source is not None:
        findings.append(Finding(f"{words.source!r} is no setting", "--against", fix="write key=value key=value"))
    findings += [
        Finding(f"{path.partition('.')[2]} is the same in both layouts", "--against", fix="write it before --against")
        for path, origin in loaded.origins.items()
        if origin != "default" and (path in _SHARED or path.startswith(_SHARED_GROUPS))
    ]
    shared = {path.partition(".")[2]: getattr(first.run, path.partition(".")[2]) for path in _SHARED}
    settings = loaded.settings.model_copy(
        update={"precision": first.precision, "run": loaded.settings.run.model_copy(update=shared)}
    )
    entries = {path: replace(entry, origin="--against") for path, entry in loaded.entries.items()}
    return replace(loaded, settings=settings, entries=entries, findings=findings)


def _without_part(loaded: Loaded) -> Iterator[Finding]:
    """Settings that would change nothing here."""
    from megatune.cli.verify_adapters import of_adapters

    settings = *_SETTINGS, *of_adapters(loaded.settings.finetuning)
    for path, origin in loaded.origins.items():
        has_part = path.partition(".")[0] in _GROUPS or path in settings
        if origin != "default" and (not has_part or path in _NO_PART):
            why = "a comparison computes one step's gradients, from settings that say where and how"
            yield Finding(f"{path.partition('.')[2]} has no part in verify", origin, why)


def _not_as_transformers(loaded: Loaded) -> Iterator[Finding]:
    """Settings that ask for other numbers than those of Transformers."""
    experts = loaded.settings.experts
    asked = {
        "moe_aux_loss_coeff": experts.moe_aux_loss_coeff > 0,
        "moe_z_loss_coeff": bool(experts.moe_z_loss_coeff),
        "moe_expert_capacity_factor": experts.moe_expert_capacity_factor is not None,
        "moe_router_load_balancing_type": experts.moe_router_load_balancing_type == "sinkhorn",
    }
    why = "Transformers computes the language-model loss alone, and every expert takes all tokens sent to it"
    for name in (name for name, differs in asked.items() if differs):
        what, where = f"{name} {getattr(experts, name)} changes the numbers", loaded.origins[f"experts.{name}"]
        yield Finding(what, where, why, f"remove {name}, or compare with another layout that has it, too: --against")


def _world(settings: Settings) -> World:
    import os

    from megatune.launch.devices import count_gpus
    from megatune.launch.world import decide_world

    asked, smallest = settings.run.num_processes, settings.parallel.smallest_world
    world = decide_world(smallest, num_processes=asked, num_devices=count_gpus(), env=os.environ)
    if world.nnodes > 1:
        finding = Finding(f"NNODES={world.nnodes}", "environment", "verify runs on one machine", "leave NNODES out")
        raise MegatuneError(finding, ExitCode.SETTINGS)
    return world


def _checked(
    loaded: Loaded, finetuning: FinetuningSettings, architecture: Architecture, options: VerifyOptions, longest: int
) -> tuple[Settings, World]:
    """Return the settings, after the rules of the layout have been held against the model, and the processes they
    take.

    Args:
        finetuning: what is trained, whose gradients are compared.
        longest: tokens of the longest row.
    """
    from megatune.config.rules import RULES, check
    from megatune.config.settings import BatchSettings
    from megatune.plan import trainable

    parallel, world = loaded.settings.parallel, _world(loaded.settings)
    # With virtual stages micro-batches come in rounds of one a stage; what the samples do not fill is padding.
    accumulation = -(-options.samples * parallel.model_parallel_size // world.world_size)
    if parallel.virtual_stages:
        accumulation = -(-accumulation // parallel.pipeline_model_parallel_size) * parallel.pipeline_model_parallel_size
    batch = BatchSettings(per_device_train_batch_size=1, gradient_accumulation_steps=accumulation)
    settings = loaded.settings.model_copy(update={"batch": batch, "finetuning": finetuning})
    rules = *RULES, *trainable.RULES
    findings = check(settings, architecture, world.world_size, rules=rules, origins=loaded.origins, invalid=_NOT_HERE)
    limit, of_pictures = architecture.max_position_embeddings, longest - options.length
    if longest > limit:
        with_pictures = f", with {of_pictures} tokens of pictures," if of_pictures else ""
        what = f"--length {options.length}{with_pictures} is more than the model's {limit} positions"
        findings.append(Finding(what, fix=f"--length {limit - of_pictures} or less"))
    if findings:
        raise MegatuneError(findings, ExitCode.SETTINGS)
    return settings, world


def _describe(settings: Settings, world: World) -> str:
    parallel, recompute = settings.parallel, settings.recompute
    split = [f"{name} {size}" for name, size in parallel.sizes(world.world_size).items() if size > 1]
    split += ["sequence parallel"] if parallel.sequence_parallel else []
    split += ["packed"] if settings.packing else []
    split += [f"recompute {recompute.recompute_granularity}"] if recompute.recompute_granularity else []
    if settings.finetuning.finetuning_type == "lora":
        split = [f"adapters of rank {settings.finetuning.lora_rank}", *split]
    return ", ".join(split) or "one process"
