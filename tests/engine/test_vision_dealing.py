"""Pictures dealt over ranks: where their features are after they were gathered, and where gradients go."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from megatune.config.settings import ParallelSettings
from megatune.engine import groups
from megatune.engine.layers.vision.features import gather_features, place_features, plan_gather
from megatune.engine.sequences import local_tokens


@given(media=st.lists(st.tuples(st.integers(1, 5), st.integers(0, 3)), min_size=1, max_size=12))
def test_gathered_features_are_brought_into_the_order_of_tokens(media):
    counts, owners = torch.tensor(media).T
    owner_of_token = owners.repeat_interleave(counts)
    tokens = torch.arange(len(owner_of_token))
    dealt = [plan_gather(counts, owners, rank, 4) for rank in range(4)]
    gathered = torch.full((4 * dealt[0].longest,), -1)
    for rank, of_rank in enumerate(dealt):
        assert torch.equal(of_rank.own, tokens[owner_of_token == rank])
        gathered[rank * of_rank.longest :][: len(of_rank.own)] = of_rank.own
    assert all(torch.equal(gathered[of_rank.order], tokens) for of_rank in dealt)


COUNTS = torch.tensor([3, 1, 4, 2])
TOKENS = int(COUNTS.sum())


def gathered_on_ranks(owners: list[int], parallel: ParallelSettings) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """On every rank: gathered features, the gradient of this rank's own, and which tokens these are."""
    coords = groups.build(parallel, seed=0, timeout=60)
    rank = coords.cp_rank * coords.tp_size + coords.tp_rank
    dealt = plan_gather(COUNTS, torch.tensor(owners), rank, coords.tp_size * coords.cp_size)
    own = dealt.own[:, None].float().expand(-1, 3).clone().requires_grad_()
    whole = gather_features(own, dealt)
    # A context-parallel rank has a gradient of the tokens that it holds only, the same on tensor-parallel ranks.
    held = torch.arange(TOKENS) % coords.cp_size == coords.cp_rank
    (whole * (held * (1 + torch.arange(TOKENS)))[:, None]).sum().backward()
    return whole.detach(), own.grad, dealt.own


@pytest.mark.parametrize("owners", [[0, 1, 2, 3], [3, 3, 1, 3], [2, 2, 2, 2]])
def test_each_rank_gets_the_whole_gradient_of_its_pictures(pool, owners):
    parallel = ParallelSettings(tensor_model_parallel_size=2, context_parallel_size=2)
    for whole, gradient, own in pool.run(4, gathered_on_ranks, owners, parallel):
        assert torch.equal(whole, torch.arange(TOKENS).float()[:, None].expand(-1, 3))
        assert torch.equal(gradient, (1 + own).float()[:, None].expand(-1, 3))


class Places:
    """Tokens 2 and 3 of a row, and 5, 6 and 11 of the next one, of 12 tokens each."""

    places = torch.tensor([2, 3, 12 + 5, 12 + 6, 12 + 11])


def placed_on_ranks(parallel: ParallelSettings) -> tuple[int, torch.Tensor, torch.Tensor]:
    coords = groups.build(parallel, seed=0, timeout=60)
    features = torch.arange(1.0, 6.0)[:, None, None] * torch.tensor([1.0, 10.0, 100.0])[:, None].expand(3, 2)
    embeddings = torch.zeros(12 // coords.cp_size, 2, 2)
    return coords.cp_rank, *place_features(features, embeddings, Places(), (0, 12))


@pytest.mark.parametrize("cp_size", [1, 2])
def test_features_are_where_their_tokens_are(pool, cp_size):
    expected = torch.zeros(12, 2, 3)
    for number, (token, row) in enumerate([(2, 0), (3, 0), (5, 1), (6, 1), (11, 1)], 1):
        expected[token, row] = number * torch.tensor([1.0, 10.0, 100.0])
    parallel = ParallelSettings(context_parallel_size=cp_size)
    for rank, embeddings, deepstack in pool.run(cp_size, placed_on_ranks, parallel):
        of_rank = expected[local_tokens((0, 12), rank, cp_size)]
        assert torch.equal(embeddings, of_rank[..., :1].expand(-1, -1, 2))
        assert torch.equal(deepstack, of_rank[..., 1:, None].expand(-1, -1, -1, 2))
