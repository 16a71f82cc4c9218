"""vLLM, if installed: an engine that one thread steps, used by `infer`, `serve` and rollouts."""

from __future__ import annotations

import importlib.util
import os
import queue
import threading
import uuid
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

from pydantic import ValidationError
from transformers import AutoConfig, GenerationConfig

from megatune.errors import ExitCode, Finding, MegatuneError
from megatune.families.peft_config import read_peft_config
from megatune.generation.options import GenerationOptions, Sampling
from megatune.generation.prompt import IsStopped, OnText, Prompt, Reply

_POLL_SECONDS = 0.1  # between two checks whether an answer is still wanted


class Vllm:
    """vLLM's LLMEngine with the model of a folder. Only one thread uses it.

    Args:
        arguments: vLLM's engine arguments.

    Attributes:
        engine: the LLMEngine.
        stops: ids of the model's stop tokens.

    Raises:
        MegatuneError: (UNAVAILABLE) vLLM cannot load the model on this machine.
    """

    def __init__(self, folder: Path, arguments: Mapping[str, Any]) -> None:
        from vllm import EngineArgs
        from vllm.v1.engine.llm_engine import LLMEngine

        with starting("vLLM", folder):
            given = {"disable_log_stats": True, **arguments, "model": str(folder)}
            self.engine = LLMEngine.from_engine_args(EngineArgs(**given))
        config = AutoConfig.from_pretrained(folder, local_files_only=True, trust_remote_code=False)
        self.generation, self.config = _generation(folder), config.get_text_config()
        stops = self.generation.eos_token_id or config.eos_token_id or []
        self.stops = [stops] if isinstance(stops, int) else list(stops)

    def add(self, id_: str, token_ids: Sequence[int], params: Mapping[str, Any], adapter: Any = None) -> None:
        """Add a request; `step` returns its new tokens.

        Args:
            params: arguments of vLLM's SamplingParams.
            adapter: vLLM's LoRARequest.
        """
        from vllm import SamplingParams
        from vllm.sampling_params import RequestOutputKind

        chosen = SamplingParams(**params, output_kind=RequestOutputKind.DELTA)
        self.engine.add_request(id_, {"prompt_token_ids": list(token_ids)}, chosen, lora_request=adapter)

    def step(self) -> list[tuple[str, Any]]:
        """Run an engine step; return (id, CompletionOutput) of each request with new tokens."""
        return [(output.request_id, output.outputs[0]) for output in self.engine.step()]

    def abort(self, ids: Sequence[str]) -> None:
        """Abort requests."""
        self.engine.abort_request(list(ids))

    def call(self, method: str | Callable[..., Any], *args: Any) -> list[Any]:
        """Call a method, or a function of the worker, in every worker."""
        found: list[Any] = self.engine.collective_rpc(method, args=args)
        return found

    def close(self) -> None:
        """End the workers, and remove shared memory that CPU workers leave behind."""
        names = {name for name in self.call(_name_of_shared_memory) if name}
        self.engine.engine_core.shutdown()
        for name in names:
            for path in Path("/dev/shm").glob(f"{name}-*-cpushm*"):
                path.unlink(missing_ok=True)


def _name_of_shared_memory(worker: Any) -> str:
    """Return the prefix of the names of a worker's files in /dev/shm, "" if vLLM has none."""
    return os.environ.get("VLLM_DIST_IDENT", "")


def check_vllm(options: GenerationOptions, adapters: Sequence[Path]) -> None:
    """Raise if vLLM does not support the options.

    Raises:
        MegatuneError: (SETTINGS) several adapters, images or videos; (UNAVAILABLE) vLLM is not installed.
    """
    findings = []
    if len(adapters) > 1:
        fix = "`megatune export --merge_lora` writes a merged model, which vLLM takes"
        findings.append(Finding("several adapters at once are not supported with vLLM", "--adapters", fix=fix))
    if options.media:
        fix = "leave out --infer_backend vllm"
        findings.append(Finding("images and videos are not supported with vLLM", "--image, --video", fix=fix))
    if findings:
        raise MegatuneError(findings, ExitCode.SETTINGS)
    if importlib.util.find_spec("vllm") is None:
        fix = "run the command in an environment with vLLM (docs/infer.md), or leave out --infer_backend vllm"
        raise MegatuneError(Finding("vLLM is not installed", "--infer_backend", fix=fix), ExitCode.UNAVAILABLE)


