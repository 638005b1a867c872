"""Where a machine is in a cluster, as the cluster says it: Slurm, Kubernetes, NVLink, the operator."""

from __future__ import annotations

import shutil
import socket
import subprocess
import sys
import threading
from pathlib import Path

import pytest
from harness import settings_of

from ft_core.cli import failure_domains
from ft_core.cli.doctor import racks
from ft_core.cli.doctor.case import Case
from ft_core.cli.failure_domains import LABELS, FailureDomain, find, of_labels, of_operator, of_slurm
from ft_core.errors import ConfigError
from ft_core.node.devices import fabric
from ft_core.settings import Command, Settings
from ft_core.state import exposure
from ft_core.state.domains import NestedDomains
from ft_core.state.placement import Places

SLURM = {"SLURM_TOPOLOGY_ADDR": "spine.leaf3.node7", "SLURM_TOPOLOGY_ADDR_PATTERN": "switch.switch.node"}


def nobody() -> str:
    return ""


@pytest.mark.parametrize(
    ("address", "pattern", "own", "levels"),
    [
        ("spine.leaf3.node7", "switch.switch.node", "node7", ("spine", "leaf3")),
        ("s[0-1].leaf[3,5].node7", "switch.switch.node", "", ("s[0-1]", "leaf[3,5]")),
        ("leaf3.node7.example.org", "switch.node", "node7.example.org", ("leaf3",)),
        ("block1.node7", "block.node", "node7", ("block1",)),
        ("spine.leaf3.node7", "", "", ("spine", "leaf3")),
        ("node7", "node", "node7", ()),  # a cluster without a topology
        ("spine.leaf3.node1", "switch.switch.node", "node7", ()),  # of the machine that handed it on
        ("node7", "switch.switch.node", "", ()),
        ("", "", "", ()),
    ],
)
def test_slurm(address: str, pattern: str, own: str, levels: tuple[str, ...]) -> None:
    names = ("SLURM_TOPOLOGY_ADDR", "SLURM_TOPOLOGY_ADDR_PATTERN", "SLURMD_NODENAME")
    values = zip(names, (address, pattern, own), strict=True)
    assert of_slurm({name: value for name, value in values if value}) == levels


def test_labels_of_kubernetes() -> None:
    assert of_labels(
        'app="train"\n'
        'topology.k8s.aws/network-node-layer-3="nn-3"\n'
        'topology.k8s.aws/network-node-layer-1="nn-1"\n'
        'topology.k8s.aws/network-node-layer-2="nn-2"\n'
        'topology.kubernetes.io/zone="eu-1b"\n'
        'kubernetes.io/hostname="worker-4"\n'
    ) == ("eu-1b", "nn-1", "nn-2", "nn-3")
    own = 'example.org/rack="r7"\nexample.org/racks="9"\nnvidia.com/gpu.clique="0c1d-4.2"\n'
    assert of_labels(own) == ("r7", "0c1d-4.2")
    blocks = "\n".join(f'cloud.google.com/gce-topology-{kind}="{kind}-1"' for kind in ("subblock", "block"))
    assert of_labels(blocks) == ("block-1", "subblock-1")
    assert of_labels('topology.kubernetes.io/zone=""\nnonsense\n="x"') == ()


def test_what_wins() -> None:
    """The flag, the operator's file, Slurm, Kubernetes; the fabric comes behind what the cluster says."""
    assert find("rack7", "", SLURM, fabric=nobody) == FailureDomain((), "--ft-domain", "rack7")
    assert find("rack7", "", SLURM, fabric=nobody).of("host-3") == "rack7"
    found = find("", "echo row2/rack9", SLURM, fabric=nobody)
    assert (found.of("host-3"), found.source) == ("row2/rack9/host-3", "--ft-domain-from echo row2/rack9")
    found = find("", "", SLURM, fabric=lambda: "nvlink-1-0")
    assert found.of("host-3") == "spine/leaf3/nvlink-1-0/host-3"
    assert found.source == "SLURM_TOPOLOGY_ADDR and the NVLink fabric"
    nothing = find("", "", {}, fabric=nobody)
    assert (nothing.of("host-3"), nothing.source) == ("host-3", "")


def test_labels_in_a_pod(tmp_path: Path) -> None:
    labels = tmp_path / LABELS
    labels.parent.mkdir(parents=True)
    labels.write_text('topology.kubernetes.io/zone="eu-1b"\nexample.org/rack="r7"\n')
    found = find("", "", {}, tmp_path, nobody)
    assert found.of("pod-3") == "eu-1b/r7/pod-3" and LABELS in found.source


