"""A browser walks the page of a job. From there a worker and a node are killed, and a node is drained."""

from __future__ import annotations

import contextlib
import json
import os
import re
import socket
from pathlib import Path
from typing import Any
from urllib import request
from urllib.error import HTTPError

from browser import chromium, opened
from harness import Job
from loading_jobs import Loading
from waiting import wait_for_value

PICTURES = os.environ.get("FT_PICTURES")
"""A directory, if pictures are to be taken for docs/."""
DESK, PHONE = {"width": 960, "height": 800}, {"width": 390, "height": 844}
DRAWN = """plots => plots.every(plot => {
    const canvas = plot.querySelector("canvas");
    const {data} = canvas.getContext("2d").getImageData(0, 0, canvas.width, canvas.height);
    return data.some((blue, at) => at % 4 === 2 && blue > data[at - 2] + 60);
})"""
"""Whether each has a curve, which is blue, beside its axes, which are grey."""
OVERFLOWS = "() => document.documentElement.scrollWidth > document.documentElement.clientWidth"


def picture(page: Any, name: str, whole: bool = False) -> None:
    if PICTURES is not None:
        page.mouse.move(0, 0)
        page.screenshot(path=Path(PICTURES, f"page-{name}.png"), full_page=whole)


def card(page: Any, name: str) -> str:
    """A figure on it."""
    label = page.locator("dt", has_text=re.compile(f"^{name}$"))
    text: str = page.locator(".cards div", has=label).locator("dd").text_content()
    return text


def act(url: str, action: dict[str, Any], **headers: str) -> int:
    """Without a browser."""
    given = {"Content-Type": "application/json", **headers}
    asked = request.Request(f"{url}/api/act", json.dumps(action).encode(), given, method="POST")
    try:
        with request.urlopen(asked, timeout=30) as answer:
            return int(answer.status)
    except HTTPError as error:
        return error.code


def test_a_browser_walks_the_page_of_a_job(tmp_path: Path) -> None:
    errors: list[str] = []
    with contextlib.ExitStack() as stack:
        browser = stack.enter_context(chromium())
        clients = stack.enter_context(contextlib.ExitStack())  # which are there when the job ends
        training = Loading(("--num-workers=0",))
        job = stack.enter_context(Job(tmp_path / "gpt-small", training, 1_000_000, spares=3))
        job.wait_for("resumed")
        job.until((job.job_dir / "page").exists, "the page's address")
        address = (job.job_dir / "page").read_text().strip()
        url = (job.job_dir / "http").read_text().strip()
        assert address.startswith(f"{url}/#token=")
        for number in range(40):  # those who look, and read nothing
            client = clients.enter_context(
                socket.create_connection(("127.0.0.1", int(url.rpartition(":")[2])))
            )
            client.sendall(b"GET /api/stream HTTP/1.1\r\nHost: localhost\r\n\r\n" * (number % 2))

        page = stack.enter_context(opened(browser, url, errors))
        wait_for_value(page.locator(".node.s-well").count, 2)
        wait_for_value(page.locator(".node.s-spare").count, 3)
        check_reading_only(page, url, job)

        page = stack.enter_context(opened(browser, address, errors))
        page.get_by_role("button", name="operator").wait_for()
        assert "token" not in page.url
        kill_a_worker(page, job)
        kill_a_node(page, job)
        drain_a_node(page, job)
        steps = card(page, "steps done")
        wait_for_value(lambda: card(page, "steps done") != steps, True)
        wait_for_value(page.locator(".plot").count, 5)  # with the loss, which this script tells
        wait_for_value(lambda: page.locator(".plot").evaluate_all(DRAWN), True)
        wait_for_value(lambda: (card(page, "recoveries"), card(page, "spares")), ("2", "1"))
        wait_for_value(lambda: page.locator("#spent i.c-restoring").count(), 1)
        page.locator("#events-box summary").click()
        page.locator("#events tr", has_text="injected").first.wait_for()
        page.locator("#events-box summary").click()
        for name, about in {
            "light": {"color_scheme": "light", "viewport": DESK},
            "dark": {"color_scheme": "dark", "viewport": DESK},
            "phone": {"color_scheme": "light", "viewport": PHONE, "is_mobile": True},
        }.items():
            with opened(browser, url, errors, **about) as other:
                other.locator(".recovery").nth(1).wait_for()
                other.locator(".recovery summary").first.click()
                other.locator(".recovery pre").first.wait_for()
                assert not other.evaluate(OVERFLOWS)
                picture(other, name, whole=True)
    assert not errors
    console = (tmp_path / "gpt-small.console").read_text()
    assert "Traceback" not in console and "Exception" not in console, console


