"""Names of policies: every form a user may write, everywhere a name is taken."""

import re
import sys
from pathlib import Path

import pytest

from dynamix.errors import ConfigError
from dynamix.policies import Policy, make_policy, policy_names
from dynamix.policies.guard import Guard
from dynamix.policies.registry import parse_name
from dynamix.policies.static import Static
from dynamix.window import Bounds, Window
from tests.refused import refused

OWN = """
from dynamix.policies.static import Static

class Mine(Static):
    pass

class Needy:
    def decide(self): ...

class Wide(Static):
    def __init__(self, width, *, deep=True): ...

class Ill(Static):
    def __init__(self, width=3):
        len(width)

word = "no class"
"""


@pytest.fixture
def own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A module of a researcher's own in the working directory, which is not on Python's path."""
    (tmp_path / "own_rule.py").write_text(OWN)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [entry for entry in sys.path if entry])
    monkeypatch.delitem(sys.modules, "own_rule", raising=False)
    return tmp_path / "own_rule.py"


@pytest.mark.parametrize("name", policy_names())
def test_every_plain_name_makes_a_policy_that_is_its_own(name: str) -> None:
    assert isinstance(make_policy(name), Policy)
    assert make_policy(name) is not make_policy(name)


@pytest.mark.parametrize("name", ["dynamix", "static:256", "guarded:lb_bsp", "runs/p.safetensors", "a.b:C", "x/y.py:C"])
def test_a_name_taken_apart_and_put_together_is_the_same(name: str) -> None:
    assert str(parse_name(name)) == name


@pytest.mark.parametrize(
    "name",
    [
        *("", "nonsense", "static:", "static:0", "static:-4", "static:many", "static:1.5", "pollux:3", "pollux:Pollux"),
        *("guarded:", "guarded:nonsense", "reference:256", "dynamix.safetensor", "a:b:c", ":C", "a.py:"),
    ],
)
def test_one_message_lists_what_is_allowed(name: str) -> None:
    with pytest.raises(ConfigError) as raised:
        make_policy(name)
    message = str(raised.value)
    assert message.startswith(f"policy={name!r} is not possible")
    forms = ["static:SIZE", "guarded:NAME", "FILE.safetensors", "MODULE:CLASS", "FILE.py:CLASS"]
    assert all(form in message for form in [*policy_names(), *forms])


def test_a_caller_adds_names_that_need_its_own_facts() -> None:
    others = {"reference": Static}
    refused(ConfigError, "allowed is guarded:dynamix;", make_policy, "guarded:guarded:dynamix")
    made = make_policy("guarded:reference:64", others=others)
    assert isinstance(made, Guard)
    assert make_policy("reference:64", others=others).decide(Window.of([32, 32]), Bounds.of(2)).tolist() == [64, 64]
    assert make_policy("reference", others=others).decide(Window.of([32, 32]), Bounds.of(2)).tolist() == [32, 32]
    refused(ConfigError, "reference:NUMBER", make_policy, "reference:much", others=others)


@pytest.mark.parametrize("form", ["own_rule:{}", "own_rule.py:{}", "{folder}/own_rule.py:{}"])
def test_a_class_of_ones_own_is_a_policy_wherever_python_or_the_working_directory_has_it(own: Path, form: str) -> None:
    name = form.format("Mine", folder=own.parent)
    before = list(sys.path)
    made = make_policy(name)
    assert type(made).__name__ == "Mine"
    assert isinstance(make_policy(f"guarded:{name}"), Guard)
    assert type(make_policy(name)) is type(made)
    assert sys.path == before


@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("own_rule:Missing", "Mine"),
        ("own_rule:word", "Mine"),
        ("own_rule:Needy", "load_state_dict"),
        ("own_rule:Wide", "without arguments; missing a required argument: 'width': give arguments defaults"),
        ("own_rules:Mine", "module that can be imported"),
        ("elsewhere.py:Mine", "existing .py file"),
    ],
)
def test_what_is_wrong_with_ones_own_class_is_said(own: Path, name: str, said: str) -> None:
    with pytest.raises(ConfigError, match=said) as raised:
        make_policy(name)
    assert repr(name) in str(raised.value)


def test_an_error_in_ones_own_code_is_not_hidden(own: Path) -> None:
    own.write_text("import no_such_dependency")
    for name in ("own_rule:Mine", "own_rule.py:Mine"):
        refused(ModuleNotFoundError, "no_such_dependency", make_policy, name)


def test_an_error_in_ones_own_constructor_is_not_hidden(own: Path) -> None:
    refused(TypeError, "object of type 'int' has no len", make_policy, "own_rule:Ill")


def test_a_name_can_be_given_to_a_process_in_another_directory(own: Path) -> None:
    assert str(parse_name("guarded:own_rule.py:Mine").absolute()) == f"guarded:{own}:Mine"
    assert str(parse_name("p.safetensors").absolute()) == str(own.parent / "p.safetensors")
    assert str(parse_name("static:64").absolute()) == "static:64"


@pytest.mark.parametrize(
    ("written", "meant"),
    [
        ("lbbsp", "lb_bsp"),
        ("LB-BSP", "lb_bsp"),
        ("gooput", "goodput"),
        ("guarded:lbbsp", "guarded:lb_bsp"),
        ("guardd:dynamix", "guarded:dynamix"),
        ("statik:64", "static:64"),
        ("dynamix.safetensors", "dynamix"),
        ("mine.safetensor", "mine.safetensors"),
    ],
)
def test_a_misspelt_name_is_answered_by_the_nearest(written: str, meant: str) -> None:
    with pytest.raises(ConfigError, match=re.escape(f"did you mean {meant!r}?")):
        make_policy(written)


def test_a_misspelt_file_is_answered_by_the_one_beside_it(tmp_path: Path) -> None:
    for name in ("halfway.safetensors", "rules.py"):
        (tmp_path / name).touch()
    for written, meant in (("halfwey.safetensors", "halfway.safetensors"), ("rule.py", "rules.py")):
        with pytest.raises(ConfigError, match=re.escape(f"did you mean {str(tmp_path / meant)!r}?")):
            make_policy(f"{tmp_path / written}{':Rule' if written.endswith('.py') else ''}")


@pytest.mark.parametrize("name", ["lb_bsp:4", "static:0"])
def test_a_number_that_does_not_belong_there_is_no_misspelling(name: str) -> None:
    with pytest.raises(ConfigError, match=r"only static takes a number, 1 or more"):
        make_policy(name)


def test_what_is_like_no_name_is_left_alone() -> None:
    with pytest.raises(ConfigError, match=r"; check the spelling$"):
        make_policy("something_else")
