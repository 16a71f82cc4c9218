"""The table of verbs, and the format of --help pages."""

from __future__ import annotations

import argparse
import textwrap

# The module of each verb, whose `run` takes the verb and the arguments after it, and a description.
VERBS = {
    "train": ("train", "train a model from a YAML file"),
    "sft": ("train", "supervised fine-tuning, from flags"),
    "pt": ("train", "continued pretraining on plain text, from flags"),
    "dpo": ("train", "preference training on pairs of answers, from flags"),
    "kto": ("train", "preference training on desirable and undesirable answers, from flags"),
    "rm": ("train", "train a reward model on pairs of answers, from flags"),
    "cls": ("train", "train a classifier on conversations or texts with labels, from flags"),
    "plan": ("plan", "estimate which layouts are valid and fit in memory, and how fast they are, without a run"),
    "explain": ("explain", "explain what a setting does, when to change it, and what it costs"),
    "families": ("families", "list the supported models, and the tests of each"),
    "data": ("data", "inspect the data: preview rows, count tokens"),
    "verify": ("verify", "compare a layout with Transformers: logits, loss, gradients"),
    "infer": ("infer", "chat, complete, or answer data sets, from a Hugging Face or a training checkpoint"),
    "evaluate": ("evaluate", "score a model: its answers to a data set, or benchmarks of lm_eval"),
    "serve": ("serve", "serve a model over HTTP with the OpenAI API"),
    "export": ("export", "merge adapters into their model, or convert from and to Megatron-Core checkpoints"),
    "rl": ("rl", "reinforcement learning with verifiable rewards, on Ray"),
    "new": ("new", "plan, write and start a new run from a few answers"),
    "sweep": ("sweep", "train a file with several values of settings, and compare the runs"),
    "rehearse": ("rehearse", "test a run with a small model on this machine before it starts elsewhere"),
    "ui": ("ui", "serve a web page of runs: curves, settings, rows, checkpoints, logs; start, stop, resume"),
    "report": ("report", "write one HTML file that shows or compares runs"),
    "doctor": ("doctor", "check machines before a run: versions, GPUs, disks, network, speed of ranks"),
    "demo-model": ("demo_model", "create a tiny random checkpoint with a real tokenizer"),
    "megatron": ("swift", "train and export with Megatron-SWIFT's command lines"),
    "swift": ("swift", "export, infer and deploy with ms-swift's command lines"),
    "completion": ("completion", "write completions for bash, zsh or fish"),
    "shims": ("shims", "write programs named megatron and swift"),
}

# The verbs in --help, grouped by task.
GROUPS = {
    "look": "families data explain ui report doctor",
    "plan": "plan rehearse verify",
    "train": "new train sft pt dpo kto rm cls rl sweep",
    "use": "infer evaluate serve",
    "convert": "export demo-model megatron swift shims completion",
}

# The verbs that take --quiet.
RUNS = "train sft pt dpo kto rm cls rl new sweep rehearse verify infer evaluate export demo-model megatron swift"
QUIET = "--quiet"
_WIDTH = 100


class Help(Exception):  # noqa: N818 - not an error
    """Ends a verb with a --help page."""


def new_parser(program: str, usage: str, about: str, epilog: str) -> argparse.ArgumentParser:
    """Return a parser that formats pages; it does not parse arguments."""
    return argparse.ArgumentParser(
        prog=program, usage=usage, description="\n".join(textwrap.wrap(about, _WIDTH)), epilog=epilog, add_help=False,
        formatter_class=lambda prog: argparse.RawDescriptionHelpFormatter(prog, max_help_position=28, width=_WIDTH),
    )  # fmt: skip
