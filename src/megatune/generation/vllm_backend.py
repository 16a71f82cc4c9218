"""vLLM in place of Transformers, where it is installed: `vllm.LLM` for answers at once, AsyncLLM for the endpoint.

Written to vLLM's documented interface, https://docs.vllm.ai; no machine of this project's tests runs it.
"""

from __future__ import annotations

import asyncio
import importlib.util
import uuid
from collections.abc import AsyncGenerator, Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from transformers import AutoConfig, GenerationConfig, PreTrainedTokenizerBase

from megatune.bridge.auto import register_types
from megatune.errors import ExitCode, Finding, MegatuneError
from megatune.families.rope import context_length
from megatune.generation.options import GenerationOptions, Sampling
from megatune.generation.prompt import IsStopped, OnText, Prompt, Reply


def check_vllm(options: GenerationOptions, adapters: Sequence[Path]) -> None:
    """Refuse what is not built with vLLM.

    Raises:
        MegatuneError: (SETTINGS) adapters or pictures; (UNAVAILABLE) vLLM is not installed.
    """
    findings = []
    if adapters:
        fix = "`megatune export --merge_lora` writes a merged model, which vLLM takes"
        findings.append(Finding("adapters are not supported with vLLM", "--adapters", fix=fix))
    if options.pictures:
        fix = "leave out --infer_backend vllm"
        findings.append(Finding("images and videos are not supported with vLLM", "--image, --video", fix=fix))
    if findings:
        raise MegatuneError(findings, ExitCode.SETTINGS)
    if importlib.util.find_spec("vllm") is None:
        fix = "pip install vllm, on a machine with a GPU that it supports, or leave out --infer_backend vllm"
        raise MegatuneError(Finding("vLLM is not installed", "--infer_backend", fix=fix), ExitCode.UNAVAILABLE)


class _Defaults:
    """What a model's files say: its context, and how it is sampled where nothing else is said."""

    def __init__(self, folder: Path, arguments: Mapping[str, Any]) -> None:
        register_types()
        config = AutoConfig.from_pretrained(folder, local_files_only=True, trust_remote_code=False).get_text_config()
        self.context: int | None = arguments.get("max_model_len") or context_length(config.to_dict())
        try:
            self.generation = GenerationConfig.from_pretrained(folder, local_files_only=True)
        except OSError:  # there is no such file
            self.generation = GenerationConfig()

    def arguments(self, sampling: Sampling, prompt: Prompt) -> dict[str, Any]:
        """Return the arguments of vLLM's SamplingParams."""
        if prompt.pictures:
            raise MegatuneError(
                Finding("images and videos are not supported with vLLM", fix="ask without"), ExitCode.INPUT
            )
        room = sampling.max_new_tokens
        if self.context is not None:
            room = min(room, self.context - len(prompt.token_ids))
        temperature = sampling.temperature
        if temperature is None:
            temperature = (self.generation.temperature or 1.0) if self.generation.do_sample else 0.0
        chosen = {
            "max_tokens": room,
            "temperature": temperature,
            "repetition_penalty": sampling.repetition_penalty or self.generation.repetition_penalty,
            "seed": sampling.seed,
            "stop": list(sampling.stop_words) or None,
            "include_stop_str_in_output": sampling.keep_stop_word,
        }
        if temperature > 0:
            chosen["top_p"] = sampling.top_p or self.generation.top_p
            chosen["top_k"] = sampling.top_k or self.generation.top_k
        return {name: value for name, value in chosen.items() if value is not None}


class VllmBackend:
    """Continues prompts with vLLM, which batches them itself."""

    def __init__(self, llm: Any, defaults: _Defaults) -> None:
        self._llm, self._defaults, self.context = llm, defaults, defaults.context

    @classmethod
    def load(
        cls,
        folder: Path,
        tokenizer: PreTrainedTokenizerBase,
        adapters: Sequence[Path],
        vision: object,
        *,
        arguments: Mapping[str, Any],
    ) -> VllmBackend:
        """Load a model; `arguments` are vLLM's own, beside the model's folder."""
        from vllm import LLM

        with _loading(folder):
            return cls(LLM(model=str(folder), **arguments), _Defaults(folder, arguments))

    def write(
        self, prompt: Prompt, sampling: Sampling, on_text: OnText | None = None, is_stopped: IsStopped | None = None
    ) -> Reply:
        """Continue one prompt; the text comes in one piece, and cannot be stopped."""
        (reply,) = self.write_all([prompt], sampling)
        if on_text is not None:
            on_text(reply.text)
        return reply

    def write_all(self, prompts: Sequence[Prompt], sampling: Sampling) -> list[Reply]:
        """Continue prompts; see `Backend.write_all`."""
        from vllm import SamplingParams

        params = [SamplingParams(**self._defaults.arguments(sampling, each)) for each in prompts]
        asked = [{"prompt_token_ids": each.token_ids} for each in prompts]
        return [_reply(output.outputs[0]) for output in self._llm.generate(asked, params, use_tqdm=False)]


class VllmStreams:
    """Continues prompts side by side, as an endpoint needs it; see `Streams`."""

    def __init__(self, folder: Path, arguments: Mapping[str, Any]) -> None:
        from vllm.engine.arg_utils import AsyncEngineArgs
        from vllm.v1.engine.async_llm import AsyncLLM

        with _loading(folder):
            self._defaults = _Defaults(folder, arguments)
            self._engine = AsyncLLM.from_engine_args(AsyncEngineArgs(model=str(folder), **arguments))
        self.context = self._defaults.context
        self._tokenizing = asyncio.Lock()

    async def stream(
        self, make: Callable[[], Prompt], sampling: Sampling
    ) -> AsyncGenerator[Prompt | str | Reply, None]:
        """Yield the prompt, pieces of text, and the whole answer."""
        from vllm import SamplingParams
        from vllm.sampling_params import RequestOutputKind

        async with self._tokenizing:  # a tokenizer serves one thread
            prompt = await asyncio.to_thread(make)
        arguments = self._defaults.arguments(sampling, prompt)
        params = SamplingParams(**arguments, output_kind=RequestOutputKind.DELTA)
        yield prompt
        text, num_tokens, reason = "", 0, None
        # Where the caller leaves, this generator is closed, and vLLM aborts the request.
        outputs = self._engine.generate(
            request_id=uuid.uuid4().hex, prompt={"prompt_token_ids": prompt.token_ids}, sampling_params=params
        )
        async for output in outputs:
            piece = output.outputs[0]
            num_tokens, reason = num_tokens + len(piece.token_ids), piece.finish_reason
            if piece.text:
                text += piece.text
                yield piece.text
        yield Reply(text, num_tokens, stopped=reason == "stop")

    def stop(self) -> None:
        """Leave answers to the endpoint, which ends them after a while; see `Streams.stop`."""

    def close(self) -> None:
        """End its processes."""
        self._engine.shutdown()


@contextmanager
def _loading(folder: Path) -> Iterator[None]:
    """Turn what vLLM refuses a model, or this machine, with into one line (UNAVAILABLE)."""
    try:
        yield
    except (RuntimeError, ValueError, OSError) as error:  # pydantic's errors are ValueErrors
        why = str(error).strip().partition("\n")[0]
        finding = Finding("vLLM cannot load the model", str(folder), why, "leave out --infer_backend vllm")
        raise MegatuneError(finding, ExitCode.UNAVAILABLE) from error


def _reply(output: Any) -> Reply:
    return Reply(output.text, len(output.token_ids), stopped=output.finish_reason == "stop")
