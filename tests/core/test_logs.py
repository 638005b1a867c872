"""What workers print gets to a console once, also when the agent that copied it is gone."""

from __future__ import annotations

from pathlib import Path

import pytest

from ft_core.logs import ERR, OUT, Tee


def test_another_tee_goes_on_where_one_has_ended(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    (tmp_path / "w").mkdir()
    log = tmp_path / "w" / "stdout.log"
    first, second = Tee(OUT | ERR, ""), Tee(OUT | ERR, "[n2]: ")
    first.follow(tmp_path / "w")
    log.write_text("a\nb\nhal")
    first.copy()
    assert capsys.readouterr().out == "a\nb\n"  # an unfinished line may be gone on with
    with log.open("a") as file:
        file.write("f\nlast")
    second.rest([tmp_path / "w", tmp_path / "not here"])
    assert capsys.readouterr().out == "[n2]: half\n[n2]: last\n"  # nobody goes on with it now
    first.copy()
    first.unfollow(tmp_path / "w")
    second.rest([tmp_path / "w"])
    assert capsys.readouterr().out == ""


def test_what_is_printed_last(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    tee = Tee(ERR, "")
    for name in ("a", "b"):
        (tmp_path / name).mkdir()
        tee.follow(tmp_path / name)
        (tmp_path / name / "stdout.log").write_text("not asked for\n")
        (tmp_path / name / "stderr.log").write_text(f"{name}: 10 %\r20 %")
    tee.close()
    assert capsys.readouterr() == ("", "a: 10 %\r20 %\nb: 10 %\r20 %\n")
