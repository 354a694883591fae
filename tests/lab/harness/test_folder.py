from dynamix.events.records import EventLog, read_events
from dynamix.events.run_folder import RunFolder
from dynamix_lab.harness.folder import adopt_events


def test_events_of_several_runs_are_gathered_and_labelled(tmp_path):
    folder = RunFolder("demo", tmp_path / "run")
    for name in ("static", "dbs"):
        with EventLog(tmp_path / name) as log:
            log.write(step=1)
        adopt_events(folder, tmp_path / name, policy=name, seed=0)
        assert not (tmp_path / name).exists()
    assert adopt_events(folder, tmp_path / "missing", policy="x") == []
    assert [e["policy"] for e in read_events(folder.path / "events.jsonl")] == ["static", "dbs"]
