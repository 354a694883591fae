"""What the documents say exists: code compiles, whole scripts run, commands parse, links and names resolve."""

from __future__ import annotations

import ast
import importlib
import inspect
import json
import os
import re
import shlex
import sys
from pathlib import Path
from typing import Any

import pytest

import dynamix
from dynamix import plugins
from tests.processes import run
from tests.ranks import run_script

ROOT = Path(__file__).parent.parent
PAGES = [
    *sorted(ROOT.glob("*.md")),
    *sorted(ROOT.glob("docs/**/*.md")),
    *(ROOT / project / "README.md" for project in ("homomorphic", "lab")),
]
GROUPS = {plugins.COMMANDS, plugins.POLICIES, plugins.POLICY_FILES, plugins.PROBES, plugins.DOCTOR}  # of entry points
BLOCK = re.compile(r"^```([\w{}-]*)\n(.*?)^```", re.MULTILINE | re.DOTALL)
INLINE = re.compile(r"`([^`\n]+)`")
LINK = re.compile(r"\[[^\]]*\]\(([^)\s]+)\)")
NAME = re.compile(r"(?<![\w./-])dynamix(?:_lab)?(?:\.(?!md\b)[A-Za-z_]\w*)+")

on_every_page = pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))


def now(page: Path) -> str:
    """The page's text, less what names what an older version had: cells, and sections of older versions."""
    if page.name == "removed.md":
        return ""
    text = page.read_text()
    lines = text.split("\n## ")[1].split("\n") if page.name == "CHANGELOG.md" else text.split("\n")
    if page.name == "upgrade.md":
        lines = [line.split("|")[2] if line.startswith("|") else line for line in lines]
    return "\n".join(lines)


def blocks(page: Path, language: str) -> list[str]:
    return [text for found, text in BLOCK.findall(page.read_text()) if found == language]


def code(page: Path) -> list[str]:
    """Inline code and the lines of blocks that are no Python."""
    lines = [line for language, text in BLOCK.findall(now(page)) if not language for line in text.split("\n")]
    return lines + [" ".join(text.split()) for text in INLINE.findall(BLOCK.sub("", now(page)).replace("\n", " "))]


def known(page: Path) -> dict[str, Any]:
    """What the page's code may call: what its blocks import from dynamix, and a controller with its methods."""
    names: dict[str, Any] = {"dynamix": dynamix, "controller": dynamix.Controller}
    names |= {name: getattr(dynamix, name) for name in dynamix.__all__}
    names |= dict(inspect.getmembers(dynamix.Controller, inspect.isfunction))
    for block in blocks(page, "python"):
        for node in ast.walk(ast.parse(block)):
            if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("dynamix"):
                names |= {alias.name: resolve(f"{node.module}.{alias.name}") for alias in node.names}
    return names


def called(node: ast.expr, names: dict[str, Any]) -> Any:
    """The function or class that is called; None where the page does not say what it is."""
    if isinstance(node, ast.Name):
        return names.get(node.id)
    owner = called(node.value, names) if isinstance(node, ast.Attribute) else None
    return getattr(owner, node.attr, None) if isinstance(node, ast.Attribute) else None


def check_calls(tree: ast.AST, names: dict[str, Any]) -> None:
    for node in ast.walk(tree):
        if not isinstance(node, ast.Call) or (what := called(node.func, names)) is None:
            continue
        bound = inspect.signature(what)
        own = [None] if next(iter(bound.parameters), "") == "self" else []
        given = [a for a in node.args if not (isinstance(a, ast.Constant) and a.value is ...)]
        bound.bind_partial(*own, *given, **{k.arg: None for k in node.keywords if k.arg})


@on_every_page
def test_calls_name_arguments_that_exist(page: Path) -> None:
    names = known(page)
    for block in blocks(page, "python"):
        check_calls(ast.parse(block), names)
    for text in INLINE.findall(BLOCK.sub("", now(page)).replace("\n", " ")):
        try:
            tree = ast.parse(text)
        except SyntaxError:
            continue
        check_calls(tree, names)


def script_of(page: str) -> str:
    (script,) = (block for block in blocks(ROOT / "docs" / page, "python") if "__main__" in block)
    return script


