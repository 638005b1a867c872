"""What a fork server imports for a script, and that a worker finds what it would have imported itself."""

from __future__ import annotations

import os
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest
from harness import ROOT

from ft_core.node.workers.preload import Import, Script, Setting


def files(root: Path, **texts: str) -> Path:
    """Write them (`__` in a name: a directory) and return the root."""
    for name, text in texts.items():
        path = root.joinpath(*name.split("__")).with_suffix(".py")
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(textwrap.dedent(text))
    return root


def steps(path: Path, *known: str) -> list[Import | Setting]:
    return Script(path / "train.py", path, frozenset(known)).steps


# -- what a script imports -------------------------------------------------------------------------


def test_a_helper_is_left_to_the_script_and_what_it_imports_is_not(tmp_path: Path) -> None:
    files(
        tmp_path,
        train="import json\nimport helper\nfrom lib.parts import part\nfrom lib import more\nimport csv",
        helper="import decimal\nimport helper\nRANK = 0",
        lib__init="never read",
        lib__parts="import fractions\nfrom . import other",
        lib__other="import statistics",
        lib__more="import zipfile",
    )
    (tmp_path / "lib" / "__init__.py").write_text("import wave\n")
    found = [step.module for step in steps(tmp_path) if isinstance(step, Import)]
    assert found == ["json", "decimal", "wave", "fractions", "statistics", "zipfile", "csv"]


def test_settings_of_constants_come_in_their_place(tmp_path: Path) -> None:
    text = """
        import os
        os.environ["A"] = "1"
        os.environ.setdefault("B", "2")
        os.environ["C"] = os.path.join("no", "constant")
        import json
        environ = {}
    """
    files(tmp_path, train=text)
    assert steps(tmp_path) == [
        Import("os"),
        Setting("A", "1"),
        Setting("B", "2", default=True),
        Import("json"),
    ]


