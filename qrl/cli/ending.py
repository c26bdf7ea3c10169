"""How a command ends: every error in a sentence, its exit code, and the end of the run that `mlflow run` opened."""

import errno
import io
import os
import sys

import click

from qrl import process
from qrl.cli.commands import cli
from qrl.errors import PANIC, BadInput, QrlError, StopReported, first_line
from qrl.files import reading
from qrl.tracking import signals


def main(arguments: list[str] | None = None) -> None:
    """Run a command and end the process with its exit code; expected errors are printed as one sentence."""
    process.prepare_process()
    for stream in (sys.stdout, sys.stderr):  # an encoding without − or ± gets an escape, not a traceback
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="backslashreplace")
    words = sys.argv[1:] if arguments is None else arguments
    command = next((word for word in words if word in cli.commands), "")
    try:
        _check(words)
        signals.guard(ends=True)
        cli.main(args=arguments, prog_name="qrl", standalone_mode=False)
        return
    except click.exceptions.Exit as end:  # after `--help` or `--version`
        sys.exit(end.exit_code)
    except click.exceptions.NoArgsIsHelpError as usage:  # no command at all
        click.echo(usage.format_message(), err=True)
        sys.exit(2)
    except (KeyboardInterrupt, click.Abort) as error:
        ending = _stop_signal(error)
        if not isinstance(ending, StopReported):
            click.echo(f"{str(ending) or 'Stopped by Ctrl-C.'} Run the same command again to resume.", err=True)
        exit_code = signals.exit_code(ending)
    except BaseException as error:
        ending = _explained(error, command)
        if ending is None:
            raise
        if not ending.is_printed:
            click.echo(f"qrl: {ending}", err=True)
        exit_code = ending.exit_code
    finally:
        signals.guard(caught=False)
    if os.environ.get("MLFLOW_RUN_ID"):  # end that run with the reason: MLflow turns every failure into exit code 1
        from qrl.tracking import runs

        runs.close_opened(ending)
    sys.exit(exit_code)


def _check(words: list[str]) -> None:
    """Raise BadInput if an argument has control characters, or if the current folder is gone."""
    for word in words:
        reading.check_control_characters("An argument", word)
    try:
        os.getcwd()
    except FileNotFoundError:  # torch's libraries would end the process while they are loaded
        raise BadInput("The current folder was deleted: go to one that exists.") from None


def _stop_signal(error: BaseException) -> KeyboardInterrupt:
    """Return the stop signal behind an error: click raises its own Abort in its place."""
    for cause in (error, error.__cause__, error.__context__):
        if isinstance(cause, KeyboardInterrupt):
            return cause
    return KeyboardInterrupt()


def _explained(error: BaseException, command: str) -> QrlError | None:
    """Return an error as one that carries a sentence; None for a defect of ours, which keeps its traceback."""
    if isinstance(error, QrlError):
        return error
    if not isinstance(error, Exception):
        return _explained_panic(error)
    if isinstance(error, click.ClickException):  # an unknown option, a missing one, a port that is not a number
        return _explained_usage(error, command)
    if isinstance(error, ModuleNotFoundError) and (error.name or "qrl").partition(".")[0] != "qrl":
        return BadInput(
            f"The package '{error.name}' is not installed for {sys.executable}: run "
            f"{process.environment_command(command or 'main')}, or activate the environment that a study prints."
        )
    if isinstance(error, OSError) and error.errno == errno.ENAMETOOLONG:
        path = str(error.filename)[:40]
        return BadInput(f"'{path}…' is longer than a path may be: give the path of a file or folder that exists.")

    # A full disk, or a server's refusal before a run began; inside one, the run explains it. Without MLflow in this
    # process, no other error can come from the store, and importing it would take a second.
    explained = None
    if isinstance(error, OSError) or "mlflow" in sys.modules:
        from qrl.tracking import store_errors

        explained = store_errors.explain(error)
    return explained


def _explained_panic(error: BaseException) -> QrlError | None:
    if type(error).__name__ != PANIC:
        return None
    return BadInput(f"A library failed on a file ({first_line(error)[:200]}): copy the checkpoint again.")


def _explained_usage(error: click.ClickException, command: str) -> QrlError:
    context = getattr(error, "ctx", None)
    name = context.info_name if context and context.parent else command
    usage = f"python -m qrl {name} --help" if name else "python -m qrl --help"
    return BadInput(f"{error.format_message().rstrip('.')}; see `{usage}`.")
