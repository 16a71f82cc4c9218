"""`megatune verify`: a layout's logits, loss and gradients against plain Transformers, on the user's own checkpoint."""

from __future__ import annotations

import argparse
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING

from megatune.errors import ExitCode, Finding, MegatuneError

if TYPE_CHECKING:
    from megatune.architecture import Architecture
    from megatune.config.load import Loaded
    from megatune.config.settings import Settings
    from megatune.launch.world import World
    from megatune.verify.compare import Difference

_NUM_WORST = 10

# What a comparison depends on; any other setting would be without effect, and is refused.
_GROUPS = ("parallel", "precision")
_SETTINGS = ("run.seed", "run.num_processes", "run.ddp_timeout")
# What only a training run has; rules about it have nothing to say here.
_NOT_HERE = ("model.model_name_or_path", "data.dataset", "data.cutoff_len", "run.output_dir")


def add_parser(subparsers: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Declares the verb and its flags."""
    parser = subparsers.add_parser(
        "verify",
        help="compare a layout with Transformers: logits, loss, gradients",
        usage="megatune verify MODEL [--samples N] [--length N] [--verbose] [SETTING ...]",
        description="Computes a Hugging Face checkpoint in a parallel layout and with plain Transformers, and compares "
        "the logits, the loss and the gradient of every parameter. Ends with 1 where they differ.",
        epilog="SETTING is a layout or a precision as in a settings file, as --key value or key=value: "
        "--tensor_model_parallel_size 2 --pipeline_model_parallel_size 2 --bf16; also --seed and --num_processes. "
        "Without any: fp32 in one process.",
    )
    parser.add_argument("words", nargs="*", metavar="MODEL", help="folder of the checkpoint")
    _add_options(parser)
    parser.set_defaults(run=run)


def _add_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--samples", type=int, default=8, metavar="N", help="rows of random tokens (8)")
    parser.add_argument("--length", type=int, default=64, metavar="N", help="tokens of the longest row (64)")
    parser.add_argument("--verbose", action="store_true", help="show every parameter, not only the worst 10")


def run(args: argparse.Namespace) -> int:
    """Compares and prints.

    Returns:
        DONE where everything is within its tolerance, DIFFERENT where something is not, or the exit code of processes
        that failed.

    Raises:
        MegatuneError: SETTINGS or INPUT, before any process is started.
    """
    from megatune.families import load_architecture

    model_dir, loaded = _read(args)
    architecture = load_architecture(model_dir)
    world = _world(loaded.settings)
    settings = _checked(loaded, architecture, world, args)

    from megatune.verify.run import verify_layout
    from megatune.verify.samples import random_samples, uneven_lengths

    lengths = uneven_lengths(args.samples, args.length)
    samples = random_samples(architecture.vocab_size, lengths, settings.run.seed)
    print(f"{model_dir}: {_describe(settings, world)}, {args.samples} rows of {min(lengths)} to {max(lengths)} tokens")
    verdict = verify_layout(model_dir, settings, samples, world)
    if verdict.exit_code != ExitCode.DONE:
        return verdict.exit_code
    return show(verdict.differences, verbose=args.verbose)


def _read(args: argparse.Namespace) -> tuple[str, Loaded]:
    from megatune.config.arguments import split_arguments
    from megatune.config.load import load

    options = argparse.ArgumentParser(add_help=False, allow_abbrev=False)
    _add_options(options)
    words = split_arguments(options.parse_known_args(args.words)[1])
    loaded = load(overrides=words.overrides, flags=words.flags)
    findings = list(loaded.findings)
    if words.source is None:
        findings.append(Finding("which checkpoint?", mend="megatune verify MODEL: the folder comes first"))
    findings += [
        Finding(f"{flag} {value} is too few", mend=f"{flag} {least} or more")
        for flag, value, least in (("--samples", args.samples, 1), ("--length", args.length, 2))
        if value < least
    ]
    findings += [
        Finding(f"{path.partition('.')[2]} has no part in verify", origin, "a comparison has a layout and a precision")
        for path, origin in loaded.origins.items()
        if origin != "default" and path.partition(".")[0] not in _GROUPS and path not in _SETTINGS
    ]
    if findings:
        raise MegatuneError(findings, ExitCode.SETTINGS)
    assert words.source is not None
    return words.source, loaded


def _world(settings: Settings) -> World:
    import os

    from megatune.launch.devices import count_gpus
    from megatune.launch.world import decide_world

    world = decide_world(
        settings.parallel.smallest_world,
        num_processes=settings.run.num_processes,
        num_devices=count_gpus(),
        env=os.environ,
    )
    if world.nnodes > 1:
        raise MegatuneError(
            Finding(f"NNODES={world.nnodes}", "environment", "verify runs on one machine", "leave NNODES out"),
            ExitCode.SETTINGS,
        )
    return world


def _checked(loaded: Loaded, architecture: Architecture, world: World, args: argparse.Namespace) -> Settings:
    """The settings, after the rules of the layout have been held against the model."""
    from megatune.config.rules import check
    from megatune.config.settings import BatchSettings

    parallel = loaded.settings.parallel
    # With virtual stages micro-batches come in rounds of one a stage; what the samples do not fill is padding.
    accumulation = -(-args.samples * parallel.model_parallel_size // world.world_size)
    if parallel.virtual_stages:
        accumulation = -(-accumulation // parallel.pipeline_model_parallel_size) * parallel.pipeline_model_parallel_size
    batch = BatchSettings(per_device_train_batch_size=1, gradient_accumulation_steps=accumulation)
    settings = loaded.settings.model_copy(update={"batch": batch})
    findings = check(settings, architecture, world.world_size, origins=loaded.origins, invalid=_NOT_HERE)
    if args.length > architecture.max_position_embeddings:
        limit = architecture.max_position_embeddings
        findings.append(Finding(f"--length {args.length} is more than the model's {limit} positions",
                                mend=f"--length {limit} or less"))  # fmt: skip
    if findings:
        raise MegatuneError(findings, ExitCode.SETTINGS)
    return settings


def _describe(settings: Settings, world: World) -> str:
    parallel = settings.parallel
    sizes = {
        "tp": parallel.tensor_model_parallel_size,
        "pp": parallel.pipeline_model_parallel_size,
        "vpp": parallel.virtual_stages or 1,
        "dp": world.world_size // parallel.model_parallel_size,
    }
    split = [f"{name} {size}" for name, size in sizes.items() if size > 1]
    split += ["sequence parallel"] if parallel.sequence_parallel else []
    return f"{', '.join(split) or 'one process'}, {settings.precision.params_dtype}"


def show(differences: Sequence[Difference], *, verbose: bool = False) -> int:
    """Print the table and the verdict, and return the exit code."""
    from rich.console import Console

    from megatune.verify.compare import WHOLE_GRADIENT

    totals = [one for one in differences if one.name in ("logits", "loss", WHOLE_GRADIENT)]
    parameters = sorted((one for one in differences if one not in totals), key=_severity, reverse=True)
    shown = parameters if verbose else parameters[:_NUM_WORST]
    console = Console()
    console.print(_table(totals, shown))
    if len(shown) < len(parameters):
        console.print(f"{len(parameters) - len(shown)} more parameters are closer than these; --verbose shows all")
    failed = [one for one in differences if not one.passes]
    if failed:
        console.print(f"FAIL: {len(failed)} of {len(differences)} differ by more than their tolerance")
        return ExitCode.DIFFERENT
    console.print(f"PASS: all {len(differences)} are within their tolerance")
    return ExitCode.DONE


def _severity(difference: Difference) -> float:
    return difference.error / difference.tolerance if difference.tolerance else difference.error * float("inf")


def _table(totals: Iterable[Difference], parameters: Iterable[Difference]) -> object:
    from rich.table import Table

    table = Table("compared", "error", "tolerance", "")
    for index, rows in enumerate((totals, parameters)):
        for one in rows:
            table.add_row(
                one.name if index == 0 else f"gradient of {one.name}",
                f"{one.error:.1e}",
                f"{one.tolerance:.1e}",
                "PASS" if one.passes else "FAIL",
                style=None if one.passes else "red",
            )
        table.add_section()
    return table