def test_a_level_without_a_name() -> None:
    for given in ("row2/", "/rack7", "row2//rack7"):
        with pytest.raises(ConfigError, match="a level has no name"):
            find(given, "", {}, fabric=nobody)


def test_one_machine_is_not_asked_where_it_is(tmp_path: Path) -> None:
    script = tmp_path / "train.py"
    script.touch()
    with pytest.raises(ConfigError, match="--standalone has --ft-domain"):
        settings_of("--standalone", "--ft-domain-from=somewhere", str(script))


def test_a_driver_that_hangs(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(failure_domains, "_PATIENCE", 0.01)
    released = threading.Event()
    try:
        found = find("", "", SLURM, fabric=lambda: str(released.wait(30)))
    finally:
        released.set()
    assert found.of("h") == "spine/leaf3/h" and "has not said within" in found.trouble


def test_the_operators_file(tmp_path: Path) -> None:
    path = tmp_path / "domains"
    path.write_text(
        "# node domain\nnode1 row1/rack1\n\nnode2   row1/rack2  # the new one\nnode1 row1/rack1\n"
    )
    assert of_operator(str(path), ["host", "node1"]) == "row1/rack1"
    assert of_operator(str(path), ["node2"]) == "row1/rack2"
    with pytest.raises(ConfigError, match="no line for this machine, node3 or host3: add one"):
        of_operator(str(path), ["node3", "host3"])
    for text, said in (
        ("node1 a\nnode1 b\n", "line 2: node1 is in b, and in a before"),
        ("node1\n", "line 1: 'node1': give NODE DOMAIN"),
        ("node1 a//b\n", "this is no failure domain"),
    ):
        path.write_text(text)
        with pytest.raises(ConfigError, match=said):
            of_operator(str(path), ["node1"])


def test_the_operators_command(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    command = tmp_path / "where"
    command.write_text(f"#!{sys.executable}\nprint('row2/rack7')\n")
    command.chmod(0o755)
    assert of_operator(str(command), ["node1"]) == "row2/rack7"
    for text, said in (
        ("import sys; sys.exit('no such rack')", "ended with code 1: no such rack"),
        ("print()", "printed '': this is no failure domain"),
        ("print('rack 7')", "this is no failure domain"),
    ):
        command.write_text(f"#!{sys.executable}\n{text}\n")
        with pytest.raises(ConfigError, match=said):
            of_operator(str(command), ["node1"])
    with pytest.raises(ConfigError, match="neither a file nor a command"):
        of_operator(str(tmp_path / "missing"), ["node1"])
    command.write_text(f"#!{sys.executable}\nimport time; time.sleep(60)\n")
    monkeypatch.setattr(failure_domains, "_PATIENCE", 0.5)
    with pytest.raises(ConfigError, match="has not answered within"):
        of_operator(str(command), ["node1"])


NVML = """
#include <string.h>
typedef struct { unsigned version; unsigned char uuid[16]; int status; unsigned clique; unsigned char state;
                 unsigned health; } Info;
int nvmlInit_v2(void) { return INIT; }
int nvmlShutdown(void) { return 0; }
int nvmlDeviceGetCount_v2(unsigned *count) { *count = 2; return 0; }
int nvmlDeviceGetHandleByIndex_v2(unsigned index, void **device) {
    *device = (void *)(long)(index + 1);
    return 0;
}
#ifdef FABRIC
int nvmlDeviceGetGpuFabricInfoV(void *device, Info *info) {
    if (info->version != (sizeof(Info) | 2 << 24)) return 25;
    if (device == (void *)1) return 3; /* this one knows of no fabric */
    memset(info->uuid, UUID, 16);
    info->status = 0; info->clique = 7; info->state = STATE; info->health = 0;
    return 0;
}
#endif
"""
"""What NVML's own library exports of this, with answers to choose."""


@pytest.mark.skipif(shutil.which("cc") is None, reason="no C compiler, to build a library like NVML's")
@pytest.mark.parametrize(
    ("flags", "domain"),
    [
        ("-DINIT=0 -DFABRIC -DUUID=0xab -DSTATE=3", "nvlink-abababab-7"),
        ("-DINIT=0 -DFABRIC -DUUID=0 -DSTATE=3", ""),  # NVLink within one machine
        ("-DINIT=0 -DFABRIC -DUUID=0xab -DSTATE=2", ""),  # it is still looking
        ("-DINIT=0", ""),  # an old driver
        ("-DINIT=9 -DFABRIC -DUUID=0xab -DSTATE=3", ""),  # no driver is loaded
    ],
)
def test_nvlink_fabric(flags: str, domain: str, tmp_path: Path) -> None:
    source, library = tmp_path / "nvml.c", tmp_path / "libnvml.so"
    source.write_text(NVML)
    subprocess.run(["cc", "-shared", "-fPIC", *flags.split(), "-o", library, source], check=True, timeout=60)
    assert fabric.nvlink_domain(str(library)) == domain


def test_a_machine_without_nvml(tmp_path: Path) -> None:
    assert fabric.nvlink_domain(str(tmp_path / "none.so")) == ""


def of_racks(*sizes: int) -> Places:
    nodes = [(rack, number) for rack, size in enumerate(sizes) for number in range(size)]
    names = {role: f"n{role}" for role in range(len(nodes))}
    return Places(names, {f"n{at}": f"spine/rack{rack}/n{at}" for at, (rack, _) in enumerate(nodes)})


def said(places: Places, replicas: int = 1) -> tuple[bool, str]:
    return exposure.sentence(exposure.levels(places, replicas), replicas)


def test_what_a_racks_loss_would_cost() -> None:
    assert said(of_racks(2, 2)) == (
        True,
        "any one of 2 failure domains such as spine/rack0 may be lost at once, with up to 2 nodes: copies go "
        "to others",
    )
    well, text = said(of_racks(4), 2)
    assert not well and text.startswith(
        "all nodes with roles are in spine/rack0: its loss would take all copies"
    )
    assert text.endswith("Any 2 nodes may be lost")
    well, text = said(of_racks(7, 1))
    assert not well and text.startswith(
        "the loss of spine/rack0 would take all copies of what is there: of 2 "
    )
    flat = Places({0: "a", 1: "b"}, {"a": "x", "b": "y"})
    assert said(flat) == said(of_racks(2, 2), 0) == (True, "")
    [spine, rack] = exposure.levels(of_racks(3, 2), 1)
    assert (spine.names, spine.at_risk, spine.nodes, spine.roles) == (["spine"], ["spine"], 5, 5)
    assert (rack.at_risk, rack.nodes) == ([], 3)


SETTINGS = Settings(nnodes=2, nproc_per_node=2, command=Command("train.py"), controller="127.0.0.1:1")


def test_doctor_says_where_a_machine_is() -> None:
    def level(**about: object) -> tuple[str, str]:
        [found] = racks.here(Case(**about))  # type: ignore[arg-type]
        return str(found.level), found.found

    host = socket.gethostname()
    assert level(environment=SLURM) == ("ok", f"spine/leaf3/{host}, from SLURM_TOPOLOGY_ADDR")
    assert level(domain="rack7") == ("ok", "rack7, from --ft-domain")
    assert level(settings=SETTINGS)[0] == "warn"
    assert level(domain_from="/missing/command")[0] == "fail"
    assert not list(racks.here(Case())), "one machine: there is nothing to say"
    assert not list(racks.here(Case(environment=SLURM, standalone=True)))


def test_doctor_says_what_a_racks_loss_would_cost() -> None:
    domains = {f"n{at}": f"spine/rack{at // 2}/n{at}" for at in range(4)} | {"s": "spine/rack2/s"}
    roles = {at: f"n{at}" for at in range(4)}
    nested = NestedDomains(list(roles.values()), ["s"], domains)
    apart = {0: [{"n0", "n2"}], 1: [{"n1", "n3"}, {"n0", "n3"}]}
    [found] = racks.lost(nested, apart, roles, {"s": 2})
    assert (
        found.level == "ok"
        and "the loss of spine/rack1 (2 nodes, 2 roles), or of any other of 2" in found.found
    )
    [found] = racks.lost(nested, apart, roles, {"s": 1})
    assert found.level == "warn" and "idle workers for 1 of the roles" in found.found
    [found] = racks.lost(nested, {**apart, 2: [{"n0", "n1"}]}, roles, {"s": 2})
    assert found.level == "warn" and "the loss of spine/rack0" in found.found
    assert "would take all copies of a part of the state" in found.found
