"""Which interface state is served on: by `--ft-interface`, and by a look at the machine."""

from __future__ import annotations

from pathlib import Path

import pytest
from harness import settings_of

from ft_core.cli.doctor import network
from ft_core.cli.doctor.case import Case
from ft_core.errors import ConfigError
from ft_core.net import interfaces
from ft_core.net.interfaces import Interface, choose, here
from ft_core.settings import Command, Settings

LO = Interface("lo", "127.0.0.1", "loopback")
ETH, ETH6 = Interface("eth0", "10.80.1.2", "other"), Interface("eth0", "fd00:80:1::2", "other")
STORAGE = Interface("eth1", "10.81.1.2", "other")
DOCKER = Interface("docker0", "172.17.0.1", "other")
IB, IB6 = Interface("ib0", "10.90.1.2", "InfiniBand"), Interface("ib0", "fd00:90:1::2", "InfiniBand")
ROCE = Interface("eth4", "10.91.1.2", "RoCE")
WITHOUT, ALL = [LO, DOCKER, ETH, STORAGE, ETH6], [LO, DOCKER, ETH, STORAGE, IB, ROCE, ETH6, IB6]


@pytest.mark.parametrize(
    ("wanted", "towards", "there", "expected"),
    [
        ("", ETH.address, WITHOUT, [ETH]),
        ("", ETH6.address, WITHOUT, [ETH6]),
        ("", LO.address, ALL, [LO]),  # the whole job is on this machine
        ("", ETH.address, ALL, [IB, ROCE]),
        ("", ETH6.address, ALL, [IB6]),
        ("", ROCE.address, ALL, [ROCE]),  # it leads to the controller as well
        ("", ETH6.address, [LO, ETH6, ROCE], [ETH6]),  # others may know no such addresses
        ("eth1", ETH.address, ALL, [STORAGE]),
        ("eth1,ib0", ETH.address, ALL, [STORAGE, IB]),
        ("ib7,eth1", ETH.address, ALL, [STORAGE]),
        ("ib*", ETH.address, ALL, [IB]),
        ("ib*", ETH6.address, ALL, [IB6]),
        ("eth1", ETH6.address, ALL, [STORAGE]),
        ("10.91.0.0/16", ETH.address, ALL, [ROCE]),
        ("10.91.1.2", ETH.address, ALL, [ROCE]),
        ("fd00:80::/32", ETH.address, ALL, [ETH6]),
        ("lo", ETH.address, ALL, [LO]),
    ],
)
def test_choice(wanted: str, towards: str, there: list[Interface], expected: list[Interface]) -> None:
    assert choose(interfaces.parse(wanted), towards, there) == expected


def test_an_address_that_the_machine_does_not_show_is_kept() -> None:
    assert [each.address for each in choose([], "10.1.1.1", [])] == ["10.1.1.1"]


def test_what_is_not_there_is_refused_with_what_is() -> None:
    with pytest.raises(ConfigError, match=r"--ft-interface ib7,10.3.0.0/16: .*it has lo .*ib0 .*InfiniBand"):
        choose(["ib7", "10.3.0.0/16"], ETH.address, ALL)


@pytest.mark.parametrize("text", ["ib0,", ",", "10.1.0.0/99", "eth0/24"])
def test_what_is_no_interface_is_refused(text: str, script: Path) -> None:
    with pytest.raises(ConfigError, match="--ft-interface"):
        settings_of("--standalone", f"--ft-interface={text}", str(script))


@pytest.fixture
def script(tmp_path: Path) -> Path:
    (path := tmp_path / "train.py").touch()
    return path


def test_the_flag_is_a_setting(script: Path) -> None:
    found = settings_of("--standalone", "--ft-interface=ib*, 10.1.0.0/16", str(script))
    assert found.interfaces == ["ib*", "10.1.0.0/16"]


def test_look_at_this_machine(tmp_path: Path) -> None:
    assert LO in here()
    (tmp_path / "lo").mkdir()
    (tmp_path / "lo" / "type").write_text("772\n")
    assert LO in here(tmp_path)


@pytest.mark.parametrize(
    ("type_", "device", "kind"),
    [("32", "", "InfiniBand"), ("1", "device/infiniband/mlx5_0", "RoCE"), ("1", "device", "other")],
)
def test_kinds(tmp_path: Path, type_: str, device: str, kind: str) -> None:
    (tmp_path / "x0" / device).mkdir(parents=True)
    (tmp_path / "x0" / "type").write_text(f"{type_}\n")
    assert interfaces._kind("x0", 0, tmp_path) == kind


def test_doctor_says_it() -> None:
    def level(*wanted: str, controller: str = "127.0.0.1:29400") -> tuple[str, str]:
        settings = Settings(2, 1, Command("train.py"), controller=controller, interfaces=list(wanted))
        [found] = network.interface(Case(settings=settings, controller=controller))
        return str(found.level), found.found

    assert level() == ("fail", "state would be served on lo (127.0.0.1, loopback)")
    assert level("nowhere*")[0] == "fail" and "nowhere*" in level("nowhere*")[1]
    others = [each for each in here() if each.kind != "loopback"]
    for each in others[:1]:
        assert level(each.address, controller=f"{each.address}:29400") == ("ok", f"state is served on {each}")
    assert not list(network.interface(Case())), "one machine: there is nothing to say"
