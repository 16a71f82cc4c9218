"""What rank 0 does for all ranks fails, in ranks that have met."""

from launch_targets import PATIENCE

from megatune.engine import groups
from megatune.training.agreement import on_rank_0


def read():
    raise ValueError("rank 0 read nonsense")


def fail_for_all(context, payload):
    address = context.rank, context.world_size, context.local_rank, context.master_addr, context.master_port
    groups.join(*address, timeout=4 * PATIENCE)
    context.beat("load", 0, limit=4 * PATIENCE)
    on_rank_0(read)
