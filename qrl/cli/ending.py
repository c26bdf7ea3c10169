"""How a command ends: every error in a sentence, its exit code, and the run that `mlflow run` opened ended with it."""

from __future__ import annotations

import errno
import io
import os
import sys

import click

from qrl import process
from qrl.errors import BadInput, QrlError
from qrl.tracking import signals


def run(commands: click.Group, arguments: list[str] | None = None) -> None:
    """Runs the command that is asked for, and ends the process with its exit code.

    Args:
        commands: the command line.
        arguments: instead of the process's own.
    """
    process.settle()
    signals.guard()
    _escape()
    try:
        if os.environ.get("MLFLOW_RUN_ID"):
            signals.import_mlflow()
        commands.main(args=arguments, prog_name="qrl", standalone_mode=False)
    except click.exceptions.Exit as ended:
        sys.exit(ended.exit_code)
    except click.exceptions.NoArgsIsHelpError as shown:  # no command at all
        click.echo(shown.format_message(), err=True)
        sys.exit(2)
    except click.ClickException as error:  # an unknown option, a missing one, a port that is no number
        _end(
            BadInput(
                f"{error.format_message().rstrip('.')}; see `{' '.join(filter(None, ('python -m qrl', _command(commands))))} --help`."
            )
        )
    except QrlError as error:
        _end(error)
    except ModuleNotFoundError as error:  # a Python without the project's environment
        if (error.name or "qrl").partition(".")[0] == "qrl":
            raise
        _end(BadInput(_not_installed(error.name, _command(commands))))
    except (
        OSError
    ) as error:  # a full or read-only disk, met before a run began: inside one, the run's own handling says so
        from qrl.tracking import store

        if error.errno == errno.ENAMETOOLONG:
            _end(
                BadInput(
                    f"'{str(error.filename)[:40]}…' is longer than a path may be: give the path of a file or folder that exists."
                )
            )
        if (told := store.sentence(error)) is None:
            raise
        _end(told)
    except (KeyboardInterrupt, click.Abort) as error:  # a signal before any step began; Abort is click's name for it
        found = (error, error.__cause__, error.__context__)
        stopped = next((each for each in found if isinstance(each, KeyboardInterrupt)), KeyboardInterrupt())
        _tell_run(stopped)
        sys.exit(signals.exit_code(stopped))


def _escape() -> None:
    """Gives a terminal or pipe whose encoding knows no − or ± an escape of it, not a traceback."""
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="backslashreplace")


def _not_installed(package: str, command: str) -> str:
    return (
        f"The package '{package}' is not installed for {sys.executable}: run the step as `mlflow run . -e {command or 'main'} "
        "--env-manager uv`, or activate the environment whose path a study prints at its end."
    )


def _end(error: QrlError) -> None:
    if not error.told:
        click.echo(f"qrl: {error}", err=True)
    _tell_run(error)
    sys.exit(error.exit_code)


def _tell_run(error: BaseException) -> None:
    """Where `mlflow run` opened a run for us, it learns the reason: MLflow itself turns every failure into exit code 1."""
    if os.environ.get("MLFLOW_RUN_ID"):
        from qrl.tracking import runs

        runs.close_opened(error)


def _command(commands: click.Group) -> str:
    return next((word for word in sys.argv[1:] if word in commands.commands), "")
