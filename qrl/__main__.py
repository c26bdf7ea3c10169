"""`python -m qrl`."""

import _signal  # built in; `signal` imports others, during which a stop signal would end in a traceback

_STOPS = (_signal.SIGINT, _signal.SIGTERM, _signal.SIGHUP)


def main() -> None:
    """Heed signals before anything else is imported, then run the command."""
    before = _signal.pthread_sigmask(_signal.SIG_BLOCK, _STOPS)
    try:
        from qrl.tracking import signals
    except ModuleNotFoundError as missing:  # of a Python without the project's packages
        import sys

        lacks = f"qrl: The package '{missing.name}' is not installed for {sys.executable}"
        how = "run `mlflow run . --env-manager uv`, or activate the environment that a study prints."
        print(f"{lacks}: {how}", file=sys.stderr)
        sys.exit(2)

    signals.guard(caught=False, ends=True)
    _signal.pthread_sigmask(_signal.SIG_SETMASK, before)  # one that has come meanwhile arrives now
    from qrl.cli import main as command

    command()


if __name__ == "__main__":
    main()
