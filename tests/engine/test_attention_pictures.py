"""Attention in which the tokens of a picture see each other, against its definition, with gradients."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from megatune.engine.layers.attention.core import Attention, attend_rows
from megatune.engine.sequences import Runs, media_runs

S, ROWS = 23, 2
BOUNDARIES = (0, 9, S)
# In the flattened rows: of one token, across nothing, at the end of a document and of a row, and longer than a window.
RUNS: Runs = ((2, 6), (6, 7), (7, 9), (S + 10, S + S))


def defined(query: Tensor, key: Tensor, value: Tensor, window: int | None) -> Tensor:
    """Softmax over all pairs of tokens that may see each other."""
    document = torch.bucketize(torch.arange(S), torch.tensor(BOUNDARIES), right=True)
    places = torch.arange(S)
    near = places[None] > places[:, None] - (window or S)
    outputs = []
    for row in range(ROWS):
        picture = torch.full((S,), -1)
        for number, (start, stop) in enumerate(RUNS):
            if start // S == row:
                picture[start % S : (stop - 1) % S + 1] = number
        together = (picture[:, None] == picture[None]) & (picture[:, None] >= 0)
        sees = (document[:, None] == document[None]) & ((places[None] <= places[:, None]) | together) & near
        scores = torch.einsum("qnd,knd->nqk", query[:, row], key[:, row].repeat_interleave(2, 1)) * 0.4
        shares = scores.masked_fill(~sees, -torch.inf).softmax(-1)
        outputs.append(torch.einsum("nqk,knd->qnd", shares, value[:, row].repeat_interleave(2, 1)))
    return torch.stack(outputs, 1)


@pytest.mark.parametrize("backend", ["auto", "unfused"])
@pytest.mark.parametrize("window", [None, 5])
def test_tokens_of_a_picture_see_each_other(backend: str, window: int | None) -> None:
    from megatron.core.transformer.enums import AttnBackend

    generator = torch.Generator().manual_seed(0)
    shapes = (S, ROWS, 4, 8), (S, ROWS, 2, 8), (S, ROWS, 2, 8)
    tensors = [torch.randn(shape, generator=generator, dtype=torch.float64).requires_grad_() for shape in shapes]
    weights = torch.randn(shapes[0], generator=generator, dtype=torch.float64)
    found = attend_rows(*tensors, Attention(BOUNDARIES, 0.4, AttnBackend[backend], window, media=RUNS))
    expected = defined(*tensors, window)
    torch.testing.assert_close(found, expected)
    gradients = (torch.autograd.grad((each * weights).sum(), tensors) for each in (found, expected))
    for one, other in zip(*gradients, strict=True):
        torch.testing.assert_close(one, other)


def test_runs_end_with_their_document_and_row() -> None:
    tokens = [place for start, stop in RUNS for place in range(start, stop)]
    found = media_runs(torch.tensor([*tokens[:7], 9, *tokens[7:]]), BOUNDARIES)
    assert found == ((2, 9), (9, 10), (S + 10, S + S))
    assert media_runs(torch.tensor([S - 1, S]), (0, S)) == ((S - 1, S), (S, S + 1))
    assert media_runs(torch.tensor([], dtype=torch.int64), (0, S)) == ()
