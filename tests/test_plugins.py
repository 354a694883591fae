"""What other distributions bring: used where it can be, left out and said where it cannot, and never in our way."""

from __future__ import annotations

import os
import textwrap
from importlib import metadata
from pathlib import Path

import pytest
import torch

import dynamix
from dynamix.errors import ConfigError, PolicyFileError
from dynamix.plugins import load_all, plug_ins
from dynamix.policies import make_policy, policy_names
from dynamix.policies.files import describe_policy, trained_as
from dynamix.policies.registry import parse_name
from dynamix.probes import probe_report, probes_here
from dynamix_lab.papers.additive import PRETRAINED
from tests.processes import Done, call, run
from tests.refused import refused

SOURCE = Path(dynamix.__file__).parents[1]
POLICY = """
from dynamix.policies.static import Static

class Mine(Static):
    pass

word = "no policy"
"""
PROBE = """
class Told:
    name = "told"

    @classmethod
    def detect(cls):
        return True, "tells"

    def sample(self):
        return {"device_utilization": 0.5}

class Dear(Told):
    name = "dear"

    @classmethod
    def wanted(cls):
        return False
"""
COMMANDS = """
import typer

def greet(loud: bool = False):
    "Say hello."
    typer.echo("HELLO" if loud else "hello")

several = typer.Typer()

@several.command()
def first():
    typer.echo("the first")

@several.command()
def second():
    typer.echo("the second")

single = typer.Typer()

@single.command(context_settings={"allow_extra_args": True})
def only(context: typer.Context):
    typer.echo(" ".join(context.args))

def odd(value: "NoSuchType"):
    pass

word = "no command"

class Kind:
    pass
"""


class Site:
    """A folder of distributions, on Python's path."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def install(self, name: str, module: str, text: str, group: str, **entries: str) -> None:
        """A distribution with one module, and entry points of one group into it."""
        (self.folder / f"{module}.py").write_text(textwrap.dedent(text))
        info = self.folder / f"{name.replace('-', '_')}-1.0.dist-info"
        info.mkdir()
        (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: 1.0\n")
        lines = [f"{key.replace('__', ' ')} = {module}:{value}" for key, value in entries.items()]
        (info / "entry_points.txt").write_text("\n".join([f"[{group}]", *lines, ""]))

    def dynamix(self, *arguments: str) -> Done:
        """The command line in a process of its own, which these distributions are installed for."""
        path = os.pathsep.join([str(self.folder), str(SOURCE), *filter(None, [os.environ.get("PYTHONPATH")])])
        return call(
            "-c", "from dynamix.cli import main; main()", *arguments, env={"PYTHONPATH": path, "COLUMNS": "200"}
        )


@pytest.fixture
def site(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Site:
    monkeypatch.syspath_prepend(str(tmp_path))
    return Site(tmp_path)


@pytest.fixture
def no_laboratory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As if dynamix-lab were not installed."""
    found = metadata.entry_points

    def without(**kind: str) -> list[metadata.EntryPoint]:
        return [entry for entry in found(**kind) if entry.dist is None or entry.dist.name != "dynamix-lab"]

    monkeypatch.setattr("dynamix.plugins.entry_points", without)
    monkeypatch.syspath_prepend(str(tmp_path))  # another path: what was found before is not taken


def test_a_policy_of_another_distribution_is_made_by_its_name(site: Site) -> None:
    site.install("rules-of-mine", "rules_of_mine", POLICY, "dynamix.policies", mine="Mine")
    assert "mine" in policy_names()
    assert type(make_policy("mine")).__name__ == "Mine"
    assert type(make_policy("guarded:mine")).__name__ == "Guard"
    assert str(parse_name("guarded:mine")) == "guarded:mine"


def test_a_policy_that_does_not_import_says_whose_it_is_and_breaks_no_other(site: Site) -> None:
    site.install("broken-rules", "broken_rules", "import no_such_module", "dynamix.policies", broken="Mine")
    with pytest.raises(ConfigError, match=r"No module named 'no_such_module'; mend or remove broken of broken-rules"):
        make_policy("broken")
    assert make_policy("goodput") is not None
    assert "broken" in policy_names()