def check_reading_only(page: Any, url: str, job: Job) -> None:
    """Also with the keyboard."""
    assert page.get_by_role("button", name="read only").is_visible()
    cells = page.locator(".node")
    cells.first.focus()
    page.keyboard.press("ArrowRight")
    page.keyboard.press("Enter")
    page.locator("dialog#node .loss").wait_for()
    title = page.locator("#node-title").text_content()
    assert title == cells.nth(1).get_attribute("data-name")
    wait_for_value(lambda: "others hold all" in page.locator(".loss").text_content(), True)
    page.get_by_role("button", name="flight record").click()
    page.get_by_text("main thread:").wait_for()
    assert page.get_by_role("button", name="kill").count() == 0
    page.keyboard.press("Escape")
    assert page.evaluate("document.activeElement.dataset.name") == title
    for action in ({"do": "kill", "role": 0}, {"do": "kill", "node": title}):
        assert act(url, action) == 401 == act(url, action, Authorization="Bearer x")
    assert not [event for event in job.events() if event["event"] == "injected"]


def kill_a_worker(page: Any, job: Job) -> None:
    """It is asked twice."""
    page.locator(".node.s-well").first.click()
    button = page.locator("dialog#node").get_by_role("button", name="kill …", exact=True)
    button.click()
    page.locator("dialog#confirm").get_by_text("This will SIGKILL the worker of role").wait_for()
    page.locator("dialog#confirm").get_by_role("button", name="Cancel").click()
    assert not [event for event in job.events() if event["event"] == "injected"]
    button.click()
    page.get_by_role("button", name="Yes, do it").click()
    job.wait_for("injected")
    page.keyboard.press("Escape")
    job.wait_for_epoch("resumed", 2)
    recovery = page.locator(".recovery").first
    recovery.locator("summary").click()
    recovery.locator("pre").get_by_text("role").wait_for()
    recovery.get_by_role("cell", name="restoring").wait_for()
    recovery.get_by_text("from memory").wait_for()


def kill_a_node(page: Any, job: Job) -> None:
    """A spare takes its role."""
    wait_for_value(page.locator(".node.s-well").count, 2)
    cell = page.locator(".node.s-well").first
    name = cell.get_attribute("data-name")
    cell.click()
    page.get_by_role("button", name="kill this node").click()
    page.locator("#confirm-loss").get_by_text("could take its role").wait_for()
    picture(page, "confirm")
    page.get_by_role("button", name="Yes, do it").click()
    job.wait_for("injected", 2)
    page.keyboard.press("Escape")
    job.wait_for_epoch("resumed", 3)
    wait_for_value(page.locator(".recovery").count, 2)
    wait_for_value(page.locator(f".node[data-name='{name}']").count, 0)
    wait_for_value(page.locator(".node.s-well").count, 2)


def drain_a_node(page: Any, job: Job) -> None:
    """Its role moves to a spare, and it is gone; nothing has failed."""
    cell = page.locator(".node.s-well").first
    name = cell.get_attribute("data-name")
    cell.click()
    page.get_by_role("button", name="drain this node").click()
    confirm = page.locator("dialog#confirm")
    confirm.get_by_text(f"This will take node {name} out").wait_for()
    confirm.get_by_text("change over between two steps").wait_for()
    confirm.get_by_role("button", name="Cancel").click()
    assert not [event for event in job.events() if event["event"] == "draining"]
    page.get_by_role("button", name="drain this node").click()
    page.get_by_role("button", name="Yes, do it").click()
    job.wait_for("draining")
    page.keyboard.press("Escape")
    job.wait_for("drained")
    wait_for_value(page.locator(f".node[data-name='{name}']").count, 0)
    wait_for_value(page.locator(".node.s-well").count, 2)
    assert not [event for event in job.events() if event["event"] == "detected" and event["epoch"] > 3]
