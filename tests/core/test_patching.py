"""What is replaced in frameworks: declared with its reason, applied by one helper, listed by the doctor."""

from __future__ import annotations

import ast
import inspect
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from harness import ROOT, environment

from ft_core import patching, plugins
from ft_core.errors import ConfigError
from ft_core.patching import Patch, replaced

TWICE = Patch("torch.nn:Module.double", "a test")


class Framework:
    """Stands for one."""

    def double(self, number: int) -> int:
        """Twice as much."""
        return 2 * number


def one_more(original: Callable[..., Any]) -> Callable[..., Any]:
    return lambda *args: original(*args) + 1


def test_one_object_is_patched_and_no_other() -> None:
    one, other = Framework(), Framework()
    TWICE.wrap(one_more, of=one)
    assert (one.double(3), other.double(3)) == (7, 6)
    assert one.double.__doc__ == "Twice as much." and list(inspect.signature(one.double).parameters) == [
        "number"
    ]


def test_a_patch_is_applied_once_where_that_is_asked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Framework, "double", Framework.double)
    for _ in range(2):
        TWICE.wrap(lambda original: lambda self, n: original(self, n) + 1, of=Framework, once=True)
    assert Framework().double(3) == 7
    TWICE.wrap(lambda original: lambda self, n: original(self, n) + 1, of=Framework)
    assert Framework().double(3) == 8


def test_who_insists_on_a_method_gets_one() -> None:
    one = Framework()
    TWICE.wrap(one_more, of=one, bound=True)
    assert inspect.ismethod(one.double) and one.double.__self__ is one
    assert one.double(3) == 7


def test_a_patch_for_a_while_leaves_no_trace() -> None:
    one = Framework()
    with pytest.raises(ZeroDivisionError), TWICE.replaced(lambda n: 0, of=one):
        assert one.double(3) == 0
        1 / one.double(3)
    assert "double" not in vars(one) and one.double(3) == 6
    part, values = SimpleNamespace(kept=1), {"kept": 2, "new": 3}
    with replaced(part, values):
        part.new = 4
    assert vars(part) == {"kept": 1} and values == {"kept": 2, "new": 4}


@pytest.mark.parametrize("apply", ["wrap", "replace", "replaced"])
def test_another_version_of_the_framework_is_a_clear_error(apply: str) -> None:
    patch = Patch("torch.nn:Module.trained", "steps are counted")
    applied = {
        "wrap": lambda: patch.wrap(one_more),
        "replace": lambda: patch.replace(None),
        "replaced": lambda: patch.replaced(None).__enter__(),
    }
    with pytest.raises(
        ConfigError, match=r"^torch 2\.\S+ has no Module\.trained in torch\.nn, .* \(steps are counted\)"
    ):
        applied[apply]()
    Patch("torch.nn:Module.trained", "steps are counted", optional=True).wrap(one_more)
    with pytest.raises(ConfigError, match=r"has no Modul\.double"):
        Patch("torch.nn:Modul.double", "").original()


def test_the_doctor_lists_what_is_patched() -> None:
    command = [sys.executable, "-m", "ft_core.cli.ctl", "doctor", "--patches"]
    done = subprocess.run(command, env=environment(), cwd=ROOT, capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
    lines = done.stdout.splitlines()
    frameworks = [line.split()[0] for line in lines if not line.startswith(" ")]
    assert len(frameworks) == len(set(frameworks)) and {"torch", "deepspeed", "megatron-core"} <= set(
        frameworks
    )
    found = [line.strip().split(": ", 1) for line in lines if line.startswith(" ")]
    assert {"deepspeed:initialize", "megatron.training.training:train_step", "torch.autograd:backward"} <= {
        target for target, _ in found
    }
    assert all(reason for _, reason in found)
    assert len(found) == len(patching.declared(plugins.packages()))


def test_nothing_is_patched_but_by_the_helper() -> None:
    """No function is assigned to an attribute of a module or class that is imported."""
    offending = []
    for package in plugins.packages():
        for path in sorted((Path(ROOT) / package).rglob("*.py")):
            if path.name.startswith("cpu_"):  # they make a device of a host without one, for tests
                continue
            offending += patches_by_hand(path.read_text(), str(path.relative_to(ROOT)))
    assert not offending, "\n".join(offending)
    assert patches_by_hand("import torch\ntorch.save = f\n", "x") == ["x:2: torch.save = f"]
    assert patches_by_hand("from torch import nn\nnn.Module.to = f\n", "x") == ["x:2: nn.Module.to = f"]
    assert patches_by_hand("from ft_core import a\na.b = f\n", "x") == []


def patches_by_hand(source: str, where: str) -> list[str]:
    tree = ast.parse(source)
    imported = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            imported |= {(n.asname or n.name).partition(".")[0] for n in node.names}
        elif isinstance(node, ast.ImportFrom) and not (node.module or "").startswith("ft_"):
            imported |= {n.asname or n.name for n in node.names}
    found = []
    for node in ast.walk(tree):
        if not isinstance(node, ast.Assign) or isinstance(node.value, (ast.Constant, ast.List)):
            continue
        for target in node.targets:
            for part in target.elts if isinstance(target, ast.Tuple) else [target]:
                owner = part
                while isinstance(owner, ast.Attribute):
                    owner = owner.value
                if isinstance(part, ast.Attribute) and isinstance(owner, ast.Name) and owner.id in imported:
                    found.append(f"{where}:{node.lineno}: {ast.unparse(node)}")
    return found
