"""Where values of responses lie in micro-batches, and how they come back."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from megatune.data.batches import Collator
from megatune.data.rows import IGNORE_INDEX
from megatune.engine.sequences import ROUTING
from megatune.rl.samples import Rollouts
from megatune.rl.worker import batching


def samples() -> Rollouts:
    tokens = [np.arange(10, 15), np.arange(20, 27)]
    routing = [np.full((len(each) - 1, 2, 3), place, np.int16) for place, each in enumerate(tokens)]
    values = [np.array([1, 2], np.float32), np.array([3, 4, 5, 6], np.float32)]
    return Rollouts(tokens, [3, 3], {"advantages": values}, {"scores": np.array([7.0, 8.0])}, routing)


@pytest.mark.parametrize("packed", [False, True])
def test_values_lie_where_their_tokens_are_predicted(packed):
    made, names = samples(), {"per_token": ["advantages"], "per_sample": ["scores"]}
    collator = Collator(2, packed, 4, 4, 0)
    (batch,) = batching.batches(made, [[[1, 0]]], 0, collator, same_length=False, replay=True, **names)
    width = batch.input_ids.shape[1]
    expected = torch.zeros(16)
    expected[2:6], expected[10:12] = torch.tensor([3.0, 4, 5, 6]), torch.tensor([1.0, 2])
    assert width == (16 if packed else 8)
    assert torch.equal(batch.extras["advantages"].values.view(-1), expected)
    labels = batch.labels.view(-1)
    assert labels[2:6].tolist() == [23, 24, 25, 26]
    assert labels[10:12].tolist() == [13, 14]
    assert (labels != IGNORE_INDEX).sum() == 6
    assert batch.extras["scores"].values.tolist() == [8, 7]
    # An expert's number and 1; 0 for the last token, which the engine did not compute, and for padding.
    chosen = batch.extras[ROUTING].values.view(16, 2, 3)
    assert chosen[:, 1, 2].tolist() == [2] * 6 + [0, 0] + [1] * 4 + [0] * 4
    back = batching.response_values(made, [1, 0], batch, batch.extras["advantages"].values)
    for sample, values in enumerate(made.per_token["advantages"]):
        assert np.array_equal(back[sample], values)
        assert np.array_equal(batching.merge_ranks([{}, back, {}], made)[sample], values)


def test_what_was_observed_is_no_label_and_has_no_values():
    """A response of four tokens, of which an environment wrote the second and third."""
    made = samples()
    values = {"advantages": [made.per_token["advantages"][0], np.array([3, 6], np.float32)]}
    turns = Rollouts(made.tokens, made.prompt_lengths, values, observed=[(), ((1, 3),)])
    (batch,) = batching.batches(
        turns, [[[1]]], 0, Collator(1, True, 4, 4, 0), same_length=False, per_token=["advantages"]
    )
    assert batch.labels.view(-1).tolist() == [
        *[IGNORE_INDEX] * 2,
        23,
        IGNORE_INDEX,
        IGNORE_INDEX,
        26,
        *[IGNORE_INDEX] * 2,
    ]
    assert batch.extras["advantages"].values.view(-1).tolist() == [0, 0, 3, 0, 0, 6, 0, 0]
    assert batching.response_values(turns, [1], batch, batch.extras["advantages"].values)[1].tolist() == [3, 6]


def test_what_is_missing_is_named():
    made = samples()
    with pytest.raises(ValueError, match="no rank returned 1 of 2 samples, such as 1"):
        batching.merge_ranks([{0: np.zeros(2, np.float32)}], made)
    with pytest.raises(ValueError, match="the rollout engine returned no routing"):
        batching.routing(Rollouts(made.tokens, made.prompt_lengths), [0])
    with pytest.raises(ValueError, match="routing of 4 tokens for a sample of 7"):
        batching.routing(Rollouts(made.tokens, made.prompt_lengths, routing=[made.routing[0]] * 2), [1])