def test_what_makes_no_policy_is_refused(site: Site) -> None:
    site.install("rules-of-mine", "wordy_rules", POLICY, "dynamix.policies", wordy="word")
    refused(ConfigError, "a plug-in that makes a policy; mend or remove wordy of rules-of-mine", make_policy, "wordy")


def test_a_policy_cannot_take_a_built_ins_name_and_that_is_said(site: Site) -> None:
    site.install("thief", "thief_rules", POLICY, "dynamix.policies", goodput="Mine")
    assert type(make_policy("goodput")).__name__ == "Goodput"
    with pytest.warns(RuntimeWarning, match="goodput of thief is left out: goodput is dynamix's own"):
        assert policy_names().count("goodput") == 1


def test_of_two_plug_ins_with_one_name_the_first_by_distribution_is_taken(site: Site) -> None:
    for name in ("b-second", "a-first"):
        site.install(name, name.replace("-", "_"), POLICY, "dynamix.policies", twice="Mine")
    told: list[str] = []
    found = plug_ins("dynamix.policies", tell=told.append)
    assert found["twice"].value == "a_first:Mine"
    assert told == ["twice of b-second is left out: twice of a-first has that name"]


@pytest.mark.parametrize("name", ["cannikin", "dynamix-paper", "noise_scale", "pollux", "guarded:pollux"])
def test_a_policy_of_the_laboratory_says_what_to_install_where_that_is_missing(name: str, no_laboratory: None) -> None:
    refused(ConfigError, r"part of the laboratory: pip install \./lab  \(in dynamix's source tree\)", make_policy, name)


def test_a_policy_file_of_the_laboratory_says_what_to_install(no_laboratory: None) -> None:
    refused(PolicyFileError, r"part of the laboratory: pip install \./lab", make_policy, str(PRETRAINED))


def test_with_the_laboratory_its_policies_and_files_are_there() -> None:
    assert {"cannikin", "dynamix-paper", "noise_scale", "pollux"} <= set(policy_names())
    assert type(make_policy(str(PRETRAINED))) is type(make_policy("dynamix-paper"))
    assert trained_as(describe_policy(PRETRAINED)["kind"]) == "dynamix-paper"


def test_a_probe_of_another_distribution_is_asked_unless_it_says_that_nobody_wants_it(site: Site) -> None:
    site.install("probes-of-mine", "probes_of_mine", PROBE, "dynamix.probes", told="Told", dear="Dear")
    assert {"told", "dear"} <= {name for name, _, _ in probe_report()}
    names = [probe.name for probe in probes_here(torch.device("cpu"))]
    assert "told" in names
    assert "dear" not in names


def test_a_probe_that_does_not_import_is_left_out_and_said(site: Site) -> None:
    site.install("broken-probes", "broken_probes", "1 / 0", "dynamix.probes", bad="Told")
    with pytest.warns(RuntimeWarning, match="bad of broken-probes is left out: ZeroDivisionError"):
        names = [probe.name for probe in probes_here(torch.device("cpu"))]
    assert names[0] == "host"
    with pytest.warns(RuntimeWarning, match="bad of broken-probes"):
        assert "bad" not in [name for name, _, _ in probe_report()]


def test_a_probe_cannot_take_a_built_ins_name(site: Site) -> None:
    site.install("thief-of-probes", "thief_probes", PROBE, "dynamix.probes", host="Told")
    with pytest.warns(RuntimeWarning, match="host of thief-of-probes is left out"):
        assert "told" not in [probe.name for probe in probes_here(torch.device("cpu"))]


def test_a_plug_in_that_ends_the_process_as_it_is_imported_does_not(site: Site) -> None:
    site.install("quitter", "quitter", "raise SystemExit(3)", "dynamix.example", quits="x")
    told: list[str] = []
    assert load_all("dynamix.example", tell=told.append) == {}
    assert told == ["quits of quitter is left out: SystemExit: 3"]


