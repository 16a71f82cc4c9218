"""Store logits, loss and gradients of one computation in a folder, since two models may not fit into memory; and
compare two computations, with tolerances.

loss.json               {"loss": mean over all trained tokens}
logits.safetensors      sample index -> logits, [s, vocabulary]
gradient*.safetensors   grad/HUGGING_FACE_NAME -> gradient
trace-*.safetensors     sample index/PLACE -> output of this place, [s, ...]; one file per pipeline stage
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from safetensors.torch import save_file
from torch import Tensor

from megatune.bridge.safetensors_files import SafetensorsFolder


def write_loss(folder: Path, loss: float) -> None:
    """Write the mean loss."""
    (folder / "loss.json").write_text(json.dumps({"loss": loss}), encoding="utf-8")


def write_logits(folder: Path, logits: Sequence[Tensor]) -> None:
    """Write the logits of each sample, [s, vocabulary] on the CPU."""
    save_file({str(index): values.contiguous() for index, values in enumerate(logits)}, folder / "logits.safetensors")


def write_gradients(folder: Path, gradients: Mapping[str, Tensor]) -> None:
    """Write gradients by Hugging Face name."""
    save_file({f"grad/{name}": values.contiguous() for name, values in gradients.items()},
              folder / "gradient.safetensors")  # fmt: skip


def write_trace(folder: Path, stage: int, outputs: Mapping[tuple[int, str], Tensor]) -> None:
    """Write the outputs of one pipeline stage by sample and place, [s, ...] on the CPU."""
    save_file({f"{sample}/{place}": values.contiguous() for (sample, place), values in outputs.items()},
              folder / f"trace-{stage}.safetensors")  # fmt: skip


class Trace:
    """The outputs that `write_trace` wrote into a folder, read tensor by tensor."""

    def __init__(self, folder: Path) -> None:
        self._file_of = {
            name: file
            for path in sorted(folder.glob("trace-*.safetensors"))
            for file in [SafetensorsFolder(folder, path.stem)]
            for name in file.names()
        }

    @property
    def places(self) -> set[str]:
        """Places with outputs."""
        return {name.partition("/")[2] for name in self._file_of}

    @property
    def num_samples(self) -> int:
        return len({name.partition("/")[0] for name in self._file_of})

    def output(self, sample: int, place: str) -> Tensor:
        """Return the output of a place for one sample, [s, ...]."""
        return self._file_of[f"{sample}/{place}"].whole(f"{sample}/{place}")


class Results:
    """The logits, loss and gradients in a folder, read tensor by tensor."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.loss: float = json.loads((folder / "loss.json").read_text(encoding="utf-8"))["loss"]
        self._logits = SafetensorsFolder(folder, "logits")
        self._gradients = SafetensorsFolder(folder, "gradient")

    @property
    def num_samples(self) -> int:
        return len(self._logits.names())

    @property
    def names(self) -> set[str]:
        """Hugging Face names of the parameters with a gradient."""
        return {name.removeprefix("grad/") for name in self._gradients.names()}

    def logits(self, sample: int) -> Tensor:
        """Return the logits of one sample, [s, vocabulary]."""
        return self._logits.whole(str(sample))

    def gradient(self, name: str) -> Tensor:
        """Return the gradient of one parameter, in its Hugging Face shape."""
        return self._gradients.whole(f"grad/{name}")


# fp32: for another order of summation. A gap of orders of magnitude is a bug.
LOGITS_TOLERANCE = 1e-4
LOSS_TOLERANCE = 1e-6
GRADIENT_TOLERANCE = 1e-5

# 16 bits: the ratio of our rounding errors to those of Transformers in the same dtype, both relative to fp32 with the
# same weights. Tensor parallelism rounds each partial sum once more before adding: two independent errors of the same
# size add up to 1.41 times one. Both errors are random: that of a norm or bias with few dozen elements varies by about
# 20 %, that of all logits or of the whole gradient hardly at all.
SIXTEEN_BIT_ROOM = 1.5
SIXTEEN_BIT_PARAMETER_ROOM = 2.0

WHOLE_GRADIENT = "gradient"

# Gradients that are merged. The bias of keys without rotary embeddings, as in an encoder with learned positions, adds
# the same to all scores of a query: its gradient is only rounding error, so it is compared together with its matrix's.
_KEYS = r"(\.vision_tower\..*\.k_proj)\.(weight|bias)$", r"\1.*"
_EXPERTS = r"\.experts\.\d+\.", ".experts.*."


@dataclass(frozen=True, slots=True)
class Errors:
    """The errors of one computation relative to another.

    Attributes:
        logits: the largest difference, relative to the largest logit.
        loss: relative error.
        gradient: relative L2 error of all gradients as one vector.
        gradients: relative L2 error of each parameter's gradient, by Hugging Face name; infinite if only one of the
            computations has it.
        loss_reach: upper bound of the relative error of the loss from these logits: a cross-entropy changes by at most
            twice as much as the logits.
    """

    logits: float
    loss: float
    gradient: float
    gradients: dict[str, float]
    loss_reach: float


