import json
import os
import subprocess

from dynamix.errors import ConfigError
from dynamix.events import run_folder
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


def test_asking_for_the_commit_writes_nothing_into_the_repository(tmp_path, monkeypatch):
    """A lock on the index, left by a job that is killed meanwhile, would stop the next commit."""

    def git(*words):
        whole = ["git", "-C", str(tmp_path), "-c", "user.name=x", "-c", "user.email=x", *words]
        return subprocess.run(whole, check=True, capture_output=True, text=True).stdout.strip()

    module = tmp_path / "src/dynamix/events/run_folder.py"
    monkeypatch.setattr(run_folder, "__file__", str(module))
    assert run_folder.commit() is None, "there is no repository"
    module.parent.mkdir(parents=True)
    module.write_text("")
    git("init")
    git("add", "--all")
    git("commit", "-m", "first")
    (tmp_path / "untracked").write_text("")
    os.utime(module, (0, 0))
    index = (tmp_path / ".git/index").read_bytes()
    assert run_folder.commit() == git("rev-parse", "--short=12", "HEAD")
    assert (tmp_path / ".git/index").read_bytes() == index
    module.write_text("changed")
    assert run_folder.commit() == git("rev-parse", "--short=12", "HEAD") + "-dirty"
