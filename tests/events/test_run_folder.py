import json

from dynamix.errors import ConfigError
from dynamix.events.run_folder import RunFolder
from tests.refused import refused


def test_a_folder_says_what_ran_with_which_versions_on_what(tmp_path):
    folder = RunFolder("demo", tmp_path / "run")
    folder.write_run(seeds=[1])
    written = json.loads((folder.path / "run.json").read_text())
    assert written["seeds"] == [1]
    assert written["versions"]["torch"]
    assert written["machine"]["cores"] >= 1
    assert {"schema", "commit", "started", "argv"} <= set(written)


def test_a_folder_with_something_in_it_is_refused(tmp_path):
    (tmp_path / "x").write_text("")
    refused(ConfigError, "new or empty", RunFolder, "demo", tmp_path)
    refused(ConfigError, "new or empty", RunFolder, "demo", tmp_path / "x")
