"""Losses that keep experts equally busy and logits small, computed over the real tokens of a whole micro-batch.

Ranks of tensor and context parallelism hold parts of it. Each computes its share of the loss: the shares sum to the
loss, and their gradients, which the engine sums over these ranks, to its gradient. Nothing is counted twice.

Legend: n tokens of this rank, k choices of each, E experts, D documents of the micro-batch.
"""

from __future__ import annotations

import torch
from megatron.core import parallel_state
from torch import Tensor
from torch.distributed import ProcessGroup

from megatune.engine.device import send
from megatune.engine.sequences import Sequences


def balance_loss(
    probs: Tensor, experts: Tensor, is_real: Tensor, documents: Tensor, num_documents: int, group: ProcessGroup
) -> Tensor:
    """This rank's share of E / k · Σ_e f_e · P_e (Switch Transformer, arXiv:2101.03961), 1 where experts are equally
    busy: f_e is how many of a document's choices fall on expert e, for each of its tokens, and P_e the expert's mean
    probability. The mean over documents is weighted by their real tokens; of one document it is that of all tokens.

    Args:
        probs: fp32 [n, E], of all experts; sums to 1 for each token.
        experts: int64 [n, k], the choices that count.
        is_real: bool [n]; the others are padding.
        documents: int64 [n], of each token, below `num_documents`.
        group: the ranks that hold the micro-batch.

    Returns:
        fp32 scalar.
    """
    n, num_experts = probs.shape
    # One column more counts tokens.
    columns = torch.cat((experts, experts.new_full((n, 1), num_experts)), 1) + documents[:, None] * (num_experts + 1)
    counts = torch.zeros(num_documents * (num_experts + 1), device=probs.device)
    counts.scatter_add_(0, columns.view(-1), is_real[:, None].expand_as(columns).reshape(-1).float())
    counts = _summed(counts, group).view(num_documents, -1)
    frequencies, num_tokens = counts[:, :-1], counts[:, -1]
    frequencies = frequencies / num_tokens[:, None].clamp(min=1)
    total = (probs * frequencies[documents] * is_real[:, None]).sum()
    return total * num_experts / (experts.shape[1] * num_tokens.sum().clamp(min=1))


def z_loss(logits: Tensor, is_real: Tensor, group: ProcessGroup) -> Tensor:
    """This rank's share of the mean over real tokens of the squared log of the sum of exponentials (ST-MoE,
    arXiv:2202.08906): fp32 [n, E] and bool [n] to a scalar."""
    num_tokens = _summed(is_real.sum().float(), group)
    return (logits.logsumexp(-1).square() * is_real).sum() / num_tokens.clamp(min=1)


def _summed(local: Tensor, group: ProcessGroup) -> Tensor:
    """Return the sum over ranks, without gradient; `local` is overwritten."""
    if group.size() > 1:
        torch.distributed.all_reduce(local, group=group)
    return local


def real_tokens(sequences: Sequences, sequence_parallel: bool) -> Tensor:
    """Return which of the tokens of an expert layer are not padding: bool [n], in the order of [s / cp (/ tp), b]."""
    return _of_this_rank(~sequences.is_padding.t(), sequence_parallel)


def documents_of_tokens(sequences: Sequences, sequence_parallel: bool) -> tuple[Tensor, int]:
    """Return the document of each token of an expert layer, int64 [n] in the order of [s / cp (/ tp), b], and D: the
    rows, or the documents of the packed row."""
    b, s = sequences.is_padding.shape
    device = sequences.is_padding.device
    if not sequences.is_packed:
        return _of_this_rank(torch.arange(b, device=device).expand(s, b), sequence_parallel), b
    lengths = sequences.document_lengths
    numbers = torch.arange(len(lengths), device=device)
    of_tokens = numbers.repeat_interleave(send(torch.tensor(lengths)), output_size=s)
    return _of_this_rank(of_tokens[:, None], sequence_parallel), len(lengths)


def _of_this_rank(whole: Tensor, sequence_parallel: bool) -> Tensor:
    """[s / cp, b] to [n], with sequence parallelism this tensor-parallel rank's part."""
    if sequence_parallel:
        size, rank = (
            parallel_state.get_tensor_model_parallel_world_size(),
            parallel_state.get_tensor_model_parallel_rank(),
        )
        whole = whole.chunk(size)[rank]
    return whole.reshape(-1)
