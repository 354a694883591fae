"""Commands of an earlier version say what to write now."""

import pytest
from typer.testing import CliRunner

from dynamix.cli.app import app


@pytest.mark.parametrize(
    ("arguments", "now"),
    [
        (["exporter"], "python examples/exporter.py"),
        (["exporter", "runs/mine", "--port", "9642"], "python examples/exporter.py"),
        (["policy", "explain", "dynamix", "--out", "page.html"], "`dynamix policy show NAME`"),
    ],
)
def test_a_command_that_is_gone_says_what_to_write(arguments, now):
    done = CliRunner().invoke(app, arguments)
    assert done.exit_code == 2
    assert f"error: removed in 0.3: write {now}" in done.stderr
