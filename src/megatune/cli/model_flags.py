"""The flags of the verbs that write text, `infer` and `serve`: which model, how it writes, and by what."""

from __future__ import annotations

import argparse
import os
from dataclasses import fields, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from megatune.cli import refused_flags
from megatune.cli.own_flags import add_flag
from megatune.errors import ExitCode, Finding, MegatuneError

if TYPE_CHECKING:
    from megatune.generation.adapters import AdaptedModel
    from megatune.generation.generator import LoadBackend
    from megatune.generation.options import GenerationOptions

# Flag, type, help. What is left out has the default of the setting of training.
_PICTURE_SETTINGS = (
    ("image_max_pixels", int, "images of more pixels are made smaller, to this area"),
    ("image_min_pixels", int, "images of fewer pixels are made larger, to this area"),
    ("video_max_pixels", int, "frames of more pixels are made smaller, to this area"),
    ("video_min_pixels", int, "frames of fewer pixels are made larger, to this area"),
    ("video_fps", float, "frames that are taken of a second of a video"),
    ("video_maxlen", int, "frames that are taken of a video at most"),
)
_BOOLEANS = {
    **dict.fromkeys(("true", "yes", "y", "t", "1"), True),
    **dict.fromkeys(("false", "no", "n", "f", "0"), False),
}


