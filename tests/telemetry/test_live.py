"""The dashboard and `dynamix watch`: what they serve and show while a run goes on."""

from __future__ import annotations

import contextlib
import itertools
import json
import os
import pty
import re
import signal
import subprocess
import sys
import threading
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

import dynamix
from dynamix.cli.app import app
from dynamix.errors import ConfigError
from dynamix.events.records import read_events
from dynamix.telemetry import find_sources
from tests.runtime.jobs import Training, classes
from tests.telemetry.simulated import simulate

pytest.importorskip("uvicorn")
pytest.importorskip("starlette")

from dynamix.telemetry.dashboard import LiveRuns, check_host, make_app  # after the skip: it needs the extra


@contextlib.contextmanager
def served(*paths: Path, token: str = "") -> Iterator[str]:
    """Address of a dashboard in a thread."""
    import uvicorn

    runs = LiveRuns(find_sources(paths), every_s=0.1)
    config = uvicorn.Config(make_app(runs, token=token), log_level="error", timeout_graceful_shutdown=1)
    sock = uvicorn.Config("", host="127.0.0.1", port=0, log_level="critical").bind_socket()
    sock.listen()
    server = uvicorn.Server(config)
    thread = threading.Thread(target=server.run, kwargs={"sockets": [sock]}, daemon=True)
    runs.start()
    thread.start()
    try:
        yield f"http://127.0.0.1:{sock.getsockname()[1]}"
    finally:
        server.should_exit = True
        thread.join(20)
        runs.close()
        sock.close()


def get(address: str, **headers: str) -> bytes:
    with urllib.request.urlopen(urllib.request.Request(address, headers=headers), timeout=20) as answer:
        return bytes(answer.read())


def windows(address: str) -> int:
    runs = json.loads(get(f"{address}/data.json"))["runs"]
    return int(runs[0]["windows"]) if runs else 0


def test_the_page_follows_a_run_that_is_written(tmp_path: Path) -> None:
    whole = simulate(tmp_path / "whole.jsonl", windows=10).read_bytes().splitlines(keepends=True)
    (tmp_path / "run").mkdir()
    path = tmp_path / "run" / "events.jsonl"
    path.write_bytes(b"".join(whole[:4]) + whole[4][:50])
    with served(tmp_path / "run") as address:
        assert b"live" in get(address)
        with urllib.request.urlopen(f"{address}/news", timeout=20) as news:
            told = -1
            for end in (4, 10):
                with path.open("ab") as file:
                    file.write(b"".join(whole[:end])[path.stat().st_size :])
                until = time.monotonic() + 20
                while windows(address) < end and time.monotonic() < until:
                    time.sleep(0.05)
                assert windows(address) == end
                line = news.readline()
                while not line.startswith(b"data: ") or int(line[6:]) <= told:
                    line = news.readline()
                told = int(line[6:])


def test_it_says_that_it_waits_for_the_first_window(tmp_path: Path) -> None:
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "events.jsonl").touch()
    with served(tmp_path / "run") as address:
        assert "waits for the first" in json.loads(get(f"{address}/data.json"))["headline"]


def refused(address: str, **options: Any) -> int:
    with pytest.raises(urllib.error.HTTPError) as error:
        urllib.request.urlopen(urllib.request.Request(address, **options), timeout=20)
    error.value.close()
    return int(error.value.code)


def test_it_only_reads_and_answers_to_no_other_name(tmp_path: Path) -> None:
    simulate(tmp_path / "events.jsonl", windows=2)
    with served(tmp_path) as address:
        assert refused(address, method="POST", data=b"x") == 405
        assert refused(f"{address}/data.json", headers={"Host": "evil.example"}) == 400
        assert refused(f"{address}/events.jsonl") == 404


