"""What the proofs share: Transformers' numbers, what a layout computes, and the table of both."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import pytest
import torch
from parity_table import ParityTable
from safetensors.torch import load_file, save_file

from megatune.verify.reference import write_reference
from megatune.verify.results import Results
from megatune.verify.samples import FP16_LOSS_SCALE, Sample

WriteReference = Callable[..., Results]


@pytest.fixture(scope="session")
def reference(tmp_path_factory: pytest.TempPathFactory) -> WriteReference:
    """Transformers' numbers, computed once for each checkpoint, tokens and dtype; those in fp64 are rounded to fp32."""
    made: dict[object, Results] = {}

    def make(model: Path, samples: Sequence[Sample], weights: str = "float32", dtype: str = "float32") -> Results:
        key = (model, tuple(samples), weights, dtype)
        if key not in made:
            folder = tmp_path_factory.mktemp("reference")
            write_reference(
                model,
                samples,
                folder,
                weights_dtype=getattr(torch, weights),
                dtype=getattr(torch, dtype),
                loss_scale=FP16_LOSS_SCALE if weights == "float16" else 1.0,
            )
            for path in folder.glob("*.safetensors") if dtype == "float64" else ():
                save_file({name: tensor.float() for name, tensor in load_file(path).items()}, path)
            made[key] = Results(folder)
        return made[key]

    return make


@pytest.fixture(scope="session")
def table() -> Iterator[ParityTable]:
    """Written at the end of the session, where asked for."""
    table = ParityTable()
    yield table
    table.write_if_asked()
