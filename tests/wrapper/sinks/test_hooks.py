"""Hooks tell what happens, at least once, and hold nobody up; a webhook's URL stays secret."""

from __future__ import annotations

import json
import socket
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest

from resihp.errors import ConfigurationError
from resihp.record import journal
from resihp.wrapper.config.schema import HooksSection
from resihp.wrapper.sinks.hooks import (
    EVENT_ENTRIES,
    Hook,
    checked,
    command,
    document,
    entries_of,
    event_of,
    masked,
    url_in,
    webhook,
)
from resihp.wrapper.sinks.queue import BackgroundQueue, UndeliveredError
from tests.db.conftest import BEGAN, any_layout_story, node_story, started, story, write_journal
from tests.waiting import gone, until

ALL = tuple(EVENT_ENTRIES)
END = journal.Record(99, BEGAN + 99, journal.JobEnded(exit_code=1, state="failed", reason='a "b"\n<é>\udc80'))


@dataclass
class Site:
    """A web server on loopback that answers as told, and remembers what it was sent."""

    answers: list[int] = field(default_factory=list)
    """Statuses of the next requests; 200 then."""
    headers: dict[str, str] = field(default_factory=dict)
    got: list[dict[str, Any]] = field(default_factory=list)
    methods: list[str] = field(default_factory=list)
    url: str = ""


@pytest.fixture
def site() -> Iterator[Site]:
    made = Site()

    class Handler(BaseHTTPRequestHandler):
        def answer(self) -> None:
            body = self.rfile.read(int(self.headers.get("Content-Length", 0)))
            made.methods.append(f"{self.command} {self.path}")
            status = made.answers.pop(0) if made.answers else 200
            if status == 200:
                made.got.append(json.loads(body))
            self.send_response(status)
            for name, value in made.headers.items():
                self.send_header(name, value)
            self.end_headers()

        do_POST = do_GET = answer

        def log_message(self, *_: object) -> None:
            pass

    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        made.url = f"http://127.0.0.1:{server.server_port}/hook/SECRET?token=SECRET"
        thread = threading.Thread(target=server.serve_forever, args=(0.01,))
        thread.start()
        yield made
        server.shutdown()
        thread.join()


def hook(tell: Callable[[bytes], None], folder: Path, said: list[str], **arguments: Any) -> Hook:
    events = arguments.pop("events", ALL)
    pauses_s = arguments.pop("pauses_s", (0.0, 0.0))
    return Hook(
        "h", tell, "j", entries_of(events), noted=folder / "told-h", say=said.append, pauses_s=pauses_s, **arguments
    )


def soon() -> float:
    return time.monotonic() + 20


# --- what is told ---------------------------------------------------------------------------------------------------


def test_a_webhook_hears_what_it_was_promised(site: Site, tmp_path: Path) -> None:
    said: list[str] = []
    it = hook(webhook(lambda: site.url, 5), tmp_path, said, events=("failure", "recovery", "end"))
    for record in write_journal(tmp_path / "journal", story()):
        it.submit(record)
    assert it.close(soon())
    assert [each["entry"] for each in site.got] == ["FailureFound", "Reconfigured", "JobEnded"]
    failure = site.got[0]
    assert (failure["schema"], failure["job"], failure["kind"]) == (1, "j", "failure")
    assert failure["id"].startswith("j:")
    assert failure["time"] == "2025-06-15T15:06:47.900Z"
    assert failure["text"].startswith("failure 1: rank 5 (n2 device 1) killed by signal 9")
    expected = {"failure_kind": "fail-stop", "failure": 1, "ranks": [5], "node": "n2", "device": 1, "epoch": 2}
    assert failure["ids"].items() >= expected.items()
    assert site.methods == ["POST /hook/SECRET?token=SECRET"] * 3
    assert it.counts == {"told": 3, "failed": 0, "dropped": 0}
    assert said == []


