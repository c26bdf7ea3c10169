"""Steps as jobs of a Slurm cluster: an MLflow project backend that submits an entry point."""

from qrl.cluster.config import chosen, load