def test_a_token_is_asked_for(tmp_path: Path) -> None:
    simulate(tmp_path / "events.jsonl", windows=2)
    token = "correct horse battery"
    with served(tmp_path, token=token) as address:
        assert refused(f"{address}/data.json") == 401
        assert refused(f"{address}/data.json?token=wrong") == 401
        assert json.loads(get(f"{address}/data.json", Authorization=f"Bearer {token}"))["runs"]


def test_other_hosts_need_a_token_and_tls(tmp_path: Path) -> None:
    for host in ("127.0.0.1", "::1", "localhost"):
        check_host(host, "", None)
    check_host("0.0.0.0", "x" * 16, tmp_path)
    for host, token, certificate in (("0.0.0.0", "", None), ("192.0.2.1", "x" * 16, None), ("::", "", tmp_path)):
        with pytest.raises(ConfigError, match="without a token and TLS"):
            check_host(host, token, certificate)
    with pytest.raises(ConfigError, match="16 or more"):
        check_host("127.0.0.1", "short", None)


def test_watch_shows_the_workers_of_a_run(tmp_path: Path) -> None:
    simulate(tmp_path / "few" / "events.jsonl", windows=12)
    done = CliRunner().invoke(app, ["watch", str(tmp_path / "few"), "--once"])
    assert done.exit_code == 0, done.output
    assert "4 workers" in done.stdout
    assert "waiting" in done.stdout
    simulate(tmp_path / "many" / "events.jsonl", workers=90, windows=3)
    done = CliRunner().invoke(app, ["watch", str(tmp_path / "many"), "--once"])
    assert "the 12 slowest of 90 workers" in done.stdout
    assert max(map(len, done.stdout.splitlines())) <= 80


def test_watch_prints_once_if_stdout_is_no_terminal(tmp_path: Path) -> None:
    path = simulate(tmp_path / "events.jsonl", windows=3)
    done = CliRunner().invoke(app, ["watch", str(tmp_path)])
    assert done.exit_code == 0, done.output
    assert "4 workers" in done.stdout
    assert "no line for" not in done.stdout
    os.utime(path, (1e9, 1e9))
    assert "the job has ended, or hangs" in CliRunner().invoke(app, ["watch", str(tmp_path)]).stdout


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
@pytest.mark.parametrize(("command", "shown"), [(["dashboard", "--port", "0"], "/ (Ctrl-C"), (["watch"], "4 workers")])
def test_a_signal_is_an_orderly_end(tmp_path: Path, number: signal.Signals, command: list[str], shown: str) -> None:
    simulate(tmp_path / "events.jsonl", windows=2)
    terminal, inside = pty.openpty()  # `watch` goes on only in a terminal
    line = [sys.executable, "-m", "dynamix.cli.app", *command, str(tmp_path)]
    with (
        os.fdopen(terminal, "rb", buffering=0) as read,
        subprocess.Popen(line, stdout=inside, stderr=subprocess.PIPE) as process,
    ):
        said = b""
        while shown.encode() not in said:
            said += read.read(4096)
        for address in re.findall(r"http://\S+", said.decode()):
            get(address)  # once it answers, it takes signals
        process.send_signal(number)
        assert process.communicate(timeout=60)[1] == b""
    os.close(inside)
    assert process.returncode == 0


def test_the_end_of_a_job_cannot_be_told_from_its_events(tmp_path: Path) -> None:
    """The last line of a closed controller may be short or whole, and a job that is restarted goes on after both."""
    path, state, trained = tmp_path / "events.jsonl", None, 0
    for steps, short in ((10, False), (13, True), (17, False)):
        job = Training(dynamix.Controller("static", 8, interval=10, events=path), classes(520))
        if state is not None:
            job.controller.load_state_dict(state)
        for x, y in itertools.islice(job.batches(1), steps):
            job.train(x, y)
        state, trained = job.controller.state_dict(), trained + 8 * steps
        job.controller.close()
        assert read_events(path)[-1].get("short", False) is short
        (source,) = find_sources([path])
        source.refresh()
        (view,) = source.views.values()
        assert (view.trained, source.ended) == (trained, False)
