"""Libraries that chatter on every start, made quiet, so that a step's own lines are seen."""

from __future__ import annotations

import logging
import os
import warnings

CHATTY = ("torchao", "torch.utils._pytree", "bitsandbytes", "torch.distributed.elastic", "alembic", "mlflow.projects")


def libraries() -> None:
    """Sets log levels and environment switches; to be called before torch or transformers is imported."""
    os.environ.setdefault("TRANSFORMERS_NO_ADVISORY_WARNINGS", "1")
    os.environ.setdefault("HF_HUB_DISABLE_TELEMETRY", "1")
    os.environ.setdefault("TRL_EXPERIMENTAL_SILENCE", "1")
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
    for name in CHATTY:
        logging.getLogger(name).setLevel(logging.ERROR)
    warnings.filterwarnings("ignore", category=FutureWarning)
    warnings.filterwarnings("ignore", category=DeprecationWarning)
    warnings.filterwarnings("ignore", message=".*MatMul8bitLt.*")  # INT8 warns once a matrix product


def transformers() -> None:
    """Turns off transformers' own bars, which flash for every load and save of a small model."""
    from transformers.utils import logging as theirs

    theirs.disable_progress_bar()
    theirs.set_verbosity_error()