@pytest.mark.parametrize(
    ("state", "exit_code"), [("completed", 0), ("failed", 5), ("cancelled", 75), ("cancelled", 143), ("abnormal", None)]
)
def test_the_end_is_told_with_the_true_outcome(state: Any, exit_code: int | None) -> None:
    """Whatever Slurm calls it: a mail made of it must not say CANCELLED of a job whose training is complete."""
    ended = journal.JobEnded(exit_code=exit_code, state=state, reason="why it ended")
    found = document("12-r1", journal.Record(7, BEGAN, ended))
    assert (found["kind"], found["job"], found["ids"]["state"]) == ("end", "12-r1", state)
    assert found["ids"].get("exit_code") == exit_code
    assert state in found["text"]
    assert "why it ended" in found["text"]


def test_every_entry_can_be_told(tmp_path: Path) -> None:
    for told in (story(), any_layout_story(), node_story()):
        for record in write_journal(tmp_path / "journal", told):
            if event_of(record.entry) is None:
                continue
            found = json.loads(json.dumps(document("j", record)))
            assert found["text"]
            assert found["ids"].get("epoch", 1) >= 0
        (tmp_path / "journal").unlink()


def test_odd_words_come_out_as_they_are(site: Site, tmp_path: Path) -> None:
    it = hook(webhook(lambda: site.url, 5), tmp_path, [])
    it.submit(END)
    assert it.close(soon())
    assert 'a "b"\n<é>\udc80' in site.got[0]["text"]


def test_defaults_are_events_that_there_are() -> None:
    assert set(HooksSection().events) < set(EVENT_ENTRIES)


# --- what fails -----------------------------------------------------------------------------------------------------


def test_it_is_tried_again_and_said_once(site: Site, tmp_path: Path) -> None:
    said: list[str] = []
    site.answers = [503, 503, 200]
    it = hook(webhook(lambda: site.url, 5), tmp_path, said)
    it.submit(END)
    assert it.close(soon())
    assert len(site.got) == 1
    assert said == []


def test_what_fails_is_said_once_and_that_it_works_again(site: Site, tmp_path: Path) -> None:
    said: list[str] = []
    site.answers = [503] * 6 + [404]
    it = hook(webhook(lambda: site.url, 5), tmp_path, said)
    for _ in range(4):
        it.submit(END)
    assert it.close(soon())
    host = site.url.split("/")[2].split(":")[0]
    assert said == [
        f"hook h: webhook http://{host}/*** answered 503; not reported again until it works, the job continues",
        "hook h: works again",
    ]
    assert it.counts == {"told": 1, "failed": 3, "dropped": 0}


def test_redirects_are_not_followed(site: Site, tmp_path: Path) -> None:
    said: list[str] = []
    site.answers, site.headers = [302], {"Location": site.url}
    it = hook(webhook(lambda: site.url, 5), tmp_path, said)
    it.submit(END)
    assert it.close(soon())
    assert len(site.methods) == 1
    assert "answered 302" in said[0]


