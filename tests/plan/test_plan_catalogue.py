"""Devices and links by name, a user's own ones, and the page that lists them."""

from __future__ import annotations

import dataclasses
import runpy
from pathlib import Path
from typing import get_args

import pytest

from megatune.errors import ExitCode, MegatuneError
from megatune.plan.catalogue import (
    cpu_machine,
    device_by_driver_name,
    find_machine,
    machine_assumptions,
    plain_name,
)
from megatune.plan.catalogue.devices import Generation, catalogue
from megatune.plan.catalogue.own import own_catalogue

PAGE = Path(__file__).parents[2] / "docs" / "devices.md"


@pytest.fixture(autouse=True)
def no_file_of_the_user(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("MEGATUNE_DEVICES", raising=False)
    monkeypatch.delenv("XDG_CONFIG_HOME", raising=False)
    monkeypatch.setenv("HOME", str(tmp_path / "home"))


def test_every_entry_is_whole() -> None:
    for name, entry in catalogue().devices.items():
        device = entry.device(name)
        assert device.name == name
        assert device.generation in get_args(Generation)
        assert set(device.flops) == {"bfloat16", "float16", "float32"}
        assert device.flops["float16"] > device.flops["float32"]
        machine = find_machine(name)
        assert not catalogue().links[machine.link.name].network
        assert machine.network.bandwidth <= machine.link.bandwidth
        hash(machine)  # answers are cached by it


def test_names_are_of_one_device_each() -> None:
    names = [
        (other, name)
        for name, entry in catalogue().devices.items()
        for other in {plain_name(each) for each in (name, *entry.driver_names, *entry.aliases)}
    ]
    assert len(dict(names)) == len(names)


@pytest.mark.parametrize(
    ("typed", "name"),
    [
        ("a100", "a100-80g"),
        ("A100-80G", "a100-80g"),
        ("A100 80GB", "a100-80g"),
        ("A100-SXM4-80GB", "a100-80g"),
        ("NVIDIA A100 80GB PCIe", "a100-80g-pcie"),
        ("NVIDIA A800-SXM4-80GB", "a800-80g"),
        ("h100", "h100-80g"),
        ("NVIDIA H100 80GB HBM3", "h100-80g"),
        ("NVIDIA H100 PCIe", "h100-80g-pcie"),
        ("H20", "h20-96g"),
        ("h200", "h200-141g"),
        ("4090", "rtx-4090"),
        ("RTX4090", "rtx-4090"),
        ("NVIDIA GeForce RTX 4090 D", "rtx-4090d"),
        ("Tesla V100-SXM2-16GB", "v100-16g"),
        ("v100", "v100-32g"),
        ("NVIDIA RTX 6000 Ada Generation", "rtx-6000-ada"),
    ],
)
def test_what_people_type(typed: str, name: str) -> None:
    assert find_machine(typed).device == catalogue().devices[name].device(name)


def test_driver_names() -> None:
    found = device_by_driver_name("NVIDIA H200")
    assert found is not None
    assert found.flops["bfloat16"] == 989.4e12
    # Parts of names of others: none of these is the card whose name it holds.
    for name in ("CPU", "NVIDIA A10G", "NVIDIA GeForce RTX 3090 Ti", "NVIDIA A100-SXM4-80GB MIG 3g.40gb"):
        assert device_by_driver_name(name) is None


def test_unknown_names_all_at_once() -> None:
    with pytest.raises(MegatuneError) as caught:
        find_machine("h1000", link="nvlink9", network="ib-20x4", gpus_per_node=0)
    assert caught.value.exit_code is ExitCode.INPUT
    device, size, link, network = caught.value.findings
    assert "h100-80g" in device.why
    assert "gpus_per_node: 0" in size.what
    assert "nvlink" in link.why
    assert "ib-200" in network.why
    with pytest.raises(MegatuneError, match="there is no network 'nvlink4'"):
        find_machine("h100", network="nvlink4")
    with pytest.raises(MegatuneError, match="there is no link 'ib-400'"):
        find_machine("h100", link="ib-400")


def test_shares_of_a_network() -> None:
    """One port a device, or the machine's ports over its devices: bits of the name, bytes of the link."""
    assert find_machine("h100").network.bandwidth == 400e9 / 8
    assert find_machine("h100", network="ib-200x4").network.bandwidth == 200e9 / 8 * 4 / 8
    assert find_machine("4090", network="ethernet-10g", gpus_per_node=4).network.bandwidth == 10e9 / 8 / 4
    assert find_machine("v100").network.bandwidth == 100e9 / 8 / 2


def test_assumptions_are_said() -> None:
    machine = find_machine("a800")
    size, link, network = machine_assumptions(machine)
    assert "8 GPUs" in size
    assert "nvlink3-a800, 200 GB/s" in link
    assert "ib-200, 25 GB/s" in network
    assert machine_assumptions(machine, gpus_per_node=8, link="x") == (network,)


def test_cpu() -> None:
    machine = cpu_machine(2**34, 8, processes=4)
    assert (machine.device.memory, machine.gpus_per_node) == (2**32, 4)
    assert machine.device.generation == "cpu"
    assert machine.device.flops["float32"] * 4 == cpu_machine(2**34, 8).device.flops["float32"]
    hash(machine)


OWN = """
devices:
  mine:
    like: a100-80g
    memory_gib: 78.5
    tflops: {bfloat16: 300}
    network: slow
    gpus_per_node: 4
    aliases: [a100]
  other:
    generation: hopper
    memory_gib: 10
    tflops: {bfloat16: 100, float16: 90, float32: 10.5}
    bandwidth_gb_per_s: 1000
    link: wire
    network: ib-100x2
links:
  wire: {bandwidth_gb_per_s: 40, latency_us: 5}
  slow: {bandwidth_gb_per_s: 2, latency_us: 30, network: true, ports: 2}
"""


def test_own_file(tmp_path: Path) -> None:
    file = tmp_path / "devices.yaml"
    file.write_text(OWN)
    machine = find_machine("a100", devices_file=file)
    like = find_machine("a100").device
    assert machine.device == dataclasses.replace(
        like, name="mine", memory=int(78.5 * 2**30), flops={**like.flops, "bfloat16": 300e12}
    )
    assert (machine.gpus_per_node, machine.network.bandwidth, machine.network.latency) == (4, 1e9, pytest.approx(3e-5))
    other = find_machine("other", devices_file=file)
    assert other.device.flops["float32"] == 10.5e12
    assert (other.link.name, other.link.bandwidth) == ("wire", 40e9)
    assert other.network.bandwidth == 100e9 / 8 * 2 / 8
    assert find_machine("a100").device.name == "a100-80g"


def test_own_file_by_environment_and_home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    home = tmp_path / "home" / ".config" / "megatune" / "devices.yaml"
    home.parent.mkdir(parents=True)
    home.write_text("devices: {here: {like: h100-80g}}")
    assert find_machine("here").device.name == "here"
    named = tmp_path / "named.yaml"
    named.write_text("devices: {there: {like: h100-80g}}")
    monkeypatch.setenv("MEGATUNE_DEVICES", str(named))
    assert find_machine("there").device.name == "there"
    with pytest.raises(MegatuneError, match="no device 'here'"):
        find_machine("here")
    monkeypatch.setenv("MEGATUNE_DEVICES", str(tmp_path / "none.yaml"))
    with pytest.raises(MegatuneError, match="MEGATUNE_DEVICES: cannot read"):
        find_machine("h100")


WRONG = """\
devices:
  first:
    like: a100-81g
    memory_gb: 80
    tflops: {bfloat16: fast, float8: 1}
  second:
    generation: hooper
    memory_gib: -1
    gpus_per_node: 1.5
    network: nvlink4
    aliases: one
  second: {}
links:
  wire: {bandwidth_gb_per_s: 1, network: maybe}
speed: 1
"""


def test_everything_wrong_in_an_own_file(tmp_path: Path) -> None:
    file = tmp_path / "devices.yaml"
    file.write_text(WRONG)
    with pytest.raises(MegatuneError) as caught:
        own_catalogue(file)
    assert caught.value.exit_code is ExitCode.SETTINGS
    found = {(each.where.removeprefix(f"{file}:"), each.what) for each in caught.value.findings}
    for line, what in {
        (3, "first: there is no like 'a100-81g'"),
        (4, "unknown key 'memory_gb' in devices: first"),
        (5, "first: tflops: bfloat16 is 'fast'"),
        (5, "unknown key 'float8' in devices: first: tflops"),
        (5, "first: tflops has no bfloat16, float16, float32"),
        (7, "second: generation is 'hooper'"),
        (7, "second has no tflops, bandwidth_gb_per_s, link"),
        (8, "second: memory_gib is -1"),
        (9, "second: gpus_per_node is 1.5"),
        (10, "second: there is no network 'nvlink4'"),
        (12, "second appears twice"),
        (14, "wire: network is 'maybe'"),
        (14, "wire has no latency_us"),
        (15, "unknown key 'speed' in the file"),
    }:
        assert (str(line), what) in found
    assert len(found) == 14


@pytest.mark.parametrize("text", ["devices: [1]", "devices: {a: 1}", "[]", "a: b: c"])
def test_no_file_ends_in_a_traceback(text: str, tmp_path: Path) -> None:
    file = tmp_path / "devices.yaml"
    file.write_text(text)
    with pytest.raises(MegatuneError) as caught:
        own_catalogue(file)
    assert all(each.where.startswith(f"{file}:1") for each in caught.value.findings)


def test_page_is_current(tmp_path: Path) -> None:
    text = PAGE.read_text(encoding="utf-8")
    render = runpy.run_path(str(PAGE.with_name("generate_devices.py")))["render"]
    assert render(text) == text, "run docs/generate_devices.py"
    example = tmp_path / "devices.yaml"
    example.write_text(text.split("```yml\n")[1].split("```")[0])
    own = own_catalogue(example)
    assert set(own.devices) == {"my-a100", "new-card"}
    assert find_machine("ours", devices_file=example).network.bandwidth == 25e9
