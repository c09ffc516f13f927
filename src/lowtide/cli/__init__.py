"""The command line: one file per verb, loaded only when its verb is used.

Nothing here imports torch at the top, so `--help` and bad arguments answer at once. A problem the user can fix is one
line on stderr, "lowtide: ...", and exit code 2.
"""

from __future__ import annotations

import importlib
import importlib.metadata
import os
import sys
from collections.abc import Sequence
from pathlib import Path

import click

from lowtide.core.spelling import did_you_mean, is_close
from lowtide.errors import LowtideError

VERBS = (
    "run",
    "demo",
    "doctor",
    "probe",
    "capture",
    "estimate",
    "plan",
    "simulate",
    "compare",
    "report",
    "policies",
    "codecs",
)

EXIT_BAD_ARGUMENT = 2
EXIT_INTERRUPTED = 130


class _Verbs(click.Group):
    """A group whose commands are the modules of this package, imported on demand."""

    def list_commands(self, ctx: click.Context) -> list[str]:  # noqa: ARG002 - click's signature
        return list(VERBS)

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:  # noqa: ARG002 - click's signature
        if cmd_name not in VERBS:
            return None
        command = importlib.import_module(f"lowtide.cli.{cmd_name}").command
        assert isinstance(command, click.Command)
        return command

    def resolve_command(
        self, ctx: click.Context, args: list[str]
    ) -> tuple[str | None, click.Command | None, list[str]]:
        """Find a verb; answer one that does not exist with what was probably meant."""
        name = args[0] if args else ""
        if name and not name.startswith("-") and name not in VERBS:
            meant = did_you_mean(name.lower(), VERBS)
            if not meant and (name.endswith(".py") or Path(name).is_file()):
                meant = f": to run a script, write 'lowtide run --budget 2GiB {name}'"
            raise click.UsageError(f"no such command {name!r}{meant}", ctx)
        return super().resolve_command(ctx, args)

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        """List the verbs with their whole summaries, which click would cut off at the end of the line."""
        rows = [(name, self.get_command(ctx, name)) for name in self.list_commands(ctx)]
        with formatter.section("Commands"):
            formatter.write_dl([(name, _summary(command)) for name, command in rows if command is not None])


@click.command(cls=_Verbs, invoke_without_command=True, context_settings={"help_option_names": ["-h", "--help"]})
@click.option(
    "--version",
    is_flag=True,
    is_eager=True,
    expose_value=False,
    callback=lambda *seen: _print_version(*seen),
    help="Show the version and exit.",
)
@click.pass_context
def group(ctx: click.Context) -> int:
    """Train unchanged PyTorch inside a memory budget stated in bytes.

    \b
    Examples:
      lowtide demo        see it work, in about a minute
      lowtide doctor      what this machine offers, and what to fix
      lowtide run --budget 2GiB train.py --epochs 3
    """
    if ctx.invoked_subcommand is None:
        click.echo(ctx.get_help())
    return 0


def _print_version(ctx: click.Context, _parameter: click.Parameter, wanted: bool) -> None:
    if wanted and not ctx.resilient_parsing:
        click.echo(f"lowtide {installed_version()}")
        ctx.exit()


def installed_version() -> str:
    """Return the installed package's version."""
    try:
        return importlib.metadata.version("lowtide")
    except importlib.metadata.PackageNotFoundError:
        return "unknown (run from a source tree that is not installed)"


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line on `argv` (default: the process's arguments) and return its exit code."""
    from lowtide.cli.output import warnings_as_lines

    try:
        with warnings_as_lines():
            result = group.main(args=None if argv is None else list(argv), prog_name="lowtide", standalone_mode=False)
    except click.UsageError as error:
        where = error.ctx.command_path if error.ctx is not None else "lowtide"
        message = _complaint(error)
        return _fail(f"{message[:1].lower()}{message[1:]} (see '{where} --help')")
    except click.ClickException as error:
        return _fail(error.format_message())
    except LowtideError as error:
        return _fail(str(error))
    except (click.Abort, KeyboardInterrupt):
        print("lowtide: interrupted", file=sys.stderr)
        return EXIT_INTERRUPTED
    except BrokenPipeError:
        # The reader went away, as in `lowtide plan trace | head`. Python would complain again while flushing at exit.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 1
    return result if isinstance(result, int) else 0


def _complaint(error: click.UsageError) -> str:
    if isinstance(error, click.NoSuchOption):  # click has words and a list of its own for what comes close
        options = [name for each in error.ctx.command.params for name in each.opts] if error.ctx is not None else []
        bare = error.option_name.lstrip("-")
        close = [name for name in options if is_close(bare, name.lstrip("-"))]
        return f"no such option {error.option_name!r}{did_you_mean(error.option_name, close)}"
    return error.format_message().rstrip(".") + _example_with(error)


def _example_with(error: click.UsageError) -> str:
    """Return the example of a command's help that shows the option or argument that is missing."""
    if not isinstance(error, click.MissingParameter) or error.ctx is None or error.param is None:
        return ""
    lines = [line.strip() for line in (error.ctx.command.help or "").splitlines()]
    examples = [line for line in lines if line.startswith(f"{error.ctx.command_path} ")]
    if isinstance(error.param, click.Option):
        examples = [line for line in examples if not set(line.split()).isdisjoint(error.param.opts)]
    return f": write for example '{examples[0]}'" if examples else ""


def _summary(command: click.Command) -> str:
    paragraph = (command.short_help or command.help or "").partition("\n\n")[0]
    return " ".join(paragraph.split()).removesuffix(".")


def _fail(message: str) -> int:
    print(f"lowtide: {' '.join(message.split())}", file=sys.stderr)
    return EXIT_BAD_ARGUMENT
