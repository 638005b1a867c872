"""Whose the job directory and the secret are."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
from harness import environment

from ft_core.cli.launch import main
from ft_core.settings import SECRET_ENV, Command, Settings

NOBODY = 65534
as_root = pytest.mark.skipif(os.geteuid() != 0, reason="only root can give files to another user")


@pytest.fixture(autouse=True)
def no_secret(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(SECRET_ENV, raising=False)


@pytest.fixture
def script(tmp_path: Path) -> Path:
    path = tmp_path / "train.py"
    path.write_text("raise SystemExit('it ran')")
    return path


@pytest.fixture
def directory(tmp_path: Path) -> Path:
    path = tmp_path / "job"
    path.mkdir(0o755)
    return path


def refused(capfd: pytest.CaptureFixture[str], *arguments: object) -> str:
    """What `ftrun` says, which starts nothing."""
    assert main([str(each) for each in arguments]) == 2
    return capfd.readouterr().err


def begins(script: Path, directory: Path) -> list[object]:
    return ["--standalone", "--job-dir", directory, script]


@as_root
def test_a_directory_of_another_user(
    script: Path, directory: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    os.chown(directory, NOBODY, NOBODY)
    said = refused(capfd, *begins(script, directory))
    assert f"{directory} is a directory of user nobody, not of user root" in said
    assert not list(directory.iterdir()), "nothing was written into it"


def test_a_directory_that_all_may_write_to(
    script: Path, directory: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    directory.chmod(0o1777)
    assert "may be written to by all users of this machine" in refused(capfd, *begins(script, directory))
    assert not list(directory.iterdir())


@as_root
def test_a_directory_that_another_users_link_leads_to(
    script: Path, directory: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    link = tmp_path / "link"
    link.symlink_to(directory)
    os.lchown(link, NOBODY, NOBODY)
    assert f"{link} is a link that user nobody has made" in refused(capfd, *begins(script, link))
    assert not list(directory.iterdir())


def test_a_secret_that_is_a_link(
    script: Path, directory: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "elsewhere").write_text("a secret that somebody knows")
    (directory / "secret").symlink_to(tmp_path / "elsewhere")
    assert f"{directory}/secret is a link, and may be one" in refused(capfd, *begins(script, directory))


def test_a_secret_that_others_may_read(
    script: Path, directory: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    (directory / "secret").write_text("a secret that somebody knows")
    (directory / "secret").chmod(0o644)
    said = refused(capfd, *begins(script, directory))
    assert "secret is open to others (mode 644), who could" in said and "chmod 600" in said


@pytest.mark.parametrize("text", ["", " \n"])
def test_an_empty_secret(
    text: str,
    script: Path,
    directory: Path,
    capfd: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("ft_core.settings._WRITTEN", 0.1)
    (directory / "secret").touch(0o600)
    assert "secret is empty: remove it" in refused(capfd, *begins(script, directory))
    monkeypatch.setenv(SECRET_ENV, text)
    assert f"{SECRET_ENV} is set, and empty" in refused(capfd, *begins(script, directory))


def test_another_secret_than_the_directorys(
    script: Path, directory: Path, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    (directory / "secret").write_text("that of the directory\n")
    (directory / "secret").chmod(0o600)
    monkeypatch.setenv(SECRET_ENV, "that of the environment")
    assert f"{SECRET_ENV} is not the secret of {directory}" in refused(capfd, *begins(script, directory))
    assert not (directory / "job.json").exists()


@as_root
@pytest.mark.parametrize("name", ["", "job.json", "secret"])
def test_who_joins_runs_nothing_that_somebody_else_has_written(
    name: str, script: Path, directory: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    Settings(1, 1, Command(str(script)), controller="127.0.0.1:9").write(directory)
    (directory / "secret").write_text("a secret that somebody knows")
    (directory / "secret").chmod(0o600)
    os.chown(directory / name, NOBODY, NOBODY)
    said = refused(capfd, "--join", "127.0.0.1:9", "--job-dir", directory)
    assert "user nobody" in said and "could have this machine run what they like" in said


def test_the_script_does_not_have_the_secret(tmp_path: Path) -> None:
    """Nor do its children, nor what is left of the environment that its process began with."""
    script = tmp_path / "train.py"
    script.write_text(
        "import os, subprocess\n"
        "child = subprocess.run(['env'], capture_output=True, text=True).stdout\n"
        "print('known' if 'a secret of' in str(dict(os.environ)) + child\n"
        "      + open('/proc/self/environ').read() else 'not known')\n"
    )
    for more in ([], ["--no-python"]):
        command = ["env"] if more else [str(script)]
        words = [sys.executable, "-m", "ft_core.cli.launch", "--standalone", *more]
        words += ["--job-dir", str(tmp_path / f"job{len(more)}"), "--ft-http", "127.0.0.1:0", *command]
        env = environment() | {SECRET_ENV: "a secret of twenty bytes"}
        done = subprocess.run(words, capture_output=True, text=True, env=env, timeout=110)
        assert done.returncode == 0, done.stderr
        assert "a secret of" not in done.stdout + done.stderr
        assert more or "not known" in done.stdout


def test_a_short_secret_is_warned_of(tmp_path: Path, script: Path) -> None:
    words = [sys.executable, "-m", "ft_core.cli.launch", *map(str, begins(script, tmp_path / "job"))]
    done = subprocess.run(
        words, capture_output=True, text=True, env=environment() | {SECRET_ENV: "abc"}, timeout=110
    )
    assert "the job's secret has 3 bytes only" in done.stderr and "openssl rand -hex 32" in done.stderr