class InPlaceOfModel(argparse.Action):
    """A flag that lets the positional MODEL be left out: it names the model, or an adapter, which names its base."""

    def __init__(self, *args: Any, positional: argparse.Action, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._positional = positional

    def __call__(self, parser: Any, namespace: argparse.Namespace, values: Any, option_string: Any = None) -> None:
        """Take the value."""
        setattr(namespace, self.dest, values)
        self._positional.required = False


def add_boolean(parser: Any, name: str, text: str, default: bool | None = None) -> None:
    """Declare a flag that is given alone, with true or false, or as --no-NAME."""
    add_flag(parser, name, nargs="?", const=True, type=_boolean, default=default, metavar="BOOL", help=text)
    add_flag(parser, f"no_{name}", dest=name, action="store_false", default=default, help=argparse.SUPPRESS)


def add_model(parser: argparse.ArgumentParser) -> None:
    """Declare the model, its adapters, and where they come from."""
    model = parser.add_argument("model", metavar="MODEL", nargs=None,
                                help="a Hugging Face model, a checkpoint-N, a run's output_dir, each with a model or "
                                "an adapter, or an id on a hub; or a settings file with its model_name_or_path; or "
                                "--model MODEL")  # fmt: skip
    parser.add_argument("--model", dest="named_model", action=InPlaceOfModel, positional=model, metavar="MODEL",
                        help=argparse.SUPPRESS)  # fmt: skip
    add_flag(parser, "adapters", nargs="+", action=InPlaceOfModel, positional=model, default=[], metavar="A",
             help="folders of adapters on MODEL, applied in this order; without MODEL, on the base that they name; "
             "--adapter_name_or_path A,B is the same")  # fmt: skip
    add_flag(parser, "adapter_name_or_path", dest="adapters", action=InPlaceOfModel, positional=model, type=_names,
             metavar="A[,B]", help=argparse.SUPPRESS)  # fmt: skip
    add_flag(parser, "model_name_or_path", metavar="BASE",
             help="where MODEL is an adapter: its base (what its adapter_config.json names)")  # fmt: skip
    add_flag(parser, "model_revision", default="main", metavar="REVISION",
             help="branch, tag or commit of a model on a hub (main)")  # fmt: skip
    add_flag(parser, "cache_dir", metavar="DIR", help="where files of a hub are kept (the hub's own cache)")
    refused_flags.add(parser)


def add_asking(parser: argparse.ArgumentParser) -> None:
    """Declare what every question has beside its text."""
    parser.add_argument("--system", metavar="TEXT",
                        help="the system message, or a .txt file with it (the chat template's own)")  # fmt: skip
    add_boolean(parser, "enable_thinking", "the thinking switch of chat templates that have one (the template's own)")


def add_picture_sizes(group: Any) -> None:
    """Declare the settings that a vision-language model reads pictures by."""
    for name, number, text in _PICTURE_SETTINGS:
        add_flag(group, name, type=number, metavar="N", help=text)


def add_sampling(parser: argparse.ArgumentParser) -> None:
    """Declare how answers are written."""
    group = parser.add_argument_group("how to write (what is left out is the model's generation_config.json's)")
    add_flag(group, "max_new_tokens", type=int, default=512, metavar="N", help="tokens of an answer at most (512)")
    group.add_argument("--temperature", type=_temperature, default=0.0, metavar="T",
                       help="0 takes the likeliest token at every step; model: as its file says (0)")  # fmt: skip
    add_flag(group, "top_p", type=float, metavar="P",
             help="sample from the likeliest tokens that reach this probability together")  # fmt: skip
    add_flag(group, "top_k", type=int, metavar="K", help="sample from the K likeliest tokens")
    add_flag(group, "repetition_penalty", type=float, metavar="X",
             help="above 1 makes tokens that have occurred less likely")  # fmt: skip
    group.add_argument("--seed", type=int, metavar="N", help="the same seed samples the same answer")
    add_flag(group, "stop_words", nargs="+", default=(), metavar="TEXT",
             help="end an answer behind one of these, beside the model's own stop tokens")  # fmt: skip


def add_backend(parser: argparse.ArgumentParser) -> None:
    """Declare what computes."""
    group = parser.add_argument_group("what computes")
    add_flag(group, "infer_backend", default="transformers", metavar="NAME",
             help="transformers (pt is the same), or vllm where it is installed (transformers)")  # fmt: skip
    add_flag(group, "vllm_tensor_parallel_size", type=int, metavar="N", help="GPUs that vLLM spreads the model over")
    add_flag(group, "vllm_gpu_memory_utilization", type=float, metavar="X", help="share of a GPU's memory for vLLM")
    add_flag(group, "vllm_max_model_len", type=int, metavar="N", help="tokens of a prompt and its answer at most")


class Checked(NamedTuple):
    """What the flags say, found good.

    Attributes:
        name: of the model, as it was given.
    """

    name: str
    options: GenerationOptions
    adapted: AdaptedModel
    vllm: dict[str, Any] | None  # vLLM's arguments; None for Transformers


def check(args: argparse.Namespace, *, brings_pictures: bool = False) -> Checked:
    """Read the flags of a model, before the seconds that loading takes.

    Args:
        brings_pictures: whether what is asked later may have images and videos of its own.

    Raises:
        MegatuneError: (SETTINGS) flags; (INPUT) an adapter, a picture or a file of the system message that is missing;
            (UNAVAILABLE) a backend that is not installed.
    """
    from megatune.generation.options import GenerationOptions, PictureFile, check_options

    if findings := [*_model_findings(args), *refused_flags.findings(args), *_backend_findings(args)]:
        raise MegatuneError(findings, ExitCode.SETTINGS)
    refused_flags.say_passed_over(args)
    given = {each.name: getattr(args, each.name) for each in fields(GenerationOptions) if hasattr(args, each.name)}
    given |= {"stop_words": tuple(args.stop_words), "system": _system(args.system)}
    given["pictures"] = tuple(PictureFile(*each) for each in getattr(args, "pictures", None) or ())
    options = GenerationOptions(**given)
    check_options(options, brings_pictures=brings_pictures)
    name, adapted = _adapted(args)
    vllm = None
    if args.infer_backend == "vllm":
        vllm = {each: value for each in _VLLM if (value := getattr(args, f"vllm_{each}")) is not None}
        from megatune.generation.vllm_backend import check_vllm

        check_vllm(options, adapted.adapters)
    return Checked(name, options, adapted, vllm)


def _adapted(args: argparse.Namespace) -> tuple[str, AdaptedModel]:
    """Return the name of what is asked, and what it is: a model with its adapters, or adapters that name their base."""
    from megatune.generation.adapters import adapted_model

    name, base = args.named_model or args.model, args.model_name_or_path
    if name is not None:
        return name, adapted_model(name, base, args.adapters)
    first, *more = args.adapters
    adapted = adapted_model(first, base)
    if more or not adapted.adapters:  # which refuses those that are none
        adapted = adapted_model(adapted.base, adapters=args.adapters)
    return first, adapted


_VLLM = ("tensor_parallel_size", "gpu_memory_utilization", "max_model_len")


def backend_loader(vllm: dict[str, Any] | None) -> LoadBackend:
    """Return what loads the backend that the flags name."""
    if vllm is None:
        from megatune.generation.transformers_backend import TransformersBackend

        return TransformersBackend.load
    from megatune.generation.vllm_backend import VllmBackend

    return partial(VllmBackend.load, arguments=vllm)


def model_dir(name: str, args: argparse.Namespace) -> Path:
    """Return the folder that is named, or that a model on a hub is fetched into."""
    from megatune.generation.inputs import nearest_folder
    from megatune.hub.megatron import is_torch_dist
    from megatune.hub.models import is_hub_id, open_model

    path = Path(name)
    if path.is_dir() and is_torch_dist(path):
        what, why = f"{name} is in Megatron-Core's format", "answers are generated with Transformers"
        fix = f"megatune export --to_hf true --mcore_model {name} --output_dir OUT, and then OUT"
        raise MegatuneError(Finding(what, "MODEL", why, fix), ExitCode.INPUT)
    if not is_hub_id(name) and not path.is_dir():
        return path  # `find_model` says what is wrong with it
    try:
        return open_model(name, args.model_revision, args.cache_dir).fetch()
    except MegatuneError as error:
        if path.is_dir() or (near := nearest_folder(path)) is None:
            raise
        findings = [replace(each, fix=f"did you mean {near}? Else {each.fix}") for each in error.findings]
        raise MegatuneError(findings, ExitCode.INPUT) from error


def _model_findings(args: argparse.Namespace) -> list[Finding]:
    if args.model is not None and args.named_model is not None:
        why = f"MODEL is {args.model} already"
        return [Finding("names the model a second time", "--model", why, "leave one of them out")]
    return []


def _backend_findings(args: argparse.Namespace) -> list[Finding]:
    name = args.infer_backend
    if name not in ("transformers", "pt", "vllm"):
        what = f"{name} is not built" if name in ("sglang", "lmdeploy") else f"{name!r} is unknown"
        return [Finding(what, "--infer_backend", fix="transformers, or vllm where it is installed")]
    given = [each for each in _VLLM if getattr(args, f"vllm_{each}") is not None and name != "vllm"]
    why = "vLLM does not compute here"
    return [Finding("has no effect", f"--vllm_{each}", why, "add --infer_backend vllm") for each in given]


def _system(value: str | None) -> str | None:
    """Return the system message: a text, or what a .txt file has."""
    if value is None or not value.endswith(".txt"):
        return value
    try:
        return Path(value).read_text(encoding="utf-8").strip("\n")
    except (OSError, ValueError) as error:
        why = os.strerror(error.errno) if isinstance(error, OSError) and error.errno else str(error)
        finding = Finding(f"{value} cannot be read", "--system", why, "name a text file of UTF-8, or write the text")
        raise MegatuneError(finding, ExitCode.INPUT) from error


def _temperature(text: str) -> float | None:
    return None if text == "model" else float(text)


def _names(text: str) -> list[str]:
    return [name for name in map(str.strip, text.split(",")) if name]


def _boolean(text: str) -> bool:
    if text.lower() not in _BOOLEANS:
        raise argparse.ArgumentTypeError(f"{text!r} is neither true nor false (a positional MODEL goes first)")
    return _BOOLEANS[text.lower()]
