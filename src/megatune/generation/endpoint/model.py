"""A model for the endpoint: what makes its prompts, and what answers them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from megatune.generation.endpoint.streams import OneAtATime, Streams
from megatune.generation.inputs import check_writes, find_model
from megatune.generation.options import GenerationOptions
from megatune.generation.pictures import read_pictures
from megatune.generation.prompter import Prompter
from megatune.generation.transformers_backend import TransformersBackend, load_tokenizer


def load_model(
    path: Path,
    options: GenerationOptions,
    adapters: Sequence[Path] = (),
    *,
    vllm: Mapping[str, Any] | None = None,
    max_waiting: int = 16,
) -> tuple[Prompter, Streams]:
    """Load a model as `Generator.load` does; one without a chat template completes texts alone.

    Args:
        vllm: vLLM's arguments; None computes with Transformers.
        max_waiting: prompts that may wait, for Transformers.

    Raises:
        MegatuneError: (INPUT) what is missing or can't be read; (SETTINGS) a thinking switch that it lacks.
    """
    folder = find_model(path)
    check_writes(folder, adapters)
    pictures = read_pictures(folder, options)
    tokenizer = load_tokenizer(folder, adapters)
    source = str(adapters[-1] if adapters else folder)
    if vllm is not None:
        from megatune.generation.vllm import VllmBackend, VllmStreams

        of_vllm = VllmBackend.load(folder, tokenizer, adapters, None, arguments=vllm)
        return Prompter(tokenizer, options, source, of_vllm.context, pictures), VllmStreams(of_vllm)
    backend = TransformersBackend.load(folder, tokenizer, adapters, pictures.vision if pictures else None)
    prompter = Prompter(tokenizer, options, source, backend.context, pictures)
    return prompter, OneAtATime(backend, max_waiting)