@dataclass(frozen=True, slots=True)
class Difference:
    """The error of one compared quantity, or of the output of one place of the model.

    Attributes:
        name: "logits", "loss", "gradient" for all gradients, a parameter's Hugging Face name for its own, or a place.
        error: for a place the relative L2 error over all tokens of all samples; for its gradients the worst weight's.
        worst: sample and token, both from 0, with the largest error of a place; None if unknown.
        moved: number of tokens that a router sends to other experts.
    """

    name: str
    error: float
    tolerance: float
    worst: tuple[int, int] | None = None
    moved: int = 0

    @property
    def passes(self) -> bool:
        return self.error <= self.tolerance


def compare(computed: Results, truth: Results, *, experts_together: bool = False) -> Errors:
    """Return the errors of `computed` relative to `truth`; those of values that are not finite are infinite.

    Args:
        experts_together: merge the gradients of all experts of a layer, named experts.*; for 16 bits, in which rounding
            may change the expert of a token with almost equal scores, and one token matters much to an expert.
    """
    gap, largest = 0.0, 0.0
    for sample in range(truth.num_samples):
        expected = truth.logits(sample).double()
        gap = _worst(gap, (computed.logits(sample).double() - expected).abs().max().item())
        largest = _worst(largest, expected.abs().max().item())
    gaps = {name: _gradient_gap(computed, truth, name) for name in sorted(computed.names | truth.names)}
    gaps = _together(gaps, *_KEYS)
    if experts_together:
        gaps = _together(gaps, *_EXPERTS)
    return Errors(
        logits=relative(gap, largest),
        loss=relative(abs(computed.loss - truth.loss), abs(truth.loss)),
        gradient=relative(*(math.hypot(*norms) for norms in zip(*gaps.values(), strict=True))),
        gradients={name: relative(*norms) for name, norms in gaps.items()},
        loss_reach=relative(2 * gap, abs(truth.loss)),
    )


def _gradient_gap(computed: Results, truth: Results, name: str) -> tuple[float, float]:
    """Return L2 norms of the difference, infinite if one of the two has no such gradient, and of the truth."""
    if name not in computed.names or name not in truth.names:
        return math.inf, 1.0
    expected = truth.gradient(name).double()
    difference = computed.gradient(name).double() - expected
    return torch.linalg.vector_norm(difference).item(), torch.linalg.vector_norm(expected).item()


def _together(gaps: dict[str, tuple[float, float]], pattern: str, name_of_all: str) -> dict[str, tuple[float, float]]:
    merged: dict[str, tuple[float, float]] = {}
    for name, (gap, size) in gaps.items():
        together = re.sub(pattern, name_of_all, name)
        other_gap, other_size = merged.get(together, (0.0, 0.0))
        merged[together] = math.hypot(gap, other_gap), math.hypot(size, other_size)
    return merged


def _worst(one: float, other: float) -> float:
    """Return the larger one; unlike `max`, never loses a NaN."""
    return math.nan if math.isnan(one) or math.isnan(other) else max(one, other)


def relative(gap: float, size: float) -> float:
    """Return gap / size; infinite if either is not finite, or if only size is 0."""
    if not math.isfinite(gap) or not math.isfinite(size):
        return math.inf
    if size == 0:
        return 0.0 if gap == 0 else math.inf
    return gap / size


def check_errors(errors: Errors, stock: Errors | None = None) -> list[Difference]:
    """Return every quantity with its error and tolerance.

    Args:
        stock: the errors of Transformers in the same 16-bit dtype; None for fp32.
    """
    if stock is None:
        logits, loss, gradient = LOGITS_TOLERANCE, LOSS_TOLERANCE, GRADIENT_TOLERANCE
        tolerances = dict.fromkeys(errors.gradients, GRADIENT_TOLERANCE)
    else:
        # The error of a mean loss is often small by chance, so that of Transformers is not a usable tolerance.
        logits, loss = SIXTEEN_BIT_ROOM * stock.logits, SIXTEEN_BIT_ROOM * stock.loss_reach
        gradient = SIXTEEN_BIT_ROOM * stock.gradient
        tolerances = {name: SIXTEEN_BIT_PARAMETER_ROOM * stock.gradients.get(name, 0.0) for name in errors.gradients}
    return [
        Difference("logits", errors.logits, logits),
        Difference("loss", errors.loss, loss),
        Difference(WHOLE_GRADIENT, errors.gradient, gradient),
        *(Difference(name, error, tolerances[name]) for name, error in errors.gradients.items()),
    ]


def check_layouts(errors: Errors, others: Errors) -> list[Difference]:
    """Compare the errors of two layouts in 16 bits, both relative to fp32 with the same weights: the larger error must
    be within the tolerance that the smaller one gives, as for Transformers. Return the larger errors."""
    pairs = zip(check_errors(errors, others), check_errors(others, errors), strict=True)
    return [max(pair, key=lambda one: one.error) for pair in pairs]