def test_commands_of_others_are_there_with_their_settings(site: Site) -> None:
    entries = {"greet": "greet", "several": "several", "single": "single", "policy__greet": "greet"}
    site.install("commands-of-mine", "commands_of_mine", COMMANDS, "dynamix.commands", **entries)
    for arguments, said in (
        (["greet", "--loud"], "HELLO"),
        (["policy", "greet"], "hello"),
        (["several", "second"], "the second"),
        (["single", "a", "--", "b"], "a b"),
    ):
        done = site.dynamix(*arguments)
        assert (done.returncode, done.stdout.strip(), done.stderr) == (0, said, "")


def test_a_command_that_does_not_import_is_said_in_one_line_and_breaks_no_other(site: Site) -> None:
    site.install("broken-commands", "broken_commands", "import no_such_module", "dynamix.commands", bad="x")
    done = site.dynamix("policy", "show", "goodput")
    assert done.returncode == 0
    assert "Goodput" in done.stdout
    said = "dynamix: plug-in bad of broken-commands is left out: ModuleNotFoundError: No module named 'no_such_module'"
    assert done.stderr.splitlines() == [said]


@pytest.mark.parametrize(
    ("entry", "why"),
    [
        ({"word": "word"}, "str is neither a function nor a typer.Typer"),
        ({"kind": "Kind"}, "type is neither a function nor a typer.Typer"),
        ({"odd": "odd"}, "NameError: name 'NoSuchType' is not defined"),
        ({"gone": "gone"}, "AttributeError: module 'commands_of_mine' has no attribute 'gone'"),
        ({"no__such__group": "greet"}, "no such group"),
        ({"report": "greet"}, "report is dynamix's own"),
        ({"policy__show": "greet"}, "policy show is dynamix's own"),
        ({"policy": "several"}, "policy is dynamix's own"),
    ],
)
def test_what_is_no_command_and_what_takes_a_name_of_ours_is_left_out_and_said(
    entry: dict[str, str], why: str, site: Site
) -> None:
    site.install("commands-of-mine", "commands_of_mine", COMMANDS, "dynamix.commands", **entry)
    done = site.dynamix("policy", "show", "static")
    assert done.returncode == 0
    name = next(iter(entry)).replace("__", " ")
    assert done.stderr.splitlines() == [f"dynamix: plug-in {name} of commands-of-mine is left out: {why}"]


def test_an_area_of_the_doctor_that_fails_says_why(site: Site) -> None:
    site.install("ill", "ill", "def rows():\n    raise OSError('no pulse')", "dynamix.doctor", heart="rows")
    done = site.dynamix("doctor")
    assert done.returncode == 0
    assert "OSError: no pulse" in done.stdout


WITHOUT = """
import sys
from importlib import metadata
found = metadata.entry_points
ours = ("dynamix-lab", "dynamix-homomorphic")
metadata.entry_points = lambda **kind: [e for e in found(**kind) if e.dist.name not in ours]
sys.modules["dynamix_lab"] = sys.modules["dynamix_homomorphic"] = None
from dynamix.cli import main
main()
"""


LAB = "dynamix-lab: pip install ./lab (in dynamix's source tree)"
HOMOMORPHIC = "dynamix-homomorphic: pip install './homomorphic[cli]' (in dynamix's source tree)"


@pytest.mark.parametrize(
    ("command", "where"),
    [*((command, LAB) for command in ("bench", "demo", "emulate", "policy train")), ("aggregator", HOMOMORPHIC)],
)
def test_a_command_of_another_distribution_says_what_to_install_where_that_is_missing(command: str, where: str) -> None:
    done = call("-c", WITHOUT, *command.split(), "--any", "thing")
    assert (done.returncode, done.stderr.strip()) == (2, f"error: dynamix {command} is part of {where}")


def test_doctor_says_that_the_laboratory_is_missing() -> None:
    done = run("-c", WITHOUT, "doctor", "--json")
    assert "pip install ./lab  (in dynamix's source tree)" in done.stdout
    assert '"emulation"' not in done.stdout