@pytest.mark.parametrize("host", ["127.0.0.1:1", "no-such-host.invalid", "127.0.0.1:99999"])
def test_no_message_holds_the_secret(host: str, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    said: list[str] = []
    it = hook(webhook(lambda: f"http://{host}/SECRET?x=SECRET", 5), tmp_path, said, pauses_s=())
    it.submit(END)
    assert it.close(soon())
    assert len(said) == 1
    assert "SECRET" not in said[0] + caplog.text


def hung_listener() -> socket.socket:
    """Takes connections and never says a word."""
    return socket.create_server(("127.0.0.1", 0), backlog=5)


def test_a_hung_webhook_holds_nobody_up(tmp_path: Path) -> None:
    said: list[str] = []
    with hung_listener() as listener:
        url = f"http://127.0.0.1:{listener.getsockname()[1]}/"
        it = hook(webhook(lambda: url, 30), tmp_path, said)
        for _ in range(5000):
            it.submit(END)
        connection, _ = listener.accept()  # it is in the middle of the first
        assert it.counts["dropped"] >= 3900, "the oldest make room"
        assert it.counts["told"] == 0
        assert not it.close(time.monotonic())
        connection.close()
    assert any("left" in text for text in said)


def test_a_webhook_that_takes_too_long_is_given_up(tmp_path: Path) -> None:
    said: list[str] = []
    with hung_listener() as listener:
        url = f"http://127.0.0.1:{listener.getsockname()[1]}/"
        it = hook(webhook(lambda: url, 0.05), tmp_path, said, pauses_s=())
        it.submit(END)
        assert it.close(soon())
    assert "webhook http://127.0.0.1/***: no answer" in said[0]


# --- by a command ---------------------------------------------------------------------------------------------------


def test_a_command_gets_each_event_without_a_shell(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RESIHP_HOOKS__WEBHOOK", "https://example.org/SECRET")
    script = tmp_path / "tell me; exit"
    script.write_text(f'#!/bin/sh\ncat >> {tmp_path}/got\necho "$1" >> {tmp_path}/arguments\nenv > {tmp_path}/env\n')
    script.chmod(0o755)
    said: list[str] = []
    it = hook(command([str(script), "$(id) `id`"], 10), tmp_path, said)
    for record in write_journal(tmp_path / "journal", node_story()):
        it.submit(record)
    assert it.close(soon())
    lines = [json.loads(line) for line in (tmp_path / "got").read_text().splitlines()]
    assert "SECRET" not in (tmp_path / "env").read_text()
    assert {line["kind"] for line in lines} == {"start", "node", "drain", "replacement"}
    assert set((tmp_path / "arguments").read_text().splitlines()) == {"$(id) `id`"}
    assert said == []


def test_a_hung_command_is_killed_with_what_it_started(tmp_path: Path) -> None:
    said: list[str] = []
    script = tmp_path / "hang"
    script.write_text(f"#!/bin/sh\nsleep 1000 &\necho $! > {tmp_path}/child\nsleep 1000\n")
    script.chmod(0o755)
    it = hook(command([str(script)], 2), tmp_path, said)
    it.submit(END)
    assert it.close(soon())
    assert said == [
        f"hook h: command {script}: not finished within 2 s, killed; not reported again until it works, "
        "the job continues"
    ]
    child = int((tmp_path / "child").read_text())
    until(lambda: gone(child))


@pytest.mark.parametrize(
    ("argv", "words"), [(["/no/such"], "cannot be started"), (["/bin/false"], "ended with 1"), (["/bin/true"], "")]
)
def test_commands_that_fail_or_do_not_read(argv: list[str], words: str, tmp_path: Path) -> None:
    said: list[str] = []
    it = hook(command(argv, 10), tmp_path, said)
    it.submit(END)
    assert it.close(soon())
    assert words in "".join(said)
    assert bool(said) == bool(words)


# --- taking over ----------------------------------------------------------------------------------------------------


def test_a_successor_tells_what_its_predecessor_did_not(tmp_path: Path) -> None:
    records = write_journal(tmp_path / "journal", node_story())
    told: list[int] = []

    def tell(content: bytes) -> None:
        told.append(int(json.loads(content)["id"].split(":")[1]))

    first = hook(tell, tmp_path, [])
    for record in records[:9]:
        first.submit(record)
    assert first.close(soon())
    second = hook(tell, tmp_path, [], past=records[:14])
    for record in records[14:]:
        second.submit(record)
    assert second.close(soon())
    assert told == [record.seq for record in records]


def test_what_could_not_be_noted_is_told_twice_and_not_never(tmp_path: Path) -> None:
    records = write_journal(tmp_path / "journal", node_story())[:4]
    told: list[bytes] = []
    (tmp_path / "told-h").mkdir()
    for _ in range(2):
        assert hook(told.append, tmp_path, [], past=records).close(soon())
    assert told[:4] == told[4:]


# --- the URL --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "url",
    ["", "example.org/SECRET", "file:///SECRET", "https:///SECRET", "http://u:SECRET@h/", "http://h/SECRET x",
     "http://h:port/SECRET", "http://h/SECRÉT", "http://h/SECRET\r\nX: y", "http://[::1/SECRET"],
)  # fmt: skip
def test_urls_that_nothing_can_be_posted_to(url: str) -> None:
    with pytest.raises(ValueError, match=r"^must") as caught:
        checked(url)
    assert "SECR" not in str(caught.value)


def test_a_masked_url_names_the_host_only() -> None:
    assert masked("https://hooks.example.org:8443/services/SECRET?x=SECRET") == "webhook https://hooks.example.org/***"


def test_a_url_in_a_file(tmp_path: Path) -> None:
    path = tmp_path / "url"
    path.write_text("https://example.org/SECRET\n")
    path.chmod(0o600)
    assert url_in(path) == "https://example.org/SECRET"
    path.chmod(0o640)
    with pytest.raises(ConfigurationError, match=r"others may read it; chmod 600"):
        url_in(path)
    path.chmod(0o600)
    path.write_bytes(b"\xff")
    with pytest.raises(ConfigurationError, match="is not text"):
        url_in(path)
    path.write_text("SECRET")
    with pytest.raises(ConfigurationError, match="must be a URL") as caught:
        url_in(path)
    assert "SECRET" not in str(caught.value)
    with pytest.raises(ConfigurationError, match="No such file"):
        url_in(tmp_path / "nowhere")


# --- the thread and its queue ---------------------------------------------------------------------------------------


def test_order_is_kept_and_every_item_counts_once() -> None:
    done: list[int] = []
    failures = iter([True, False, True, True, False, True, True, True])

    def work(item: int) -> None:
        if next(failures, False):
            raise UndeliveredError("no")
        done.append(item)

    said: list[str] = []
    aside = BackgroundQueue("a", work, said.append, pauses_s=(0.0, 0.0))
    for i in range(4):
        aside.put(i)
    assert aside.close(soon())
    assert done == [0, 1, 3]
    assert (aside.done, aside.failed, aside.dropped) == (3, 1, 0)


def test_a_mistake_of_ours_is_logged_and_the_next_is_done(caplog: pytest.LogCaptureFixture) -> None:
    done: list[int] = []

    def work(item: int) -> None:
        done.append(1 // item)

    said: list[str] = []
    aside = BackgroundQueue("a", work, said.append)
    aside.put(0)
    aside.put(1)
    assert aside.close(soon())
    assert done == [1]
    assert "ZeroDivisionError" in said[0]
    assert "ZeroDivisionError" in caplog.text


def test_a_pause_between_tries_ends_with_the_job() -> None:
    tried = threading.Event()

    def work(item: int) -> None:
        tried.set()
        raise UndeliveredError("no")

    aside = BackgroundQueue("a", work, lambda text: None, pauses_s=(3600.0,))
    aside.put(1)
    assert tried.wait(10)
    assert aside.close(soon()), "an hour's pause would be longer than that"


def test_whoever_listened_may_be_gone() -> None:
    def say(text: str) -> None:
        raise RuntimeError("Event loop is closed")

    def work(item: int) -> None:
        raise UndeliveredError("no")

    aside = BackgroundQueue("a", work, say)
    aside.put(1)
    aside.put(2)
    assert aside.close(soon())
    assert aside.failed == 2


def test_nothing_is_left_of_a_closed_one() -> None:
    for _ in range(10):
        assert BackgroundQueue("closed", lambda item: None, print).close(soon())
    assert "closed" not in [thread.name for thread in threading.enumerate()]


def test_started_is_no_default() -> None:
    assert "start" not in HooksSection().events
    assert document("j", journal.Record(1, BEGAN, started()))["kind"] == "start"
