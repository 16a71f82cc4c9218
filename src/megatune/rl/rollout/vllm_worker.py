"""What runs in vLLM's worker processes: new weights, and the temperature of log-probabilities.

vLLM mixes `WeightUpdates` into its worker class (`worker_extension_cls`); names begin with megatune_, since they must
not meet its own.
"""

from __future__ import annotations

import logging
from typing import Any

import torch

from megatune.rl.transport import LostPeerError, Parcel, Receiver, Route


class _KnownWarning(logging.Filter):
    """Drops warnings, at every update, that modules without weights of their own in checkpoints got none.

    Args:
        modules: vLLM's names of their classes.
    """

    def __init__(self, *modules: str) -> None:
        super().__init__()
        self._known = tuple(f"{each}: Failed to load weights" for each in modules)

    def filter(self, record: logging.LogRecord) -> bool:
        return not record.getMessage().startswith(self._known)


class WeightUpdates:
    """Loads a model's weights again, bucket by bucket."""

    model_runner: Any
    vllm_config: Any
    device: torch.device
    rank: int
    _receiver: Receiver
    _adapter: dict[str, torch.Tensor]

    def megatune_scale_logits(self, factor: float) -> int:
        """Multiply the logits: log-probabilities are those at temperature 1 / factor then. Return the number of output
        layers: only the last stage of a pipeline is sure to have one."""
        from vllm.model_executor.layers.logits_processor import LogitsProcessor

        found = [each for each in self.model_runner.model.modules() if isinstance(each, LogitsProcessor)]
        assert len(found) <= 1, f"{len(found)} output layers"
        for each in found:
            each.scale *= factor
        return len(found)

    def megatune_begin(self) -> None:
        """Let the layers take weights again, which have been packed for their kernels since they were loaded."""
        from vllm.config import set_current_vllm_config
        from vllm.model_executor.model_loader.reload import initialize_layerwise_reload
        from vllm.platforms import current_platform

        model = self.model_runner.model
        tied = self.model_runner.model_config.hf_text_config.tie_word_embeddings
        for handler in logging.getLogger("vllm").handlers:
            if not any(isinstance(each, _KnownWarning) for each in handler.filters):
                handler.addFilter(_KnownWarning("RotaryEmbedding", *(["ParallelLMHead"] if tied else [])))
        if current_platform.is_cpu():
            for module in model.modules():
                method: Any = getattr(module, "quant_method", None)
                if getattr(method, "moe_kernel", None) is not None:
                    # On a CPU experts are packed only where their kernel is made: make it anew.
                    method.moe_kernel = None
        with set_current_vllm_config(self.vllm_config):
            initialize_layerwise_reload(model)

    def megatune_connect(self, route: Route, first: int) -> None:
        """Meet the trainer, which weights come from.

        Args:
            first: number of this engine's first receiver.
        """
        self._receiver, self._adapter = Receiver(route, first + self.rank, self.device), {}

    def megatune_keep(self, parcel: Parcel, names: list[str]) -> bool:
        """Take tensors of an adapter; return whether they came, as `megatune_load`."""
        try:
            with self._receiver.opened(parcel) as tensors:
                self._adapter |= {name: tensors[name].cpu().clone() for name in names}
        except LostPeerError:
            return False
        return True

    def megatune_write(self, path: str) -> None:
        """Write the adapter that has arrived, once for all workers."""
        from safetensors.torch import save_file

        if self.rank == 0:
            save_file(self._adapter, path)
        self._adapter = {}

    def megatune_load(self, parcel: Parcel, names: list[str]) -> bool:
        """Take tensors of a bucket by their names in checkpoints; return whether they came: vLLM does not carry the
        class of an error from its workers."""
        from vllm.config import set_current_vllm_config

        try:
            with self._receiver.opened(parcel) as tensors, set_current_vllm_config(self.vllm_config):
                # vLLM keeps tensors until their layer is complete, and the next bucket is written to the same memory.
                kept = ((name, tensors[name].to(self.device, copy=True)) for name in names)
                self.model_runner.model.load_weights(kept)
        except LostPeerError:
            return False
        return True

    def megatune_commit(self) -> None:
        """Pack the new weights for the kernels."""
        from vllm.config import set_current_vllm_config
        from vllm.model_executor.model_loader.reload import finalize_layerwise_reload
        from vllm.platforms import current_platform

        model = self.model_runner.model
        with set_current_vllm_config(self.vllm_config):
            finalize_layerwise_reload(model, self.model_runner.model_config)
            head: Any = getattr(model, "lm_head", None)
            if current_platform.is_cpu() and hasattr(head, "quant_method"):
                # An output layer that is tied to the embedding has a packed copy on a CPU, which the reload leaves.
                head.quant_method.process_weights_after_loading(head)
