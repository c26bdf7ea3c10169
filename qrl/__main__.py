"""`python -m qrl`: stop signals are handled before anything else is imported, then the command runs."""

import _signal  # built in; `signal` imports others, during which a stop signal would end in a traceback
import os  # imported by Python itself, as `sys` is
import sys

_STOP_SIGNALS = (_signal.SIGINT, _signal.SIGTERM, _signal.SIGHUP)


def main() -> None:
    """Handle stop signals before anything else is imported, then run the command."""
    mask = _signal.pthread_sigmask(_signal.SIG_BLOCK, _STOP_SIGNALS)
    try:
        from qrl.tracking import signals, warm
    except ModuleNotFoundError as missing:  # of a Python without the project's packages
        print(
            f"qrl: The package '{missing.name}' is not installed for {sys.executable}: "
            "run `mlflow run . --env-manager uv`, or activate the environment that a study prints.",
            file=sys.stderr,
        )
        sys.exit(2)

    if sys.argv[1:2] == [warm.COMMAND]:
        from qrl import process

        warm.serve(process.prepare_imports)  # returns in a fork, which goes on as the command that it is to run
    variables = dict(os.environ)
    signals.guard(caught=False, ends=True)
    _signal.pthread_sigmask(_signal.SIG_SETMASK, mask)  # a signal that has come meanwhile arrives now
    warm.hand_over(variables)
    from qrl.cli import main as command

    command()


if __name__ == "__main__":
    main()
