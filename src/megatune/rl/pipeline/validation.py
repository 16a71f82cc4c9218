"""Validation: every problem of the validation set, and how many of them are solved."""

from __future__ import annotations

import asyncio
import math
from collections import defaultdict
from collections.abc import Mapping, Sequence

import numpy as np

from megatune.config.rl.rollout import Generating
from megatune.rl.pipeline.groups import Group
from megatune.rl.pipeline.sampler import Sampler
from megatune.rl.samples import Problem


async def sample_all(problems: Sequence[Problem], sampler: Sampler, size: int) -> list[Group]:
    """Sample and score `size` responses to every problem, in their order. A problem's random numbers are the same in
    every validation."""
    groups = [Group(problem, place, place, size) for place, problem in enumerate(problems)]
    await asyncio.gather(*map(sampler.finish, groups))
    return groups


def validation_metrics(groups: Sequence[Group], generating: Generating) -> dict[str, float]:
    """Return means over all samples, and by domain and tag where there are several; pass@k for powers of 2, without
    bias (arXiv:2107.03374)."""
    samples = [sample for group in groups for sample in group.samples]
    lengths = [len(sample.response.response_ids) for sample in samples]
    found = {
        "reward": float(np.mean([sample.score for sample in samples])),
        "accuracy": float(np.mean([is_correct(sample.details) for sample in samples])),
        "response_length": float(np.mean(lengths)),
        "reward_errors": float(sum(not sample.has_score for sample in samples)),
        "truncated": float(np.mean([sample.response.finish == "length" for sample in samples])),
    }
    size = max(1, generating.num_return_sequences)
    for k in (2**power for power in range(1, size.bit_length())):
        found[f"pass@{k}"] = float(np.mean([pass_at_k(group, k) for group in groups]))
    for kind in ("domain", "tag"):
        by_name: dict[str, list[float]] = defaultdict(list)
        for sample in samples:
            by_name[getattr(sample.problem, kind)].append(is_correct(sample.details))
        if len(by_name) > 1:
            found |= {f"accuracy/{name}": float(np.mean(values)) for name, values in by_name.items()}
    return found


def pass_at_k(group: Group, k: int) -> float:
    """Return the chance that any of k samples of a group is right: 1 - C(n - c, k) / C(n, k)."""
    size, correct = group.size, sum(is_correct(sample.details) > 0 for sample in group.samples)
    return 1.0 - math.comb(size - correct, k) / math.comb(size, k)


def is_correct(details: Mapping[str, object]) -> float:
    """Return what a reward says of an answer: 1 right, 0 wrong."""
    value = details.get("correct", 0.0)
    return float(value) if isinstance(value, int | float) else 0.0
