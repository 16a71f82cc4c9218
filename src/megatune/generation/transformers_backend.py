"""The Transformers backend: loads a model onto this machine's device, and generates with it."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from safetensors import SafetensorError
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    AutoModelForImageTextToText,
    PreTrainedModel,
    PreTrainedTokenizerBase,
    StoppingCriteriaList,
)
from transformers.models.auto.modeling_auto import MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES
from transformers.utils import logging as transformers_logging

from megatune.bridge.auto import register_types
from megatune.data import encode
from megatune.errors import ExitCode, Finding, MegatuneError
from megatune.families.rope import context_length
from megatune.generation.inputs import has_tokenizer
from megatune.generation.media import generate_inputs
from megatune.generation.options import Sampling
from megatune.generation.prompt import IsStopped, OnText, Prompt, Reply, cut_at_stop_word
from megatune.generation.stopping import StopCriteria, Stream, stop_ids
from megatune.half_precision import multiply_in_fp32

if TYPE_CHECKING:
    from megatune.encoders import Vision


def load_tokenizer(folder: Path, adapters: Sequence[Path] = ()) -> PreTrainedTokenizerBase:
    """Load the tokenizer of a model, or of the last adapter that has one.

    Raises:
        MegatuneError: (INPUT) it cannot be read, or does not belong to the model.
    """
    folder = next((each for each in reversed(adapters) if has_tokenizer(each)), folder)
    return encode.load_tokenizer(folder)


def load_pretrained(folder: Path, dtype: torch.dtype | str = "auto", **options: Any) -> PreTrainedModel:
    """Load a causal language model or a vision-language model onto this machine's device.

    Args:
        options: further arguments of from_pretrained.

    Raises:
        MegatuneError: (INPUT) a file is missing or cannot be read.
    """
    transformers_logging.set_verbosity_error()
    transformers_logging.disable_progress_bar()
    register_types()
    try:
        model_type = AutoConfig.from_pretrained(folder, local_files_only=True, trust_remote_code=False).model_type
        shows = model_type in MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES
        model, loading = (AutoModelForImageTextToText if shows else AutoModelForCausalLM).from_pretrained(
            folder,
            local_files_only=True,
            trust_remote_code=False,
            use_safetensors=True,
            dtype=dtype,
            output_loading_info=True,
            **options,
        )
    except (OSError, ValueError, KeyError, RuntimeError, SafetensorError) as error:
        raise _cannot_load(folder, str(error)) from error
    # Transformers initializes missing tensors randomly, and its warning is silenced above.
    if missing := sorted(loading["missing_keys"]):
        raise _cannot_load(folder, f"{len(missing)} tensors are missing: {', '.join(missing[:3])}")
    multiply_in_fp32(model.dtype)
    device = torch.accelerator.current_accelerator(check_available=True) or torch.device("cpu")
    loaded: PreTrainedModel = model.to(device)
    return loaded


class TransformersBackend:
    """Continues prompts with Transformers' generate.

    Args:
        model: a causal language model, or a vision-language model, in eval mode.
        vision: None for a text-only model.
    """

    max_concurrency = 1

    def __init__(
        self, model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, vision: Vision | None = None
    ) -> None:
        self.model, self.tokenizer, self.vision = model, tokenizer, vision
        self.context: int | None = context_length(model.config.get_text_config().to_dict())

    @classmethod
    def load(
        cls,
        folder: Path,
        tokenizer: PreTrainedTokenizerBase,
        adapters: Sequence[Path] = (),
        vision: Vision | None = None,
    ) -> TransformersBackend:
        """Load a model onto this machine's device, and apply adapters in order.

        Raises:
            MegatuneError: (INPUT) a file is missing or cannot be read.
        """
        model = load_pretrained(folder)
        if adapters:
            from megatune.bridge.peft_model import apply_adapter, merge_adapters

            model = apply_adapter(merge_adapters(model, adapters[:-1]), adapters[-1]).model
        return cls(model.eval(), tokenizer, vision)

    def write(
        self, prompt: Prompt, sampling: Sampling, on_text: OnText | None = None, is_stopped: IsStopped | None = None
    ) -> Reply:
        """Continue one prompt; see `Backend.write`."""
        stream = Stream(self.tokenizer, sampling, on_text) if on_text else None
        return self._generate([prompt], sampling, stream, is_stopped)[0]

    def write_all(self, prompts: Sequence[Prompt], sampling: Sampling) -> list[Reply]:
        """Continue prompts in one batch, and those with images or videos one by one."""
        together = [each for each in prompts if not each.media]
        replies = iter(self._generate(together, sampling) if together else ())
        return [self.write(each, sampling) if each.media else next(replies) for each in prompts]

    def close(self) -> None:
        """Do nothing: there is only memory to free."""

    def _generate(
        self,
        prompts: Sequence[Prompt],
        sampling: Sampling,
        stream: Stream | None = None,
        is_stopped: IsStopped | None = None,
    ) -> list[Reply]:
        """Continue prompts in a batch; a prompt with images or videos must be alone."""
        context = self.context or sys.maxsize
        limits = [min(sampling.max_new_tokens, context - len(each.token_ids)) for each in prompts]
        input_ids, attention_mask = left_padded([each.token_ids for each in prompts])
        num_prompt_tokens = input_ids.shape[1]
        inputs = {"input_ids": input_ids, "attention_mask": attention_mask}
        if self.vision is not None:
            inputs |= generate_inputs(self.vision, input_ids, prompts[0].media)
        criteria = StopCriteria(self.tokenizer, sampling, limits, num_prompt_tokens, is_stopped)
        if sampling.seed is not None:
            torch.manual_seed(sampling.seed)
        with torch.inference_mode():
            generated = self.model.generate(
                max_new_tokens=max(limits),
                streamer=stream,
                stopping_criteria=StoppingCriteriaList([criteria]),
                **{name: tensor.to(self.model.device) for name, tensor in inputs.items()},
                **_arguments(sampling),
            )
        lengths = criteria.lengths
        return [
            self._reply(ids[: min(lengths.get(row, limit), limit)], sampling, lengths.get(row, limit + 1) <= limit)
            for row, (ids, limit) in enumerate(zip(generated[:, num_prompt_tokens:].tolist(), limits, strict=True))
        ]

    def _reply(self, new_ids: list[int], sampling: Sampling, by_word: bool) -> Reply:
        """Return the reply of generated tokens; tokens after a stop token are padding."""
        stops = stop_ids(self.model.generation_config)
        end = next((index + 1 for index, each in enumerate(new_ids) if each in stops), None)
        text, cut = cut_at_stop_word(self.tokenizer.decode(new_ids[:end], skip_special_tokens=True), sampling)
        return Reply(text, len(new_ids[:end]), stopped=end is not None or cut or by_word)


def left_padded(prompts: Sequence[list[int]]) -> tuple[torch.Tensor, torch.Tensor]:
    """Pad prompts on the left; return int64 input_ids and attention_mask, both [prompts, tokens].

    A prompt is padded with its own first token, because a repetition penalty also applies to padding.
    """
    longest = max(map(len, prompts))
    ids = [each[:1] * (longest - len(each)) + each for each in prompts]
    mask = [[0] * (longest - len(each)) + [1] * len(each) for each in prompts]
    return torch.tensor(ids), torch.tensor(mask)


def _arguments(sampling: Sampling) -> dict[str, Any]:
    """Return the arguments of `generate` that override the model's generation config."""
    temperature = sampling.temperature
    do_sample = None if temperature is None else temperature > 0
    chosen = {"do_sample": do_sample, "repetition_penalty": sampling.repetition_penalty}
    if do_sample is not False:
        chosen |= {"temperature": sampling.temperature, "top_p": sampling.top_p, "top_k": sampling.top_k}
    return {name: value for name, value in chosen.items() if value is not None}


def _cannot_load(folder: Path, why: str) -> MegatuneError:
    what, fix = "the model cannot be loaded", "copy or save the model again"
    return MegatuneError(Finding(what, str(folder), why.strip().partition("\n")[0], fix), ExitCode.INPUT)