def test_every_python_block_runs() -> None:
    """But whole scripts, which have tests of their own below, and those that need Ray or torchft's server."""
    said = run_script(ROOT / "tests" / "doc_blocks.py", [*map(str, PAGES)], timeout_s=280)
    found = json.loads(said.strip().split("\n")[-1])
    assert not found["failed"], json.dumps(found["failed"], indent=1)
    assert found["ran"] > 30


@pytest.mark.multiproc
def test_the_script_of_the_first_steps_keeps_the_global_batch(tmp_path: Path) -> None:
    script = tmp_path / "train.py"
    script.write_text(script_of("quickstart.md"))
    sizes = re.findall(r"epoch \d: .* batch sizes \[(\d+), (\d+)\]", run_script(script, ranks=2, folder=tmp_path))
    assert [int(a) + int(b) for a, b in sizes] == [64] * 3


@pytest.mark.multiproc
def test_the_script_that_saves_resumes_in_mid_epoch_with_another_number_of_workers(tmp_path: Path) -> None:
    script = tmp_path / "train.py"
    script.write_text(script_of("saving.md"))
    begun = run_script(script, ["--epochs", "1"], ranks=2, folder=tmp_path)
    assert "begins after 0 samples, in epoch 0" in begun
    resumed = run_script(script, ["--epochs", "2"], ranks=3, folder=tmp_path)
    assert "begins after 3200 samples, in epoch 0" in resumed
    # the second job used the rest of epoch 0 and all but the last, unsaved, samples of epoch 1
    saved = int((tmp_path / "checkpoints" / "latest").read_text().removeprefix("samples-"))
    assert 4096 < saved <= 2 * 4096


def changed(script: str, diff: str) -> str:
    """The script with the lines of the diff: each new one stands after the line that the diff has before it."""
    lines, at = script.split("\n"), 0
    for line in diff.rstrip("\n").split("\n"):
        mark, text = line[0], line[1:]
        if mark == "+":
            lines.insert(at, text)
        else:
            at = lines.index(text, at)
        if mark == "-":
            del lines[at]
        else:
            at += 1
    return "\n".join(lines)


@pytest.fixture
def tutorial(tmp_path: Path) -> Path:
    """A folder with the tutorial's two scripts."""
    plain = script_of("tutorial.md")
    (diff,) = blocks(ROOT / "docs" / "tutorial.md", "diff")
    (tmp_path / "train.py").write_text(plain)
    (tmp_path / "balanced.py").write_text(changed(plain, diff))
    return tmp_path


def commands_of_the_tutorial() -> list[list[str]]:
    return [shlex.split(line) for line in code(ROOT / "docs" / "tutorial.md") if line.startswith("dynamix emulate dev")]


@pytest.mark.slow
@pytest.mark.emulator
def test_the_tutorial_ends_with_a_comparison(tutorial: Path) -> None:
    """Its commands, with fewer epochs, rows and, where two rows are trained, devices: each imports torch for seconds.

    How large the gain is depends on the machine, so it is not asked.
    """
    first, observe, compare = commands_of_the_tutorial()
    assert first[-4:] == ["python", "train.py", "--epochs", "3"]  # what `observe` runs, too
    compare[compare.index("static,lb_bsp,goodput")] = "static,lb_bsp"
    compare[compare.index("device-demo")] = "two.yaml"
    demo = (ROOT / "lab/src/dynamix_lab/emulator/scenarios/device-demo.yaml").read_text()
    (tutorial / "two.yaml").write_text(re.sub(r"(  - cpu: .*\n){2}(?=disturb)", "", demo))
    environment = {"PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}", "OMP_NUM_THREADS": "1"}
    said = []
    for command in (observe, compare):
        words = [word for word in command[1:] if word not in ("--epochs", "3")]
        words += ["--epochs", "1"]
        done = run("-m", "dynamix.cli.app", *words, timeout_s=200, cwd=tutorial, env=environment)
        said.append(done.stdout + done.stderr)
    assert "epoch 0: loss" in said[0]
    assert "holds the job back" in said[0]
    assert (tutorial / "observed" / "report.txt").exists()
    assert all(row in said[1] for row in ("static", "lb_bsp", "waiting"))
    assert (tutorial / "compared" / "report.html").exists()


def test_the_diff_of_the_readme_is_that_of_the_guide() -> None:
    (shown,) = blocks(ROOT / "README.md", "diff")
    assert shown in blocks(ROOT / "docs" / "frameworks.md", "diff")


