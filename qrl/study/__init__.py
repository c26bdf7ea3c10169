"""The study: the order of its steps, the environments they run in, the sweep over methods, and the final report."""

import sys

from qrl import Room
from qrl.study.face import Study, study

__all__ = ["Study", "study"]

sys.modules[__name__].__class__ = Room
