"""qrl-tiny: the small model that ships with the package, so that a study needs no download; see make.py for its making."""

from pathlib import Path

PATH = Path(__file__).parent / "model"