def test_what_is_installed_beside_the_script_is_not_its_own(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    site = tmp_path / "venv" / "lib" / "site-packages"
    files(tmp_path, train="import installed_beside\nimport framework_beside.core")
    files(site, installed_beside="")
    files(tmp_path, framework_beside__core="import never_read")
    monkeypatch.syspath_prepend(site)
    assert steps(tmp_path, "framework_beside") == [
        Import("installed_beside"),
        Import("framework_beside.core"),
    ]


def test_a_script_that_does_not_parse(tmp_path: Path) -> None:
    assert steps(files(tmp_path, train="import json\ndef")) == []


# -- modules that read the environment -------------------------------------------------------------

BROUGHT_BACK = """
    import os, sys
    sys.path.insert(0, {path!r})
    from ft_core.worker import imports
    from ft_core.import_hook import after_import
    os.environ["SET"] = "before"
    with imports.noted():
        import above, plain, reads.deep
    first = sys.modules["reads"], sys.modules["above"], sys.modules["plain"]
    after_import("reads", lambda module: setattr(module, "patched", True))
    imports.hide()
    assert not {{"plain", "reads", "above"}} & sys.modules.keys()
    {change}
    import above, plain, reads.deep
    print(reads is first[0], above is first[1], plain is first[2], reads.SET, above.reads is reads)
    print(reads.patched, reads.deep.__spec__.name, reads.__spec__.loader is not None, "deep" in vars(reads))
"""


@pytest.fixture
def packages(tmp_path: Path) -> Path:
    files(
        tmp_path,
        reads__deep="",
        above="import importlib\nreads = importlib.import_module('reads')",
        plain="X = 1",
    )
    (tmp_path / "reads" / "__init__.py").write_text(
        "import os\nSET = os.getenv('SET')\nOTHER = 'RANK' in os.environ\n"
    )
    return tmp_path


def printed(code: str, **environment: str) -> list[str]:
    run = [sys.executable, "-c", textwrap.dedent(code)]
    done = subprocess.run(
        run, env=os.environ | environment, capture_output=True, text=True, timeout=120, check=False
    )
    assert done.returncode == 0, done.stderr
    return (done.stdout + done.stderr).splitlines()


@pytest.mark.parametrize(
    ("change", "expected"),
    [
        ("pass", "True True True before True"),
        ("os.environ['UNREAD'] = '1'", "True True True before True"),
        ("os.environ['SET'] = 'after'", "False False True after True"),
        ("os.environ['SET'] = 'after'; import reads.deep", "False False True after True"),
        ("os.environ['RANK'] = '3'", "False False True before True"),
        ("os.environ['RANK'] = '3'; del os.environ['RANK']", "True True True before True"),
    ],
)
def test_modules_are_those_that_the_script_would_import(packages: Path, change: str, expected: str) -> None:
    found = printed(BROUGHT_BACK.format(path=str(packages), change=change))
    assert found == [expected, "True reads.deep True True"]


OWN = """
    import os, sys
    sys.path.insert(0, {path!r})
    import ft_core
    from ft_core.worker import imports
    ft_core.__path__.append({path!r})
    with imports.noted():
        import ft_core.upper, plain
    first = ft_core.upper
    imports.hide()
    assert "ft_core.patching" in sys.modules and not hasattr(ft_core, "upper")
    {change}
    import reads, ft_core.upper
    print(ft_core.upper is first, ft_core.upper.lower.reads is reads, ft_core.lower is ft_core.upper.lower)
"""


@pytest.mark.parametrize(("change", "same"), [("pass", True), ("os.environ['RANK'] = '3'", False)])
def test_what_an_adapter_has_of_a_framework_is_what_the_script_has(
    packages: Path, change: str, same: bool
) -> None:
    files(packages, lower="import reads", upper="from ft_core import lower")
    assert printed(OWN.format(path=str(packages), change=change)) == [f"{same} True True"]


ASKED = """
    import importlib, logging, os, sys
    from importlib.util import find_spec
    sys.path.insert(0, {path!r})
    from ft_core.worker import imports
    from ft_core.import_hook import after_import
    os.environ["SET"] = os.environ["SECRET"] = "before"
    with imports.noted():
        import {imported}
    imports.hide()
    os.environ["RANK"] = "3"
    {script}
"""
SITUATIONS = {
    "whoever asks for a package has not imported it": (
        "reads.deep",
        "found = find_spec('reads'); os.environ['SET'] = 'after'; import reads.deep; "
        "print(len(found.submodule_search_locations), reads.SET, reads.deep is sys.modules['reads.deep'])",
        "1 after True",
    ),
    "a package that is back has its modules": (
        "plain, asks.deep",
        "find_spec('asks'); import asks; print(asks.deep.__name__)",
        "asks.deep",
    ),
    "who waits for a module comes when the script has imported it": (
        "above",
        "after_import('reads', lambda module: setattr(module, 'by', importlib.import_module('above'))); "
        "import reads; print(reads.by.reads is reads)",
        "True",
    ),
    "and where it is as it was": (
        "asks.deep",
        "after_import('asks.deep', lambda module: setattr(module, 'patched', 'once')); import asks; "
        "print(asks.deep.patched)",
        "once",
    ),
    "a rank that a package has made up is none": (
        "makes_up, reads",
        "import reads, makes_up; print(makes_up.RANK)",
        "3",
    ),
    "what a package takes out of the environment is gone": (
        "takes",
        "import takes; print(takes.SECRET)",
        "before",
    ),
    "a package is named as seen from another": (
        "reads.deep, by_name",
        "import by_name, reads.deep; print(by_name.deep is reads.deep)",
        "True",
    ),
    "log messages are written once": (
        "logs",
        "import logs; print(logs.RANK, len(logging.getLogger('logs').handlers))",
        "3 1",
    ),
    "a package is where the script looks for it": (
        "asks.deep, plain, spread.inner, spread.wide.deep",
        "sys.path.insert(0, {path!r} + '/other'); import asks, plain, spread.inner; "
        "print(asks.OTHER, plain.OTHER, spread.inner.OTHER)",
        "True True True",
    ),
    "a module may be any object": ("thing", "import thing; print(thing.RANK)", "3"),
}


@pytest.mark.parametrize("situation", SITUATIONS)
def test_scripts_find_what_they_would_elsewhere(packages: Path, situation: str) -> None:
    read = "import os\nRANK = os.environ.get('RANK')\n"
    files(
        packages,
        makes_up=f"import os\nos.environ.setdefault('RANK', '0')\n{read}",
        takes="import os\nSECRET = os.environ.pop('SECRET', None)",
        by_name="import importlib\ndeep = importlib.import_module('.deep', 'reads')",
        logs=f"{read}import logging\nlogging.getLogger('logs').addHandler(logging.StreamHandler())",
        asks__deep="",
        thing=f"{read}import sys\nclass Thing:\n    RANK = RANK\nsys.modules['thing'] = Thing()",
    )
    (packages / "asks" / "__init__.py").write_text("import os\nSET = os.getenv('SET')\n")
    files(
        packages,
        spread__inner="",
        spread__wide__deep="",
        other__plain="OTHER = True",
        other__spread__inner="OTHER = True",
    )
    files(packages, other__asks__within="")
    (packages / "other" / "asks" / "__init__.py").write_text("OTHER = True\n")
    imported, script, expected = SITUATIONS[situation]
    script = script.replace("{path!r}", repr(str(packages)))
    assert printed(ASKED.format(path=str(packages), imported=imported, script=script)) == [expected]


def test_native_code_is_not_imported_twice(packages: Path) -> None:
    change = "imports._is_native = lambda package: True; os.environ['SET'] = 'after'"
    found = printed(BROUGHT_BACK.format(path=str(packages), change=change))
    assert found[0] == "True True True before True"
    assert "reads was imported before the script had set SET, and cannot be imported again" in found[-1]


def test_what_fails_the_second_time_is_as_it_was_before(packages: Path) -> None:
    with (packages / "above.py").open("a") as file:
        file.write("\nimport json\nif hasattr(json, 'mine'): raise KeyError('mine already')\njson.mine = 1\n")
    found = printed(BROUGHT_BACK.format(path=str(packages), change="os.environ['SET'] = 'after'"))
    assert found[:2] == ["True True True before True", "True reads.deep True True"]
    assert "above cannot be imported again: KeyError: 'mine already'" in found[-2]
    assert "reads was imported before the script had set SET, and cannot be imported again" in found[-1]


def test_two_that_fail_the_second_time_are_as_they_were(packages: Path) -> None:
    for name, file in ("above", "above.py"), ("reads", "reads/__init__.py"):
        with (packages / file).open("a") as more:
            more.write(f"\nimport json\nif hasattr(json, {name!r}): raise KeyError('mine already')\n")
            more.write(f"json.{name} = 1\n")
    found = printed(BROUGHT_BACK.format(path=str(packages), change="os.environ['SET'] = 'after'"))
    assert found[:2] == ["True True True before True", "True reads.deep True True"]


@pytest.mark.parametrize("look", ["dict(os.environ)", "list(os.environ.items())", "os.environ.copy()"])
def test_who_looks_at_all_variables_has_read_those_that_bear_its_name(look: str, tmp_path: Path) -> None:
    files(tmp_path, looking=f"import os\nALL = {look}\nos.environ.get('NAMED')")
    code = f"""
        import sys
        sys.path.insert(0, {str(tmp_path)!r})
        from ft_core.worker import imports
        with imports.noted():
            import looking
        print(sorted(imports._packages["looking"].reads))
    """
    assert printed(code, LOOKING_AT="1", OTHER="2", NAMED="3") == ["['LOOKING_AT', 'NAMED']"]


# -- what must not be in a process that others are forked from -------------------------------------

FORKED = """
    import multiprocessing, os, sys
    from ft_core.node.workers import preload

    def look():
        import importlib, sys, torch
        here = {name: name in sys.modules for name in sys.argv[2:]}
        print(here, "CONSTANT" in os.environ, preload.WITHOUT in os.environ, flush=True)
        from ft_core.worker import import_output
        import_output.show()
        torch.arange(1 << 20).float().sin()

    if __name__ == "__main__":
        os.environ[preload.ENV] = sys.argv[1]
        context = multiprocessing.get_context("forkserver")
        context.set_forkserver_preload(["ft_core.node.workers.warm"])
        child = context.Process(target=look)
        child.start()
        child.join(60)
        sys.exit(child.exitcode)
"""


@pytest.mark.parametrize(
    ("culprit", "why"),
    [
        (
            "import threading\nthreading.Thread(target=threading.Event().wait, daemon=True).start()",
            "a thread",
        ),
        ("import torch\ntorch.manual_seed(3)", "seeds random numbers"),
        ("import random\nrandom.seed(3)", "seeds random numbers"),
        ("import torch\ntorch.arange(1 << 20).float().sin()", "native threads"),
        ("", ""),
    ],
)
def test_a_package_that_does_not_survive_a_fork_is_left_to_the_script(
    culprit: str, why: str, tmp_path: Path
) -> None:
    site = files(
        tmp_path / "site-packages", culprit=culprit, harmless="import os\nassert os.environ['CONSTANT']"
    )
    files(tmp_path / "job", train="import os\nos.environ['CONSTANT'] = '1'\nimport harmless\nimport culprit")
    files(tmp_path, look=FORKED)
    environment = os.environ | {"PYTHONPATH": str(site), "OMP_NUM_THREADS": "2"}
    look = str(tmp_path / "look.py"), str(tmp_path / "job" / "train.py"), "harmless", "culprit"
    done = subprocess.run(
        [sys.executable, *look], env=environment, capture_output=True, text=True, timeout=150, check=False
    )
    assert done.returncode == 0, done.stderr
    assert str({"harmless": True, "culprit": not why}) + " False False" in done.stdout
    assert ("workers import culprit themselves, and start later for it: it" in done.stderr) is bool(why)
    assert why in done.stderr


@pytest.mark.parametrize(
    ("script", "package"),
    [("megatron/pretrain_gpt_core.py", "megatron.core"), ("deepspeed/pretrain_clm.py", "deepspeed")],
)
def test_nothing_of_a_recipe_is_left_to_it(script: str, package: str, tmp_path: Path) -> None:
    pytest.importorskip(package)
    files(tmp_path, look=FORKED)
    environment = os.environ | {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "2"}
    look = str(tmp_path / "look.py"), str(ROOT / "recipes" / script), package
    done = subprocess.run(
        [sys.executable, *look], env=environment, capture_output=True, text=True, timeout=150, check=False
    )
    assert str({package: True}) in done.stdout and "workers import" not in done.stderr
