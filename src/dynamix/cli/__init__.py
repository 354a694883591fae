"""The command line: `dynamix ...`. It needs the extra `cli`; training does not."""

import sys


def main() -> None:
    """Entry point of the `dynamix` command; says what to install where the command line's packages are missing."""
    try:
        from dynamix.cli.app import app
    except ModuleNotFoundError as error:
        if (error.name or "").partition(".")[0] not in ("typer", "rich", "pydantic", "click"):
            raise
        sys.exit(f"error: the command line needs {error.name}; pip install 'dynamix-train[cli]'")
    app()
