"""The only package that imports megatron. Importing it prepares the process for Megatron-Core; see also device.py."""

import logging
import os
import warnings

from megatune.engine.device import install

# Warnings about packages that this engine replaces, or about interfaces between two of its dependencies.
_NOISE = (
    "Apex is not installed", "Transformer Engine and Apex are not installed", ".*Transformer Engine.*",
    ".*torch.cuda.amp.*", ".*_all_gather_base.*", ".*_reduce_scatter_base.*", ".*is deprecated.*",
    ".*nv-grouped-gemm.*", ".*barrier\\(\\).*", ".*No device id is provided.*", ".*CUDA initialization.*",
    ".*NVIDIA.*driver.*", ".*can't be imported.*", ".*cross_entropy_loss_fusion.*",
)  # fmt: skip


def quiet() -> None:
    """Silence warnings that users cannot act on. Must run before megatron is imported."""
    for message in _NOISE:
        warnings.filterwarnings("ignore", message=message)
    warnings.filterwarnings("ignore", module=r"megatron(\.|$)")
    warnings.filterwarnings("ignore", module=r"torch\.distributed(\.|$)")
    # torch.utils.cpp_extension, which Megatron-Core imports, reports a missing CUDA_HOME on machines without a GPU.
    for name in ("megatron", "bitsandbytes", "torch.utils.cpp_extension"):
        logging.getLogger(name).setLevel(logging.ERROR)
    os.environ.setdefault("NVTE_SUPPRESS_WARNINGS", "1")
    os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")


quiet()
install()
