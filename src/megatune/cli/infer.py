"""`megatune infer`: chat with a model, or let it answer or complete a prompt."""

from __future__ import annotations

import argparse
import sys
from dataclasses import fields, replace
from functools import partial
from pathlib import Path

from megatune.errors import ExitCode, MegatuneError

# Flag, type, help. What is left out has the default of the setting of training.
_PICTURE_SETTINGS = (
    ("image_max_pixels", int, "images of more pixels are made smaller, to this area"),
    ("image_min_pixels", int, "images of fewer pixels are made larger, to this area"),
    ("video_max_pixels", int, "frames of more pixels are made smaller, to this area"),
    ("video_min_pixels", int, "frames of fewer pixels are made larger, to this area"),
    ("video_fps", float, "frames that are taken of a second of a video"),
    ("video_maxlen", int, "frames that are taken of a video at most"),
)


def add_parser(subparsers: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Declare the verb and its flags."""
    parser = subparsers.add_parser(
        "infer",
        help="chat or complete, from a Hugging Face or a training checkpoint",
        description="Answers --prompt; without one, chats on a terminal, or answers each line of its input.",
    )
    parser.add_argument("model", metavar="MODEL",
                        help="a Hugging Face model, a checkpoint-N, a run's output_dir, each with a model or an "
                        "adapter, or an id on a hub")  # fmt: skip
    parser.add_argument("--adapter_name_or_path", "--adapter-name-or-path", type=_names, default=[], metavar="A[,B]",
                        help="folders of adapters on MODEL, applied in this order")  # fmt: skip
    parser.add_argument("--model_name_or_path", "--model-name-or-path", metavar="BASE",
                        help="where MODEL is an adapter: its base (what its adapter_config.json names)")  # fmt: skip
    parser.add_argument("--model_revision", "--model-revision", default="main", metavar="REVISION",
                        help="branch, tag or commit of a model on a hub (main)")  # fmt: skip
    parser.add_argument("--cache_dir", "--cache-dir", metavar="DIR",
                        help="where files of a hub are kept (the hub's own cache)")  # fmt: skip
    parser.add_argument("--prompt", metavar="TEXT", help="what to answer")
    parser.add_argument("--system", metavar="TEXT", help="the system message (the chat template's own)")
    parser.add_argument("--stream", action="store_true", help="print the answer while it is written")
    parser.add_argument("--raw", action="store_true", help="continue the prompt as it is, without the chat template")
    parser.add_argument("--enable_thinking", "--enable-thinking", action=argparse.BooleanOptionalAction,
                        help="the thinking switch of chat templates that have one (the template's own)")  # fmt: skip
    pictures = parser.add_argument_group(
        "pictures of the first message (of vision-language models; sizes are the settings that it was trained with)"
    )
    for kind in ("image", "video"):
        pictures.add_argument(
            f"--{kind}", dest="pictures", action="append", type=partial(_picture, kind), metavar="FILE",
            help=f"show it this {kind}, where the prompt has <{kind}>, else before its text; may be repeated",
        )  # fmt: skip
    for name, number, text in _PICTURE_SETTINGS:
        spellings = (f"--{name}", f"--{name.replace('_', '-')}")
        pictures.add_argument(*spellings, type=number, metavar="N", help=text)
    sampling = parser.add_argument_group("how to write (what is left out is the model's generation_config.json's)")
    sampling.add_argument("--max_new_tokens", "--max-new-tokens", type=int, default=512, metavar="N",
                          help="tokens of an answer at most (512)")  # fmt: skip
    sampling.add_argument("--temperature", type=float, default=0.0, metavar="T",
                          help="0 takes the likeliest token at every step (0)")  # fmt: skip
    sampling.add_argument("--top_p", "--top-p", type=float, metavar="P",
                          help="sample from the likeliest tokens that reach this probability together")  # fmt: skip
    sampling.add_argument("--top_k", "--top-k", type=int, metavar="K", help="sample from the K likeliest tokens")
    sampling.add_argument("--repetition_penalty", "--repetition-penalty", type=float, metavar="X",
                          help="above 1 makes tokens that have occurred less likely")  # fmt: skip
    sampling.add_argument("--seed", type=int, metavar="N", help="the same seed samples the same answer")
    parser.set_defaults(run=run)


def _names(text: str) -> list[str]:
    return [name for name in map(str.strip, text.split(",")) if name]


def _picture(kind: str, path: str) -> tuple[str, str]:
    return kind, path


def run(args: argparse.Namespace) -> int:
    """Load the model and answer.

    Raises:
        MegatuneError: (SETTINGS) flags; (INPUT) what the model or an adapter lacks, or a picture; (DATA) a picture
            that cannot be read, or a prompt that is empty, too long or has not a tag for each picture; what a hub
            refuses the model with.
    """
    from megatune.generation.adapters import adapted_model
    from megatune.generation.inputs import find_model
    from megatune.generation.options import GenerationOptions, PictureFile, check_options

    given = {each.name: getattr(args, each.name) for each in fields(GenerationOptions) if hasattr(args, each.name)}
    given["pictures"] = tuple(PictureFile(*each) for each in args.pictures or ())
    options = GenerationOptions(**given)
    check_options(options)  # before the seconds that loading takes

    named = adapted_model(args.model, args.model_name_or_path, args.adapter_name_or_path)
    folder = find_model(_model_dir(named.base, args))

    from megatune.generation.chat import answer_prompts, chat, print_reply
    from megatune.generation.generator import Generator

    generator = Generator.load(folder, options, named.adapters)
    if args.prompt is not None:
        print_reply(generator, args.prompt, stream=args.stream)
    elif sys.stdin.isatty():
        chat(generator, stream=args.stream)
    else:
        answer_prompts(generator, sys.stdin, stream=args.stream)
    return ExitCode.DONE


def _model_dir(name: str, args: argparse.Namespace) -> Path:
    """Return the folder that is named, or that a model on a hub is fetched into."""
    from megatune.generation.inputs import nearest_folder
    from megatune.hub.models import is_hub_id, open_model

    path = Path(name)
    if not is_hub_id(name) and not path.is_dir():
        return path  # `find_model` says what is wrong with it
    try:
        return open_model(name, args.model_revision, args.cache_dir).fetch()
    except MegatuneError as error:
        if path.is_dir() or (near := nearest_folder(path)) is None:
            raise
        findings = [replace(each, fix=f"did you mean {near}? Else {each.fix}") for each in error.findings]
        raise MegatuneError(findings, ExitCode.INPUT) from error