Event = str | Reply | BaseException


@dataclass(slots=True)
class _Answer:
    """An answer in progress, and the events for the thread that waits for it."""

    events: queue.SimpleQueue[Event] = field(default_factory=queue.SimpleQueue)
    text: str = ""
    num_tokens: int = 0


class VllmBackend:
    """Continues prompts with vLLM for many threads at the same time; see `Backend`. An internal thread steps the
    engine.

    Attributes:
        context: maximum number of tokens of a prompt and its answer.
    """

    max_concurrency = 256

    def __init__(self, vllm: Vllm, adapter: Path | None = None) -> None:
        self._vllm, self._answers = vllm, dict[str, _Answer]()
        self.context: int | None = vllm.engine.model_config.max_model_len
        self._adapter = lora_request(adapter, 1) if adapter else None
        self._asked: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()  # None ends the thread
        self._thread = threading.Thread(target=self._run, name="vllm", daemon=True)
        self._thread.start()

    @classmethod
    def load(cls, folder: Path, adapters: Sequence[Path], arguments: Mapping[str, Any]) -> VllmBackend:
        """Load a model and at most one adapter; `arguments` are vLLM's engine arguments."""
        given = dict(arguments)
        if adapters:
            given |= lora_arguments(read_peft_config(adapters[0]).rank)
        set_environment()
        return cls(Vllm(folder, given), *adapters)

    def write(
        self, prompt: Prompt, sampling: Sampling, on_text: OnText | None = None, is_stopped: IsStopped | None = None
    ) -> Reply:
        """Continue one prompt; see `Backend.write`."""
        return self._finished(*self._begin(prompt, sampling), on_text, is_stopped)

    def write_all(self, prompts: Sequence[Prompt], sampling: Sampling) -> list[Reply]:
        """Continue prompts; see `Backend.write_all`."""
        return [self._finished(*begun) for begun in [self._begin(prompt, sampling) for prompt in prompts]]

    def _finished(
        self, id_: str, answer: _Answer, on_text: OnText | None = None, is_stopped: IsStopped | None = None
    ) -> Reply:
        """Wait for an answer."""
        try:
            while True:
                try:
                    event = answer.events.get(timeout=_POLL_SECONDS)
                except queue.Empty:
                    if not self._thread.is_alive():
                        raise RuntimeError("vLLM was closed before the answer was complete") from None
                else:
                    if isinstance(event, BaseException):
                        raise event
                    if isinstance(event, Reply):
                        return event
                    if on_text is not None:
                        on_text(event)
                if is_stopped is not None and is_stopped():
                    self._asked.put(partial(self._end, id_))  # which sends the reply
                    is_stopped = None
        finally:
            self._asked.put(partial(self._end, id_))

    def _begin(self, prompt: Prompt, sampling: Sampling) -> tuple[str, _Answer]:
        """Let the thread begin an answer; return its id and state."""
        id_, answer, params = uuid.uuid4().hex, _Answer(), self._params(sampling, prompt)

        def begin() -> None:
            try:
                self._vllm.add(id_, prompt.token_ids, params, self._adapter)
                self._answers[id_] = answer
            except Exception as error:
                answer.events.put(error)

        self._asked.put(begin)
        return id_, answer

    def _run(self) -> None:
        while True:
            while not self._answers or not self._asked.empty():
                if (asked := self._asked.get()) is None:
                    return
                asked()
            try:
                for id_, piece in self._vllm.step():
                    self._note(id_, piece)
            except Exception as error:
                for answer in self._answers.values():
                    answer.events.put(error)
                self._answers = {}

    def _note(self, id_: str, piece: Any) -> None:
        """Send the new text of an answer."""
        if (answer := self._answers.get(id_)) is None:  # aborted
            return
        answer.text, answer.num_tokens = answer.text + piece.text, answer.num_tokens + len(piece.token_ids)
        if piece.text:
            answer.events.put(piece.text)
        if piece.finish_reason is not None:
            self._conclude(id_, stopped=piece.finish_reason == "stop")

    def _end(self, id_: str) -> None:
        """Abort an answer unless it has ended already."""
        if id_ in self._answers:
            self._vllm.abort([id_])
            self._conclude(id_, stopped=False)

    def _conclude(self, id_: str, *, stopped: bool) -> None:
        answer = self._answers.pop(id_)
        answer.events.put(Reply(answer.text, answer.num_tokens, stopped=stopped))

    def close(self) -> None:
        """End the thread and vLLM's processes."""
        self._asked.put(None)
        self._thread.join(10)
        self._vllm.close()

    def _params(self, sampling: Sampling, prompt: Prompt) -> dict[str, Any]:
        """Return the arguments of vLLM's SamplingParams; defaults are those of generation_config.json."""
        if prompt.media:
            finding = Finding("images and videos are not supported with vLLM", fix="leave them out")
            raise MegatuneError(finding, ExitCode.INPUT)
        own, temperature = self._vllm.generation, sampling.temperature
        room = self._vllm.engine.model_config.max_model_len - len(prompt.token_ids)
        if temperature is None:
            temperature = (own.temperature or 1.0) if own.do_sample else 0.0
        chosen = {
            "max_tokens": min(sampling.max_new_tokens, room),
            "temperature": temperature,
            "repetition_penalty": sampling.repetition_penalty or own.repetition_penalty,
            "seed": sampling.seed,
            "stop": list(sampling.stop_words) or None,
            "include_stop_str_in_output": sampling.keep_stop_word,
        }
        if temperature > 0:
            chosen["top_p"] = sampling.top_p or own.top_p
            chosen["top_k"] = sampling.top_k or own.top_k
        return {name: value for name, value in chosen.items() if value is not None}


