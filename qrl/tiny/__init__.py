"""qrl-tiny: the small model that ships with the package, so that a study needs no download; `make.py` trains it."""

from pathlib import Path

PATH = Path(__file__).parent / "model"
