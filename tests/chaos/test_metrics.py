"""A Prometheus reads what the controller and the agents of a job serve, while a worker of it is killed."""

from __future__ import annotations

import contextlib
import json
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path
from urllib import parse, request

import pytest
from harness import Job
from loading_jobs import Loading
from ports import free_port
from waiting import wait_for_value


@contextlib.contextmanager
def prometheus(command: str, directory: Path, urls: list[str]) -> Iterator[str]:
    """One that reads these every second; the base URL of its API."""
    targets = [url.removeprefix("http://") for url in urls]
    scrape = [{"job_name": "ft", "static_configs": [{"targets": targets}]}]
    config = {"global": {"scrape_interval": "1s", "scrape_timeout": "1s"}, "scrape_configs": scrape}
    directory.mkdir()
    (directory / "prometheus.yml").write_text(json.dumps(config))
    address = f"127.0.0.1:{free_port()}"
    flags = {
        "config.file": directory / "prometheus.yml",
        "storage.tsdb.path": directory / "data",
        "web.listen-address": address,
    }
    started = [command, *(f"--{name}={value}" for name, value in flags.items())]
    quiet = {"stdout": subprocess.DEVNULL, "stderr": subprocess.DEVNULL}
    with subprocess.Popen(started, **quiet) as process:
        try:
            yield f"http://{address}/api/v1"
        finally:
            process.kill()


def value(api: str, query: str) -> float:
    """What it says now; -1: nothing."""
    with contextlib.suppress(OSError, ValueError):
        with request.urlopen(f"{api}/query?query={parse.quote(query)}", timeout=10) as answer:
            found = json.loads(answer.read())["data"]["result"]
        return float(found[0]["value"][1]) if found else -1.0
    return -1.0


def test_a_prometheus_reads_a_job(tmp_path: Path) -> None:
    if (command := shutil.which("prometheus")) is None:
        pytest.skip("prometheus was not found: that one reads the metrics was left out (Debian: prometheus)")
    training = Loading(("--num-workers=0",))
    ftrun = ("--ft-metrics-port=0",)
    with Job(tmp_path / "job", training, 1_000_000, spares=1, ftrun=ftrun) as job:
        job.wait_for("resumed")

        def served() -> list[Path]:
            found = [*job.job_dir.glob("http"), *(job.job_dir / "logs").glob("node*/http")]
            return found if len(found) == 4 else []

        urls = [path.read_text().strip() for path in job.until(served, "four that serve metrics")]
        with prometheus(command, tmp_path / "prometheus", urls) as api:
            wait_for_value(lambda: value(api, "sum(up)"), 4.0, 60)
            job.kill_worker(1)
            wait_for_value(lambda: value(api, 'ft_recoveries_total{origin="memory"}'), 1.0, 60)
            wait_for_value(lambda: value(api, "sum(ft_failures_total)"), 1.0, 60)
            wait_for_value(lambda: value(api, "count(ft_role_step > 0)"), 2.0, 60)
            wait_for_value(lambda: value(api, "ft_productive_seconds_total") > 0, True, 60)


def test_who_holds_the_others_up_is_told_from_those_who_wait(tmp_path: Path) -> None:
    training = Loading(("--num-workers=0", "--slow=0.1"), world=4)
    with Job(tmp_path / "job", training, 1_000_000) as job:
        job.wait_for("resumed")
        url = (job.job_dir / "http").read_text().strip()

        def stragglers() -> list[str]:
            with request.urlopen(f"{url}/metrics", timeout=30) as answer:
                lines = answer.read().decode().splitlines()
            return [line for line in lines if line.startswith("ft_straggler_score{")]

        (line,) = job.until(stragglers, "somebody who stands out")
        name, score = line.split()
        assert name == 'ft_straggler_score{part="compute",role="3"}' and float(score) > 2.0
        with request.urlopen(f"{url}/api/stream", timeout=30) as stream:
            lines = iter(stream.readline, b"")
            state = next(line for line in lines if line.startswith(b"data: "))
        (*_, loss) = json.loads(state[6:])["series"][-1]
        assert loss > 0, "as the script tells it"