def set_environment(*, on_gpu: bool | None = None, more: Mapping[str, str] | None = None) -> None:
    """Set the environment variables that vLLM reads when it is imported, unless they are set already.

    Args:
        on_gpu: whether vLLM runs on a GPU; None if torch decides.
        more: variables that override the defaults.
    """
    if on_gpu is None:
        import torch

        on_gpu = torch.accelerator.is_available()
    chosen = {
        "VLLM_NO_USAGE_STATS": "1",
        "DO_NOT_TRACK": "1",
        "VLLM_ENABLE_V1_MULTIPROCESSING": "0",  # the engine runs in this process and takes tensors directly
        "VLLM_LOGGING_LEVEL": "WARNING",
    }
    if on_gpu:  # a process that has initialized CUDA cannot fork processes that use it
        chosen["VLLM_WORKER_MULTIPROC_METHOD"] = "spawn"
    else:
        chosen |= {"VLLM_CPU_OMP_THREADS_BIND": "nobind", "VLLM_CPU_KVCACHE_SPACE": "1"}
    for name, value in (chosen | dict(more or {})).items():
        os.environ.setdefault(name, value)


def lora_arguments(rank: int) -> dict[str, Any]:
    """Return vLLM's arguments for a model with one adapter."""
    return {"enable_lora": True, "max_loras": 1, "max_lora_rank": max(8, 1 << (rank - 1).bit_length())}


def lora_request(folder: Path, number: int) -> Any:
    """Return the LoRARequest of an adapter; each adapter needs another number."""
    from vllm.lora.request import LoRARequest

    return LoRARequest(f"adapter-{number}", number, str(folder))


@contextmanager
def starting(engine: str, model: object) -> Iterator[None]:
    """Convert an engine's error while loading a model to one line (UNAVAILABLE)."""
    try:
        yield
    except (RuntimeError, ValueError, OSError, TypeError) as error:
        # pydantic's errors are ValueErrors whose first line is only their number.
        found = error.errors() if isinstance(error, ValidationError) else []
        why = "; ".join(each["msg"] for each in found) or str(error).strip().partition("\n")[0]
        fix = f"see the lines above, or the log of the engine; change the arguments of {engine}"
        finding = Finding(f"{engine} cannot load the model", str(model), why, fix)
        raise MegatuneError(finding, ExitCode.UNAVAILABLE) from error


def _generation(folder: Path) -> GenerationConfig:
    try:
        return GenerationConfig.from_pretrained(folder, local_files_only=True)
    except OSError:  # there is no such file
        return GenerationConfig()
