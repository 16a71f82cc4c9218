"""Extension of vLLM's worker processes: weight updates, and the temperature of log-probabilities.

vLLM mixes `WeightUpdates` into its worker class (`worker_extension_cls`); the prefix megatune_ avoids name conflicts.
"""

from __future__ import annotations

import logging
from typing import Any

import torch

from megatune.rl.broadcast import LostPeerError
from megatune.rl.transport import PackedBucket, Receiver, Route


class _KnownWarning(logging.Filter):
    """Drops the warnings at every update about modules without weights in the checkpoint.

    Args:
        modules: names of vLLM's classes.
    """

    def __init__(self, *modules: str) -> None:
        super().__init__()
        self._known = tuple(f"{each}: Failed to load weights" for each in modules)

    def filter(self, record: logging.LogRecord) -> bool:
        return not record.getMessage().startswith(self._known)


class WeightUpdates:
    """Reloads a model's weights, bucket by bucket."""

    model_runner: Any
    vllm_config: Any
    device: torch.device
    rank: int
    _receiver: Receiver
    _adapter: dict[str, torch.Tensor]

    def megatune_scale_logits(self, factor: float) -> int:
        """Multiply the logits, so that log-probabilities are at temperature 1 / factor. Return the number of output
        layers; only the last pipeline stage must have one."""
        from vllm.model_executor.layers.logits_processor import LogitsProcessor

        found = [each for each in self.model_runner.model.modules() if isinstance(each, LogitsProcessor)]
        assert len(found) <= 1, f"{len(found)} output layers"
        for each in found:
            each.scale *= factor
        return len(found)

    def megatune_begin(self) -> None:
        """Prepare the layers for new weights; the present ones are packed for their kernels."""
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
                    # On a CPU, experts are packed when their kernel is created: have it recreated.
                    method.moe_kernel = None
        with set_current_vllm_config(self.vllm_config):
            initialize_layerwise_reload(model)

    def megatune_connect(self, route: Route, first: int) -> None:
        """Connect with the trainer, which sends weights.

        Args:
            first: index of this engine's first receiver.
        """
        self._receiver, self._adapter = Receiver(route, first + self.rank, self.device), {}

    def megatune_keep(self, bucket: PackedBucket, names: list[str]) -> bool:
        """Store tensors of an adapter; return whether they arrived, see `megatune_load`."""
        try:
            with self._receiver.opened(bucket) as tensors:
                self._adapter |= {name: tensors[name].cpu().clone() for name in names}
        except LostPeerError:
            return False
        return True

    def megatune_write(self, path: str) -> None:
        """Write the received adapter to a file, by one of the workers."""
        from safetensors.torch import save_file

        if self.rank == 0:
            save_file(self._adapter, path)
        self._adapter = {}

    def megatune_load(self, bucket: PackedBucket, names: list[str]) -> bool:
        """Load tensors of a bucket by their checkpoint names; return whether they arrived, because vLLM does not pass
        on the class of a worker's exception."""
        from vllm.config import set_current_vllm_config

        try:
            with self._receiver.opened(bucket) as tensors, set_current_vllm_config(self.vllm_config):
                # vLLM keeps references until a layer is complete, and the next bucket reuses the memory: copy.
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
                # On a CPU, an output layer tied to the embedding has a packed copy that the reload does not update.
                head.quant_method.process_weights_after_loading(head)