def test_every_recorded_result_is_linked_from_the_page_of_results() -> None:
    linked = set(re.findall(r"\.\./results/([\w-]+)/", (ROOT / "docs" / "results.md").read_text()))
    assert linked == {file.parent.name for file in (ROOT / "results").glob("*/result.json")}


def test_the_tutorial_changes_as_many_lines_as_it_says() -> None:
    (diff,) = blocks(ROOT / "docs" / "tutorial.md", "diff")
    assert sum(line.startswith("+") for line in diff.split("\n")) == 7


def parse(command: Any, words: list[str]) -> None:
    """Raises AssertionError for a command or an option that does not exist."""
    while words and getattr(command, "commands", None):
        _, found, words = command.resolve_command(command.context_class(command, resilient_parsing=True), words)
        assert found is not None, f"no such command in {sorted(command.commands)}"
        command = found
    allowed = {"--help"}.union(*({*p.opts, *p.secondary_opts} for p in command.params))
    for word in words[: words.index("--")] if "--" in words else words:
        assert not word.startswith("-") or word.split("=")[0].rstrip(",;:") in allowed, f"no option {word}"


@on_every_page
def test_commands_and_their_options_exist(page: Path) -> None:
    typer = pytest.importorskip("typer")
    from dynamix.cli.app import app

    root = typer.main.get_command(app)
    for line in code(page):
        if line.startswith("dynamix "):
            words = shlex.split(line, comments=True)[1:]
            try:
                parse(root, words)
            except AssertionError as error:
                raise AssertionError(f"{line}: {error}") from None


def slug(heading: str) -> str:
    return re.sub(r"[^\w\- ]", "", heading.lower()).strip().replace(" ", "-")


def test_the_citation_is_of_this_version() -> None:
    version = dynamix.__version__.partition(".dev")[0]
    assert f"\nversion: {version}\n" in (ROOT / "CITATION.cff").read_text()


@on_every_page
def test_links_lead_somewhere(page: Path) -> None:
    for target in LINK.findall(page.read_text()):
        if target.startswith(("http:", "https:", "mailto:")):
            continue
        path, _, anchor = target.partition("#")
        file = (page.parent / path).resolve() if path else page
        assert file.exists(), target
        if anchor:
            assert anchor in {slug(h) for h in re.findall(r"^#+ (.*)$", file.read_text(), re.MULTILINE)}, target


def resolve(dotted: str) -> Any:
    parts = dotted.split(".")
    found = importlib.import_module(parts[0])
    for i, part in enumerate(parts[1:], 2):
        try:
            found = getattr(found, part)
        except AttributeError:
            found = importlib.import_module(".".join(parts[:i]))
    return found


@on_every_page
def test_dotted_names_resolve(page: Path) -> None:
    for dotted in sorted(set(NAME.findall(now(page))) - GROUPS):
        try:
            resolve(dotted)
        except (ImportError, AttributeError) as error:
            raise AssertionError(f"{dotted}: {error}") from None


def paths(text: str) -> list[str]:
    return re.findall(r"(?:^|\s)((?:examples|scripts|src|lab|docs|tests)/[\w./-]+)", text)


@on_every_page
def test_files_that_are_named_exist(page: Path) -> None:
    for text in code(page):
        for path in paths(text):
            assert (ROOT / path).exists(), path


def test_tests_that_scripts_name_exist() -> None:
    named = {path for script in ROOT.glob("scripts/*") if script.is_file() for path in paths(script.read_text())}
    assert named, "no script names a test"
    assert not [p for p in named if p.startswith("tests/") and p.islower() and not (ROOT / p).exists()]


def test_every_policy_has_a_page_and_every_experiment_a_row() -> None:
    pages = {page.stem for page in ROOT.glob("docs/policies/*.md")}
    assert set(dynamix.policies.policy_names()) <= pages
    described = (ROOT / "docs/design/experiments.md").read_text()
    missing = [e.stem for e in ROOT.glob("lab/src/dynamix_lab/experiments/*.toml") if f"`{e.stem}`" not in described]
    assert not missing


@on_every_page
def test_no_line_begins_with_a_percent_sign_which_markdown_drops_as_a_comment(page: Path) -> None:
    assert not [line for line in page.read_text().split("\n") if line.strip().startswith("%")]
