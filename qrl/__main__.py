"""`python -m qrl`."""

from qrl.cli import main

main()
