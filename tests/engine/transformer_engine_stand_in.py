"""The package transformer_engine as far as Megatron-Core's wrappers need it, computed by torch on a CPU.

Importing this module installs it: nothing of Megatron-Core may have been imported before. Linear and LayerNormLinear
have the arguments, parameters and marks of Transformer Engine 2.9 (pytorch/module/linear.py, layernorm_linear.py);
whatever else Megatron-Core imports from the package is an empty class.
"""

from __future__ import annotations

import contextlib
import importlib.abc
import importlib.machinery
import sys
from types import ModuleType
from typing import Any

import torch
from torch import Tensor


class _Empty(type):
    def __getattr__(cls, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return _Empty(name, (), {})


class _Module(ModuleType):
    def __getattr__(self, name: str) -> Any:
        if name.startswith("_"):  # 2.9 has no _SplitAlongDim any more
            raise AttributeError(name)
        return _Empty(name, (), {})


class _Finder(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    def find_spec(self, fullname: str, path: Any, target: Any = None) -> Any:
        if fullname.split(".")[0] == "transformer_engine" and not fullname.rpartition(".")[2].startswith("_"):
            return importlib.machinery.ModuleSpec(fullname, self, is_package=True)
        return None

    def create_module(self, spec: Any) -> ModuleType:
        return _Module(spec.name)

    def exec_module(self, module: ModuleType) -> None: ...


class Linear(torch.nn.Module):
    def __init__(
        self,
        in_features: int,
        out_features: int,
        sequence_parallel: bool = False,
        fuse_wgrad_accumulation: bool = False,
        tp_group: Any = None,
        tp_size: int = 1,
        get_rng_state_tracker: Any = None,
        rng_tracker_name: str | None = None,
        init_method: Any = None,
        bias: bool = True,
        return_bias: bool = False,
        params_dtype: torch.dtype | None = None,
        parallel_mode: str | None = None,
        device: Any = "cuda",
    ) -> None:
        super().__init__()
        assert tp_group is None or tp_group.size() == tp_size
        assert not fuse_wgrad_accumulation, "a stand-in has no kernel that adds to main_grad"
        self.tp_group, self.tp_size, self.parallel_mode = tp_group, tp_size, parallel_mode
        self.sequence_parallel, self.return_bias, self.use_bias = sequence_parallel and tp_size > 1, return_bias, bias
        if parallel_mode == "column":
            out_features //= tp_size
        else:
            in_features //= tp_size
        made = {"dtype": params_dtype, "device": device}
        self.in_features, self.out_features = in_features, out_features
        self.weight = torch.nn.Parameter(torch.empty(out_features, in_features, **made))
        # Without one it has an empty tensor, which is no parameter.
        self.bias = torch.nn.Parameter(torch.zeros(out_features, **made)) if bias else torch.empty(0)
        if bias and parallel_mode == "row":
            self.bias.sequence_parallel = self.sequence_parallel

    def forward(self, inp: Tensor, is_first_microbatch: bool | None = None) -> Any:
        from megatron.core import tensor_parallel as exchanges

        group = {"group": self.tp_group}
        if self.parallel_mode == "column" and self.tp_size > 1:
            gather, copy = (
                exchanges.gather_from_sequence_parallel_region,
                exchanges.copy_to_tensor_model_parallel_region,
            )
            inp = gather(inp, **group) if self.sequence_parallel else copy(inp, **group)
        output = inp @ self.weight.t()
        if self.parallel_mode == "row" and self.tp_size > 1:
            scatter = exchanges.reduce_scatter_to_sequence_parallel_region
            reduce = exchanges.reduce_from_tensor_model_parallel_region
            output = scatter(output, **group) if self.sequence_parallel else reduce(output, **group)
        if self.return_bias:
            return output, self.bias
        return output + self.bias if self.use_bias else output


class LayerNormLinear(Linear):
    def __init__(
        self,
        in_features: int,
        out_features: int,
        eps: float = 1e-5,
        normalization: str = "LayerNorm",
        return_layernorm_output: bool = False,
        zero_centered_gamma: bool = False,
        **of_linear: Any,
    ) -> None:
        super().__init__(in_features, out_features, **of_linear)
        assert normalization == "RMSNorm"
        assert not return_layernorm_output
        self.eps, self.zero_centered_gamma = eps, zero_centered_gamma
        of_norm = torch.empty(in_features, dtype=self.weight.dtype, device=self.weight.device)
        self.layer_norm_weight = torch.nn.Parameter(of_norm)
        self.layer_norm_weight.sequence_parallel = self.sequence_parallel

    def forward(self, inp: Tensor, is_first_microbatch: bool | None = None) -> Any:
        weight = self.layer_norm_weight + 1 if self.zero_centered_gamma else self.layer_norm_weight
        return super().forward(torch.nn.functional.rms_norm(inp, weight.shape, weight, self.eps))


sys.meta_path.insert(0, _Finder())
import transformer_engine.pytorch as installed  # noqa: E402

sys.modules["transformer_engine"].__version__ = "2.9.0"
installed.Linear, installed.LayerNormLinear = Linear, LayerNormLinear
# What the decoder's block asks for, with nothing to offload.
offload = importlib.import_module("transformer_engine.pytorch.cpu_offload")
offload.get_cpu_offload_context = lambda *unused, **unused_too: (contextlib.nullcontext(), lambda tensor: tensor)
