"""Steps as jobs of a cluster: an MLflow project backend with drivers for Slurm and SkyPilot."""

from qrl.cluster.config import chosen, load
