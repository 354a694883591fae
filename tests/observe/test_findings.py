"""What is concluded from ranks' files: who is slow, in what, who waits; and files that are cut, foreign or missing."""

from __future__ import annotations

import io
import json
import os
import resource
import time
from array import array
from pathlib import Path

import numpy as np
import pytest

from dynamix.errors import ConfigError, StateError
from dynamix.events.records import read_events
from dynamix.observe.findings import find
from dynamix.observe.gains import Gain, Gains
from dynamix.observe.joined import join, windows
from dynamix.observe.pays import weigh
from dynamix.observe.rank_file import RankFile
from dynamix.observe.recorder import FIELDS
from dynamix.observe.run import conclude, read, say
from dynamix.observe.words import tell, wrapped
from dynamix_lab.emulator import keeper
from tests.observe.files import TRANSFER_S, write
from tests.refused import refused


@pytest.mark.parametrize(
    ("extra", "part"),
    [
        ({"forward": 0.03}, "forward"),
        ({"backward": 0.03}, "backward"),
        ({"forward": 0.02, "backward": 0.04}, "computing"),
        ({"loader": 0.03}, "data"),
        ({"between": 0.03}, "between"),
        ({"update": 0.03}, "update"),
    ],
)
def test_the_slow_rank_its_part_and_its_victims_are_named(extra: dict[str, float], part: str, tmp_path: Path) -> None:
    write(tmp_path, [{}, {}, extra, {}])
    found = find(join(tmp_path))
    assert (found.verdict, found.rank, found.part) == ("rank", 2, part)
    assert found.wait_s[2] < 0.001
    np.testing.assert_allclose(np.delete(found.wait_s, 2), sum(extra.values()), rtol=0.1)
    assert found.transfer_s == pytest.approx(TRANSFER_S, rel=0.1)
    assert found.slow.late == found.slow.often == 1.0


@pytest.mark.parametrize(
    ("more_s", "says"), [(0.008, "is somewhat slower than the others"), (0.03, "holds the job back")]
)
@pytest.mark.parametrize("every", [1, 2])
def test_the_words_for_a_slow_rank_fit_its_size(more_s: float, says: str, every: int, tmp_path: Path) -> None:
    write(tmp_path, [{}, {}, {"forward": every * more_s}], when=lambda step: step % every == 0)
    assert f"Rank 2 {says}{' at times' if every > 1 else ''}: its own work" in conclude(tmp_path)["text"]


