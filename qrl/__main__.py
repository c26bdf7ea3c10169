"""`python -m qrl`."""

from qrl.tracking import signals


def main() -> None:
    """Heed signals before anything else is imported, then run the command."""
    signals.guard(caught=False, ends=True)
    from qrl.cli import main as command

    command()


if __name__ == "__main__":
    main()
