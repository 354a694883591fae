"""The command line: `dynamix ...`. It needs the extra `cli`; training does not."""

import sys

from dynamix.plugins import how_to_install


def main() -> None:
    """Entry point of the `dynamix` command; if the command line's packages are missing, it says what to install."""
    try:
        from dynamix.cli.app import app
    except ModuleNotFoundError as error:
        if (error.name or "").partition(".")[0] not in ("typer", "rich", "pydantic", "click"):
            raise
        sys.exit(f"error: the command line needs {error.name}: {how_to_install('cli')}")
    app()
