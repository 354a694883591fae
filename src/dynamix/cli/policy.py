"""`dynamix policy ...`: inspects policies. The laboratory adds `policy train` and `policy evaluate` by entry point."""

from typing import Annotated

import typer

from dynamix.cli.console import ANYTHING, Json, gone, guarded, print_json

policy = typer.Typer(help="Train, score and show policies.", no_args_is_help=True)


@policy.command("show")
@guarded
def policy_show(
    name: Annotated[str, typer.Argument(help="A policy's name or file, or your own MODULE:CLASS.")] = "dynamix",
    as_json: Json = False,
) -> None:
    """Show what a policy is, how it was made and how it scored; --json prints all that is known."""
    from dynamix.cli.policy_pages import about_policy, print_about

    about = about_policy(name)
    print_json(about) if as_json else print_about(name, about)


policy.command("explain", hidden=True, context_settings=ANYTHING)(
    gone("`dynamix policy show NAME`; events have, as `residual`, what a learned policy changes of the rule's sizes")
)