def test_only_a_job_on_emulated_hosts_is_called_emulated(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write(tmp_path, [{}, {}])
    monkeypatch.setenv("DYNAMIX_EVENTS", str(tmp_path / "events.jsonl"))
    assert conclude(tmp_path)["cluster"] == "cluster"
    monkeypatch.setenv(keeper.MARK, "dynamix-1-2-3-4")
    assert conclude(tmp_path)["cluster"] == "emulator"
    monkeypatch.delenv(keeper.MARK)
    assert read(tmp_path)["cluster"] == "emulator", "where it ran, not where it is read"


def test_even_ranks_and_a_long_exchange_are_told_apart(tmp_path: Path) -> None:
    write(tmp_path / "even", [{}, {}, {}])
    assert find(join(tmp_path / "even")).verdict == "even"
    assert "No rank holds the job back" in conclude(tmp_path / "even")["text"]
    write(tmp_path / "network", [{}, {}, {}], transfer_s=0.1)
    found = find(join(tmp_path / "network"))
    assert (found.verdict, found.part, found.rank) == ("network", "network", None)
    assert "This run does not show whose connection is slow" in conclude(tmp_path / "network")["text"]


def test_an_epochs_last_batch_tells_fixed_costs_from_growing_ones(tmp_path: Path) -> None:
    sizes = [[12, 12] if step % 10 == 9 else [32, 32] for step in range(60)]
    write(tmp_path, [{}, {"backward": 0.06}], sizes=sizes)
    told = list(windows(join(tmp_path)))
    assert {tuple(window.batch_size.tolist()) for window, _ in told} == {(32, 32), (12, 12)}
    assert [window.step for window, _ in told] == sorted(window.step for window, _ in told)
    result = conclude(tmp_path)
    assert result["gains"]["grounded"]
    # Here steps take as long with 12 samples as with 32, so balance gains next to nothing.
    assert result["gains"]["balance"]["median"] < 1.25
    write(tmp_path / "one", [{}, {"backward": 0.06}])
    unsure = conclude(tmp_path / "one")
    assert not unsure["gains"]["grounded"]
    assert "with one batch size only" in unsure["text"]
    assert unsure["gains"]["balance"]["low"] < unsure["gains"]["balance"]["median"] < unsure["gains"]["balance"]["high"]


def test_the_run_folder_is_what_a_report_reads(tmp_path: Path) -> None:
    write(tmp_path, [{}, {"forward": 0.03}])
    result = conclude(tmp_path)
    events = read_events(tmp_path / "events.jsonl")
    assert [event["window_index"] for event in events] == list(range(len(events)))
    assert all(event["decision"] == "keep" and event["allocation"] == [32, 32] for event in events)
    assert events[-1]["samples_seen"] == 60 * 64
    assert events[-1]["window"]["wait"][0] > events[-1]["window"]["wait"][1]
    assert events[-1]["parts"]["forward"][1] == pytest.approx(0.05, rel=0.05)
    assert json.loads((tmp_path / "result.json").read_text()) == result
    assert (tmp_path / "report.txt").read_text() == wrapped(result["text"])
    assert read(tmp_path)["rank"] == 1


@pytest.mark.parametrize(("most_bytes", "lost"), [(0, 3), (5000, 1)])
def test_a_full_disk_does_not_lose_the_report(most_bytes: int, lost: int, tmp_path: Path) -> None:
    """A limit on the size of files stands for it. With 5,000 bytes only events.jsonl does not fit."""
    write(tmp_path, [{}, {"forward": 0.03}])
    before, said = resource.getrlimit(resource.RLIMIT_FSIZE), io.StringIO()
    resource.setrlimit(resource.RLIMIT_FSIZE, (most_bytes, before[1]))
    try:
        result = say(tmp_path, said)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
    assert result is not None
    assert "Rank 1 holds the job back" in said.getvalue()
    (line,) = (line for line in result["text"].splitlines() if "could not be written" in line)
    assert [name in line for name in ("events.jsonl", "report.txt", "result.json")] == [True, lost > 1, lost > 1]
    assert [(tmp_path / name).exists() for name in ("report.txt", "result.json")] == [lost == 1] * 2
    assert "could not be written" not in conclude(tmp_path)["text"]


def test_what_does_not_depend_on_the_batch_is_said_not_to_balance(tmp_path: Path) -> None:
    write(tmp_path, [{}, {"forward": 0.02}, {}, {}])
    job = join(tmp_path)
    nothing, more = Gain(1.0, 1.0, 1.02), Gain(1.5, 1.4, 1.6)
    gains = Gains(nothing, more, None, [40, 8, 40, 40], [32] * 4, float("nan"), grounded=True, sizes_known=True)
    found = find(job)
    text = tell(job, found, gains, weigh(job, found, gains))
    assert "The batch size hardly changes how slow rank 1 is" in text
    assert "40, 8" not in text
    assert "Nothing to gain: stay with plain DDP" in text


def test_a_pause_is_left_out_and_said(tmp_path: Path) -> None:
    write(tmp_path, [{}, {}])
    path = tmp_path / "ranks/0/rank0.steps"
    rows = np.fromfile(path, dtype="<f4").reshape(-1, len(FIELDS))
    rows[40, FIELDS.index("between")] = 9.0
    rows.tofile(path)
    result = conclude(tmp_path)
    assert result["pauses"] == [40]
    assert result["verdict"] == "even"
    assert "1 step had a pause" in result["text"]


def test_a_rank_that_is_slow_now_and_then_is_named_by_its_slow_steps(tmp_path: Path) -> None:
    """Its loader runs dry in every tenth step; in most others, too, its forward pass is somewhat late by chance."""
    write(tmp_path, [{"loader": 0.4}, {}, {}], when=lambda step: step % 10 == 5)
    path = tmp_path / "ranks/0/rank0.steps"
    rows = np.fromfile(path, dtype="<f4").reshape(-1, len(FIELDS))
    rows[np.arange(len(rows)) % 10 < 5, FIELDS.index("forward")] += 0.01
    rows.tofile(path)
    found = find(join(tmp_path))
    assert (found.rank, found.part) == (0, "data")
    assert found.slow.often > 0.5


def test_a_machine_that_stands_still_at_times_does_not_change_the_named_part(tmp_path: Path) -> None:
    write(tmp_path, [{"forward": 0.03}, {}], steps=30)
    path = tmp_path / "ranks/0/rank0.steps"
    rows = np.fromfile(path, dtype="<f4").reshape(-1, len(FIELDS))
    rows[[8, 14, 19, 26], FIELDS.index("backward")] += [0.20, 0.17, 0.19, 0.21]
    rows.tofile(path)
    result = conclude(tmp_path)
    assert (result["rank"], result["part"], result["pauses"]) == (0, "forward", [])
    assert "(forward +30 ms compared with the others, as the median of its slow steps)" in result["text"]


@pytest.mark.parametrize(("passes", "line"), [(1, "batch_size=32)"), (4, "batch_size=8, accumulate=4)")])
def test_the_lines_to_write_are_those_of_the_loop_that_was_seen(passes: int, line: str, tmp_path: Path) -> None:
    write(tmp_path, [{}, {"forward": 0.06}], passes=passes)
    text = conclude(tmp_path)["text"]
    assert f"dynamix.Controller(policy='goodput', {line}" in text
    assert ("docs/loop.md" in text) == (passes > 1)


def test_what_is_missing_or_cut_is_said_and_what_is_foreign_is_refused(tmp_path: Path) -> None:
    refused(StateError, "holds no observed steps", conclude, tmp_path)
    refused(ConfigError, "folder of an observed run", read, tmp_path / "nothing")
    write(tmp_path, [{}, {"forward": 0.03}, {}, {}])
    for name in ("rank3.json", "rank3.steps"):
        (tmp_path / "ranks/0" / name).unlink()
    rank2 = tmp_path / "ranks/0/rank2.steps"
    rank2.write_bytes(rank2.read_bytes()[: 40 * 4 * len(FIELDS) + 7])
    facts = tmp_path / "ranks/0/rank2.json"
    facts.write_text(json.dumps({**json.loads(facts.read_text()), "ended": False}))
    result = conclude(tmp_path)
    assert (result["steps"], result["missing"], result["unfinished"], result["rank"]) == (40, [3], [2], 1)
    assert "Rank 3 has no files here: on a machine that cannot see this run folder, or dead." in result["text"]
    assert result["gains"]["best"] is None
    assert "Rank 2 has not reported the end of training: still running, or dead." in result["text"]
    assert "end of training: the command ended first, with exit code 137." in conclude(tmp_path, exit_code=137)["text"]
    assert "with exit code 137" in read(tmp_path)["text"]
    facts.write_text('{"schema": 99}')
    refused(StateError, "schema 99", conclude, tmp_path)
    facts.write_text("{")
    refused(StateError, "rank 2", conclude, tmp_path)


@pytest.mark.parametrize("here", [1, 2])
def test_of_a_node_without_the_others_files_nothing_is_predicted(here: int, tmp_path: Path) -> None:
    """With two ranks here of four, the others' time is not known: it would count as that of the network."""
    write(tmp_path, [{}] * here, world=2 * here, transfer_s=0.2)
    text = conclude(tmp_path)["text"]
    assert text.startswith(f"{here} of {2 * here} ranks, 60 steps")
    assert f"{'Rank 1 has' if here == 1 else 'Ranks 2, 3 have'} no files here" in text
    assert "with a folder that all of them share" in text
    assert "dynamix observe --read" in text
    assert not any(
        said in text for said in ("There is only one rank", "plain DDP", "Controller", "times (", "--nproc-per-node")
    )


def test_a_file_system_that_hangs_holds_nobody_up(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    """A pipe that nobody reads stands for it: opening it waits for good."""
    folder = tmp_path / "ranks/0"
    folder.mkdir(parents=True)
    os.mkfifo(folder / "rank0.steps")
    file = RankFile(folder, 0, {"world": 1})
    began = time.monotonic()
    for _ in range(150):
        file.write(array("f", [0.0] * len(FIELDS)), ended=False)
    file.close(0.1)
    assert time.monotonic() - began < 5.0
    assert capfd.readouterr().err.count("the file system does not answer") == 1
    assert not (folder / "rank0.json").exists()


def test_a_folder_that_cannot_be_written_is_said_once(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "ranks").write_text("a file, no folder")
    file = RankFile(tmp_path / "ranks/0", 3, {"world": 4})
    for _ in range(3):
        file.write(array("f", [0.0] * len(FIELDS)), ended=False)
    file.close()
    assert capfd.readouterr().err.count("rank 3 can no longer write") == 1


@pytest.mark.parametrize(("ranks", "size"), [(2, 129), (3, 7), (5, 32), (5, None)])
def test_shares_to_write_are_the_batch_together(ranks: int, size: int | None, tmp_path: Path) -> None:
    """Rounded one by one they would often be a sample too many or too few."""
    more = [{"forward": 0.013 * rank, "backward": 0.007 * rank} for rank in range(ranks)]
    write(tmp_path, more, sizes=[[float("nan") if size is None else size] * ranks] * 60)
    result = conclude(tmp_path)
    gains, text = result["gains"], result["text"]
    assert gains["sizes_known"] == (size is not None)
    assert ("The batch size is unknown" in text) == (size is None)
    assert sum(gains["sizes"]) == sum(gains["now"]) == ranks * (1000 if size is None else size)
    assert f"with shares of {', '.join(map(str, gains['sizes']))}" in text
