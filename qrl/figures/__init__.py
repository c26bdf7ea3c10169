"""Every plot. A title states the finding, colours are Okabe and Ito's (safe for the colour-blind), n is given.

matplotlib is loaded on first use, without pyplot, and so without a display or global state. PNGs appear whole or
not at all.
"""

from qrl.figures.benchmark import capacities, speeds
from qrl.figures.cards import Gate
from qrl.figures.comparison import lengths, matrix, methods, survival
from qrl.figures.divergence import behaviour
from qrl.figures.heatmaps import movement, schemes
from qrl.figures.plan import chances
from qrl.figures.rewards import training
from qrl.figures.sizes import sizes
from qrl.figures.study import Study, report, weights_page
from qrl.figures.weights import layer_error, spread
