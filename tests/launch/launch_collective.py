"""A real collective operation, in ranks forked from a process that has imported torch."""

import datetime
import os
import signal

import torch
import torch.distributed as dist
from launch_targets import PATIENCE, stuck_in_user_code


def break_off(context, payload):
    """Rank 1 does not take part in the second all-reduce, in which the others wait for it."""
    context.beat("init", 1, limit=PATIENCE)
    dist.init_process_group("gloo", timeout=datetime.timedelta(seconds=PATIENCE))
    context.beat("forward", 2, limit=PATIENCE)
    total = torch.tensor([1.0 + context.rank])
    dist.all_reduce(total)
    assert total.item() == 3.0
    context.beat("forward", 3)
    if context.rank == 1:
        if payload["how"] == "kill":
            os.kill(os.getpid(), signal.SIGKILL)
        if payload["how"] == "raise":
            raise ValueError("rank 1 had a reason")
        stuck_in_user_code()
    dist.all_reduce(total)
