"""What devices sustain of their data sheets' rates, by what limits them."""

from __future__ import annotations

from dataclasses import replace

import pytest

from megatune.plan.catalogue import find_machine
from megatune.plan.operators.operator import Product
from megatune.plan.time.efficiency import EFFICIENCIES, Rates, kernel_seconds


def test_boards_keep_their_clocks_as_long_as_their_power_lasts() -> None:
    """An H20 has watts to spare, an H100 asks for twice what it may draw, and less still where it may draw less."""
    machines = [find_machine(name) for name in ("h20-96g", "h100-80g", "rtx-4090", "l40s", "t4")]
    limited = replace(machines[1], device=replace(machines[1].device, watts=500))
    h20, h100, rtx, l40s, t4, slow = (
        (rates := Rates.of(each, "float16")).dense / rates.peak for each in (*machines, limited)
    )
    assert h20 == EFFICIENCIES["hopper"].ceiling > l40s > h100 > slow > t4
    assert rtx == EFFICIENCIES["ada"].ceiling
    assert slow == pytest.approx(h100 * (500 / 700) ** 0.5)
    unknown = replace(machines[0], device=replace(machines[0].device, watts=None, multiprocessors=None))
    assert Rates.of(unknown, "bfloat16").dense / unknown.device.flops["bfloat16"] == pytest.approx(h100)


def test_attention_beside_tensor_cores_takes_what_the_fp32_rate_says() -> None:
    """Kernels for packed rows reach a third of an H100's peak, and two thirds of an H20's, which has less of it."""
    h20, h100 = (Rates.of(find_machine(name), "bfloat16") for name in ("h20-96g", "h100-80g"))
    assert h100.packed == pytest.approx((0.35 * h100.peak, 0.28 * h100.peak))
    assert 0.6 < h20.packed[0] / h20.peak < h20.dense / h20.peak


def test_small_products_reach_a_smaller_share_of_the_peak() -> None:
    rates = Rates.of(find_machine("h100-80g"), "bfloat16")

    def share(rows: int, columns: int, depth: int) -> float:
        product = Product(rows, columns, depth, 2)
        return product.flops / rates.peak / kernel_seconds(rates, [product])

    shares = [share(size, 4096, 4096) for size in (128, 512, 2048, 8192, 32768)]
    assert shares == sorted(shares)
    assert shares[0] < 0.25 < 0.5 < shares[-1] < rates.dense / rates.peak
    assert share(8192, 4096, 256) < share(8192, 4096, 4096)
