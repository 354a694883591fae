"""Policy files of every kind: written and read by one module, refused for one set of reasons."""

import dataclasses
import hashlib
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

from dynamix.errors import PolicyFileError
from dynamix.policies.files import describe_policy, load_policy, trained_as
from dynamix.policies.learned import policy as residual
from dynamix.policies.stigmergic import policy as stigmergic
from dynamix.window import Bounds, Window
from dynamix_lab.papers import additive
from tests.refused import refused

KINDS: dict[str, Any] = {"residual": residual, "additive": additive, "stigmergic": stigmergic}


@pytest.fixture(params=KINDS)
def kind(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture
def file(kind: str, tmp_path: Path) -> Path:
    """A copy of the shipped policy of this kind, as the writer writes it."""
    KINDS[kind].pretrained().save(tmp_path / "p.safetensors")
    return tmp_path / "p.safetensors"


def test_what_is_written_again_is_the_shipped_file(kind: str, file: Path) -> None:
    shipped = KINDS[kind].PRETRAINED
    assert file.read_bytes() == shipped.read_bytes()
    assert json.loads(file.with_suffix(".json").read_text()) == json.loads(shipped.with_suffix(".json").read_text())


def test_a_file_is_loaded_as_its_kind_and_decides_the_same(kind: str, file: Path) -> None:
    loaded, shipped = load_policy(file), KINDS[kind].pretrained()
    assert type(loaded) is type(shipped)
    window = Window.of([96, 32], compute=[0.2, 0.3], wait=0.0, communication=0.01, steps=5, base_batch=128)
    for _ in range(3):
        np.testing.assert_array_equal(loaded.decide(window, Bounds.of(2)), shipped.decide(window, Bounds.of(2)))


def test_a_description_says_its_kind_and_which_command_makes_one(kind: str, file: Path) -> None:
    about = describe_policy(file)
    assert about["kind"] == kind
    assert f"{trained_as(kind)}.safetensors" == KINDS[kind].PRETRAINED.name


@pytest.mark.parametrize("schema", [1, 2])
def test_files_of_another_schema_are_refused_by_name(kind: str, file: Path, schema: int) -> None:
    sidecar = file.with_suffix(".json")
    sidecar.write_text(json.dumps({**json.loads(sidecar.read_text()), "schema": schema}))
    refused(PolicyFileError, rf"schema={schema} .*; train one for this version", describe_policy, file)


def test_a_rule_of_0_2_loads_without_the_numbers_that_are_gone_and_those_of_later(tmp_path: Path) -> None:
    file = tmp_path / "p.safetensors"
    stigmergic.pretrained().save(file)
    now = stigmergic.StigmergicPolicy.load(file).parameters
    older = {name: value for name, value in dataclasses.asdict(now).items() if name not in ("wary", "ahead")}
    older = {"fade": 0.9, **older, "back": 0.5, "damp": 2.0}
    rehash(file, parameters=torch.tensor(list(older.values()), dtype=torch.float64))
    rewrite(file, parameters=older)
    before = stigmergic.StigmergicPolicy.load(file).parameters
    assert before == dataclasses.replace(now, wary=0.0, ahead=0.0)
    rewrite(file, parameters=dict(sorted(older.items())))  # numbers would get each other's names
    refused(PolicyFileError, "none", stigmergic.StigmergicPolicy.load, file)
    del older["calm"]
    rehash(file, parameters=torch.tensor(list(older.values()), dtype=torch.float64))
    rewrite(file, parameters=older)
    refused(PolicyFileError, "a number for each of calm, sure", stigmergic.StigmergicPolicy.load, file)


def rewrite(file: Path, **changed: Any) -> None:
    sidecar = file.with_suffix(".json")
    sidecar.write_text(json.dumps({**json.loads(sidecar.read_text()), **changed}))


def rehash(file: Path, **weights: torch.Tensor) -> None:
    """Other weights, with a description that vouches for them."""
    save_file({**load_file(file), **weights}, file)
    rewrite(file, sha256=hashlib.sha256(file.read_bytes()).hexdigest())


def write_raw(file: Path, kind: str, shape: list[int], content: bytes) -> None:
    """One tensor of this type and shape, which safetensors may take and torch may not."""
    header = json.dumps({"parameters": {"dtype": kind, "shape": shape, "data_offsets": [0, len(content)]}}).encode()
    file.write_bytes(len(header).to_bytes(8, "little") + header + content)
    rewrite(file, sha256=hashlib.sha256(file.read_bytes()).hexdigest())


def not_finite(file: Path) -> None:
    name, value = next(iter(load_file(file).items()))
    rehash(file, **{name: torch.full_like(value, float("nan"))})


def nested(file: Path) -> None:
    names = [*stigmergic.RANGES]
    write_raw(file, "F64", [len(names), 1], bytes(8 * len(names)))
    rewrite(file, parameters={name: [0.0] for name in names})


HARMS: dict[str, tuple[Callable[[Path], Any], str]] = {
    "flipped byte": (lambda file: file.write_bytes(file.read_bytes()[:-1] + b"\x7f"), "sha256"),
    "cut": (lambda file: file.write_bytes(file.read_bytes()[:100]), "sha256"),
    "not json": (lambda file: file.with_suffix(".json").write_text("{"), "allowed is JSON"),
    "no object": (lambda file: file.with_suffix(".json").write_text("[]"), "a JSON object"),
    "not utf-8": (lambda file: file.with_suffix(".json").write_bytes(b"\xff"), "allowed is JSON"),
    "nan in json": (lambda file: file.with_suffix(".json").write_text('{"seed": NaN}'), "allowed is JSON"),
    "another schema": (lambda file: rewrite(file, schema=99), "schema=99"),
    "no kind": (lambda file: rewrite(file, kind=None), "kind=None"),
    "unknown kind": (lambda file: rewrite(file, kind="other"), "residual, stigmergic, additive"),
    "no description": (lambda file: file.with_suffix(".json").unlink(), "existing file"),
    "no weights": (lambda file: file.unlink(), "existing file"),
    "a folder": (lambda file: (file.unlink(), file.mkdir()), "a file that can be read"),
    "not finite": (not_finite, "finite weights"),
    "65 dimensions": (lambda file: write_raw(file, "F32", [1] * 65, bytes(4)), "that torch can read"),
    "a dimension of 2^63": (lambda file: write_raw(file, "F32", [0, 2**63], b""), "that torch can read"),
    "a type without infinities": (lambda file: write_raw(file, "F8_E4M3", [4], bytes(4)), "that torch can read"),
    "a type of tomorrow": (lambda file: write_raw(file, "F4", [4], bytes(2)), "that torch can read"),
    "two numbers each": (nested, "architecture|parameters"),
}


@pytest.mark.parametrize("harm", HARMS)
def test_a_file_that_cannot_be_trusted_is_refused_and_named(file: Path, harm: str) -> None:
    damage, said = HARMS[harm]
    damage(file)
    with pytest.raises(PolicyFileError, match=said) as raised:
        load_policy(file)
    assert str(file.with_suffix("")) in str(raised.value)


NETWORK_HARMS: dict[str, tuple[dict[str, Any], str]] = {
    "another feature schema": ({"feature_schema": 99}, "feature_schema=99"),
    "other features": ({"features": ["luck"]}, "features"),
    "a huge network": ({"architecture": {"inputs": "same", "hidden": 10**9}}, "architecture.hidden=1000000000"),
    "a network of another size": ({"architecture": {"inputs": "same", "hidden": 32}}, "weights of the architecture"),
    "another input": ({"architecture": {"inputs": 3, "hidden": 64}}, "architecture.inputs=3"),
    "no architecture": ({"architecture": None}, "architecture.inputs=None"),
}


def change_network(file: Path, changed: dict[str, Any]) -> None:
    """The description, changed; as many inputs as the network has where they are to be the same."""
    shape = changed.get("architecture")
    if shape and shape["inputs"] == "same":
        inputs = json.loads(file.with_suffix(".json").read_text())["architecture"]["inputs"]
        changed = {"architecture": {**shape, "inputs": inputs}}
    rewrite(file, **changed)


@pytest.mark.parametrize("harm", NETWORK_HARMS)
@pytest.mark.parametrize("kind", ["residual", "additive"], indirect=True)
def test_a_network_that_does_not_fit_this_version_is_refused(file: Path, harm: str) -> None:
    changed, said = NETWORK_HARMS[harm]
    change_network(file, changed)
    refused(PolicyFileError, said, load_policy, file)


def test_a_class_refuses_a_file_of_another_kind(file: Path, kind: str) -> None:
    other = additive.AdditivePolicy if kind != "additive" else residual.LearnedPolicy
    refused(PolicyFileError, f"kind='{kind}'", other.load, file)


@pytest.mark.parametrize("trust", ["high", 99, 0])
def test_a_network_that_trusts_itself_beyond_what_was_trained_is_refused(tmp_path: Path, trust: Any) -> None:
    file = tmp_path / "p.safetensors"
    residual.pretrained().save(file)
    rewrite(file, trust=trust)
    refused(PolicyFileError, f"trust={trust!r}", load_policy, file)
