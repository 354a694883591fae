"""What other distributions bring: used where it can be, left out and said where it cannot, and never in our way."""

from __future__ import annotations

import json
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
from dynamix.policies.static import Static
from dynamix.probes import probe_report, probes_here
from dynamix_lab.harness.runs import policy_facts
from dynamix_lab.papers.additive import PRETRAINED
from tests.processes import Done, run
from tests.refused import refused

SOURCE = Path(dynamix.__file__).parents[1]
AREA = "policies of plug-ins"  # of `dynamix doctor`
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


# Each argument is a command line; what ended it is printed behind its output.
LINES = """
import shlex, sys
from dynamix.cli import main
for line in sys.argv[1:]:
    sys.argv = ["dynamix", *shlex.split(line)]
    try:
        main()
    except SystemExit as end:
        print("ended with", end.code, flush=True)
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

    def dynamix(self, *lines: str) -> Done:
        """These command lines in one process, which these distributions are installed for."""
        path = os.pathsep.join([str(self.folder), str(SOURCE), *filter(None, [os.environ.get("PYTHONPATH")])])
        return run("-c", LINES, *lines, env={"PYTHONPATH": path, "COLUMNS": "200"})


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


def test_what_makes_no_policy_says_whose_it_is_and_breaks_no_other(site: Site) -> None:
    site.install("broken-rules", "broken_rules", "import no_such_module", "dynamix.policies", broken="Mine")
    site.install("rules-of-mine", "wordy_rules", POLICY, "dynamix.policies", wordy="word")
    with pytest.raises(ConfigError, match=r"No module named 'no_such_module'; mend or remove broken of broken-rules"):
        make_policy("broken")
    assert make_policy("goodput") is not None
    assert "broken" in policy_names()
    refused(ConfigError, "a plug-in that makes a policy; mend or remove wordy of rules-of-mine", make_policy, "wordy")


def test_the_doctor_says_why_a_policy_cannot_be_imported(site: Site) -> None:
    site.install("broken-rules", "broken_rules", "import no_such_module", "dynamix.policies", broken="Mine")
    site.install("rules-of-mine", "rules_of_mine", POLICY, "dynamix.policies", mine="Mine")
    done = site.dynamix("doctor --json")
    rows = {row["name"]: row for row in json.loads(done.stdout[: done.stdout.rindex("}") + 1])["areas"][AREA]}
    assert rows["mine"]["available"]
    assert not rows["broken"]["available"]
    assert "of broken-rules is left out: ModuleNotFoundError: No module named 'no_such" in rows["broken"]["detail"]
    assert done.stderr == ""


def test_a_result_names_the_distribution_that_a_policy_came_from(site: Site) -> None:
    site.install("rules-of-mine", "rules_of_mine", POLICY, "dynamix.policies", mine="Mine")
    for name in ("mine", "guarded:mine"):
        assert policy_facts(name) == {"name": name, "distribution": "rules-of-mine 1.0"}
    assert policy_facts("lb_bsp") == {"name": "lb_bsp"}
    assert policy_facts("mine", {"mine": Static}) == {"name": "mine"}, "the caller's own"


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


def test_a_policy_of_the_laboratory_says_what_to_install_where_that_is_missing(no_laboratory: None) -> None:
    says = r"part of the laboratory: pip install \./lab  \(in dynamix's source tree\)"
    for name in ("cannikin", "dynamix-paper", "noise_scale", "pollux", "guarded:pollux"):
        refused(ConfigError, says, make_policy, name)
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


@pytest.mark.parametrize(
    ("name", "text", "why"), [("bad", "1 / 0", "ZeroDivisionError"), ("host", PROBE, "host is dynamix's own")]
)
def test_a_probe_that_fails_or_takes_a_name_of_ours_is_left_out_and_said(
    name: str, text: str, why: str, site: Site
) -> None:
    site.install("wrong-probes", f"wrong_{name}", text, "dynamix.probes", **{name: "Told"})
    with pytest.warns(RuntimeWarning, match=f"{name} of wrong-probes is left out: {why}"):
        names = [probe.name for probe in probes_here(torch.device("cpu"))]
    assert names[0] == "host"
    assert "told" not in names
    with pytest.warns(RuntimeWarning, match=f"{name} of wrong-probes"):
        assert "bad" not in [name for name, _, _ in probe_report()]


def test_a_plug_in_that_ends_the_process_as_it_is_imported_does_not(site: Site) -> None:
    site.install("quitter", "quitter", "raise SystemExit(3)", "dynamix.example", quits="x")
    told: list[str] = []
    assert load_all("dynamix.example", tell=told.append) == {}
    assert told == ["quits of quitter is left out: SystemExit: 3"]


def test_commands_of_others_are_there_with_their_settings(site: Site) -> None:
    entries = {"greet": "greet", "several": "several", "single": "single", "policy__greet": "greet"}
    site.install("commands-of-mine", "commands_of_mine", COMMANDS, "dynamix.commands", **entries)
    done = site.dynamix("greet --loud", "policy greet", "several second", "single a -- b")
    said = [line for line in done.stdout.splitlines() if line != "ended with 0"]
    assert (said, done.stderr) == (["HELLO", "hello", "the second", "a b"], "")


WRONG = {
    "word": ("word", "str is neither a function nor a typer.Typer"),
    "kind": ("Kind", "type is neither a function nor a typer.Typer"),
    "odd": ("odd", "NameError: name 'NoSuchType' is not defined"),
    "gone": ("gone", "AttributeError: module 'commands_of_mine' has no attribute 'gone'"),
    "no such group": ("greet", "no such group"),
    "report": ("greet", "report is dynamix's own"),
    "policy show": ("greet", "policy show is dynamix's own"),
    "policy": ("several", "policy is dynamix's own"),
}


def test_what_is_wrong_with_others_commands_is_said_in_a_line_each_and_breaks_none_of_ours(site: Site) -> None:
    entries = {name.replace(" ", "__"): value for name, (value, _) in WRONG.items()}
    site.install("commands-of-mine", "commands_of_mine", COMMANDS, "dynamix.commands", **entries)
    site.install("broken-commands", "broken_commands", "import no_such_module", "dynamix.commands", bad="x")
    site.install("ill", "ill", "def rows():\n    raise OSError('no pulse')", "dynamix.doctor", heart="rows")
    done = site.dynamix("policy show goodput", "doctor")
    assert done.stdout.count("ended with 0") == 2
    assert "Goodput" in done.stdout
    assert "OSError: no pulse" in done.stdout
    said = [f"{name} of commands-of-mine is left out: {why}" for name, (_, why) in WRONG.items()]
    said.append("bad of broken-commands is left out: ModuleNotFoundError: No module named 'no_such_module'")
    assert {f"dynamix: plug-in {line}" for line in said} == set(done.stderr.splitlines())


WITHOUT = """
import sys
from importlib import metadata
found = metadata.entry_points
ours = ("dynamix-lab", "dynamix-homomorphic")
metadata.entry_points = lambda **kind: [e for e in found(**kind) if e.dist.name not in ours]
sys.modules["dynamix_lab"] = sys.modules["dynamix_homomorphic"] = None
"""
LAB = "dynamix-lab: pip install ./lab (in dynamix's source tree)"
HOMOMORPHIC = "dynamix-homomorphic: pip install './homomorphic[cli]' (in dynamix's source tree)"


def test_a_command_of_another_distribution_says_what_to_install_where_that_is_missing() -> None:
    where = dict.fromkeys(("bench", "demo", "emulate", "policy train"), LAB) | {"aggregator": HOMOMORPHIC}
    done = run("-c", WITHOUT + LINES, *(f"{command} --any thing" for command in where), "doctor --json")
    said = [f"error: dynamix {command} is part of {place}" for command, place in where.items()]
    assert done.stderr.splitlines() == said
    assert done.stdout.count("ended with 2") == len(where)
    assert "pip install ./lab  (in dynamix's source tree)" in done.stdout
    assert '"emulation"' not in done.stdout
