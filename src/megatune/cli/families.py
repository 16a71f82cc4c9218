"""`megatune families`: lists the supported model types, and the tests that compare each with Transformers."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING

from megatune.cli.command import Command
from megatune.config.setting import Group
from megatune.errors import ExitCode, Finding, MegatuneError, did_you_mean

if TYPE_CHECKING:
    from megatune.families.evidence import Evidence

_EPILOG = """    megatune families
    megatune families gpt_oss                every layout that was compared
    megatune families --json

The figures are fp32 differences of the worst layout: "logits" is the largest difference divided by the largest logit,
"loss" is relative, "gradients" is the relative L2 difference of the worst parameter. docs/parity.md has every layout.

exit codes: 0 listed, 66 an unknown model type"""


class FamiliesOptions(Group):
    """The options of `megatune families`."""

    json_: bool = False
    """print JSON"""


COMMAND = Command(
    name="families",
    usage="[MODEL_TYPE ...] [--json]",
    about="Lists the supported model types of config.json: the inputs and checkpoints of each, and the layouts in "
    "which tests compared it with Transformers. Without a model type it lists all.",
    epilog=_EPILOG,
    options=FamiliesOptions,
    most_words=None,
)


def run(verb: str, words: Sequence[str]) -> int:
    """Print the requested families.

    Raises:
        MegatuneError: INPUT if a model type is not supported.
    """
    from megatune.families import FAMILIES
    from megatune.families.evidence import evidence_of

    given = COMMAND.read(words)
    given.stop()
    unknown = [word for word in given.words if word not in FAMILIES]
    if unknown:
        fix = "`megatune families` lists the model types"
        findings = [
            Finding(f"model_type {word!r} is not supported", fix=did_you_mean(word, FAMILIES, fix)) for word in unknown
        ]
        raise MegatuneError(findings, ExitCode.INPUT)
    found = evidence_of(given.words or sorted(FAMILIES))
    if given.options.json_:
        print(json.dumps([each.as_json() for each in found], indent=2))
    else:
        print("\n".join(_details(found) if given.words else _overview(found)))
    return int(ExitCode.DONE)


def _overview(found: Sequence[Evidence]) -> Iterator[str]:
    from megatune.pages import columns

    head = ("model_type", "input", "torch_dist", "quantized", "layouts", "logits", "loss", "gradients", "bf16")
    yield from columns([head, *(_row(each) for each in found)], left=(0, 1, 2, 3))
    yield ""
    yield f"{len(found)} model types. layouts: number compared with Transformers; figures: the worst in fp32."
    yield "quantized: checkpoint formats that are dequantized to 16 or 32 bits. template is null, the tokenizer's own,"
    yield "or one in docs/templates.md. `megatune families MODEL_TYPE` lists the layouts and LoRA's modules."


def _row(each: Evidence) -> tuple[str, ...]:
    figures = (f"{each.worst[key]:.1e}" for key in ("logits", "loss", "gradients"))
    return (
        each.model_type,
        "text, media" if each.media else "text",
        "yes" if each.torch_dist else "refused",
        ", ".join(each.quantized) or "refused",
        str(len(each.layouts)),
        *figures,
        str(len(each.sixteen_bit) or "-"),
    )


def _details(found: Sequence[Evidence]) -> Iterator[str]:
    for each in found:
        yield each.model_type
        yield f"  input       {'text, images and videos' if each.media else 'text'}"
        yield f"  torch_dist  {'read and written' if each.torch_dist else 'refused'}"
        yield f"  quantized   {', '.join(each.quantized) or 'refused'}"
        yield f"  LoRA        {', '.join(each.adapted)}"
        yield f"  worst       {', '.join(f'{key} {figure:.1e}' for key, figure in each.worst.items())}"
        yield f"  fp32        {'; '.join(each.layouts)}"
        yield f"  bf16        {'; '.join(each.sixteen_bit) or '-'}"
