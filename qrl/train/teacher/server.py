"""A teacher behind vLLM's server, which returns the likeliest tokens of given texts.

Its `prompt_logprobs` differ from logits by a constant, which cancels where the loss normalizes over the likeliest
tokens again. They are of temperature 1, so the temperature divides them here. TRL's client needs vLLM in training's
environment, and TRL's loss for a server uses one token where KL is reversed; both are replaced.
"""

import json
import math
import random
import sys
import urllib.error
import urllib.request
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

import torch
from torch import Tensor, nn

from qrl import checkpoint
from qrl.engine import hf, pretrained
from qrl.errors import BadInput, QrlError
from qrl.recipe import Train
from qrl.tasks import prompt
from qrl.train.job import Job
from qrl.train.rollout.server import UNUSABLE, absent, reason
from qrl.train.teacher import Likeliest

MAX_KL = 0.01  # nats per token, from the server's likeliest tokens to those of the checkpoint, read here
PROBED = 64  # random tokens, on which two models differ more than on a question: 0.6 nats instead of 0.004 in one trial
_CONCURRENT_REQUESTS = 32
_MODELS_TIMEOUT_S = 10
_SCORES_TIMEOUT_S = 600
_START = "start one as qrl/train/teacher/README.md describes, or set train.teacher_placement = process"


class Server:
    """A teacher that scores over HTTP."""

    def __init__(self, settings: Train, vocabulary: int) -> None:
        """Ask the server for the name of its model; raise BadInput if none answers."""
        self.address = settings.teacher_server.rstrip("/")
        self.vocabulary = vocabulary
        self.top_k = min(settings.distill_top_k, vocabulary)
        self.temperature = settings.temperature
        try:
            with urllib.request.urlopen(f"{self.address}/v1/models", timeout=_MODELS_TIMEOUT_S) as answer:
                (model, *_) = json.load(answer)["data"]
                self.model = model["id"]
                self.longest = int(model.get("max_model_len") or sys.maxsize)  # tokens of a text
        except UNUSABLE as error:
            raise absent(error, "teacher's server", f"train.teacher_server = {self.address}", _START) from None

    def __call__(self, score: Callable[[nn.Module], Tensor], ids: Tensor, mask: Tensor, valid: Tensor) -> Likeliest:
        texts = [row[row_mask].tolist() for row, row_mask in zip(ids, mask.bool(), strict=True)]
        try:
            with ThreadPoolExecutor(_CONCURRENT_REQUESTS) as pool:
                rows = list(pool.map(self.likeliest, texts, valid.sum(1).tolist()))
        except Refused as error:
            raise QrlError(
                f"The teacher's server at {self.address} gave no scores ({error}): start it again as before, and run "
                "the same command, which resumes."
            ) from None
        scores = torch.cat([row.scores for row in rows]).to(ids.device)
        tokens = torch.cat([row.tokens for row in rows]).to(ids.device)
        return Likeliest(scores / self.temperature, tokens)

    def likeliest(self, text: list[int], count: int) -> Likeliest:
        """Return the likeliest tokens at the last `count` positions of a text, (count, K), at temperature 1.

        Raises:
            Refused: the server refuses the text, does not answer, or answers with other tokens than asked for.
        """
        if not count:
            return Likeliest(torch.empty(0, self.top_k), torch.empty(0, self.top_k, dtype=torch.int64))
        body = {"model": self.model, "prompt": text, "max_tokens": 1, "prompt_logprobs": self.top_k}
        request = urllib.request.Request(
            f"{self.address}/v1/completions", json.dumps(body).encode(), {"Content-Type": "application/json"}
        )
        try:
            with urllib.request.urlopen(request, timeout=_SCORES_TIMEOUT_S) as answer:
                positions = (json.load(answer)["choices"][0].get("prompt_logprobs") or ())[-count:]
            if len(positions) < count:
                raise Refused("it returns no prompt_logprobs, so it is no vLLM server")
            ranked = [_ranked(position, self.top_k) for position in positions]
        except urllib.error.HTTPError as error:
            raise Refused(_sentence(error.read())) from None
        except UNUSABLE as error:
            raise Refused(f"{type(error).__name__}: {reason(error)}") from None
        scores = [row_scores for row_scores, _ in ranked]
        tokens = [row_tokens for _, row_tokens in ranked]
        for token in (max(map(max, tokens)), min(map(min, tokens))):
            if not 0 <= token < self.vocabulary:
                raise Refused(f"it knows a token {token}, but the teacher's checkpoint {self.vocabulary} tokens")
        return Likeliest(torch.tensor(scores), torch.tensor(tokens))


class Refused(Exception):
    """The server's reason for giving no scores."""


def _sentence(body: bytes) -> str:
    """Return the reason in OpenAI's form of an error, else the body's start."""
    try:
        message = json.loads(body)["error"]["message"]
    except (ValueError, LookupError, TypeError):
        message = body.decode(errors="replace")
    return " ".join(str(message).split())[:300]


def _ranked(position: dict[str, dict], count: int) -> tuple[list[float], list[int]]:
    """Return a position's likeliest tokens: log-probabilities and ids."""
    entries = ((entry["rank"], float(entry["logprob"]), int(token)) for token, entry in position.items())
    ranked = sorted(entries)[:count]  # vLLM adds the text's own token, which may have a lower rank
    if len(ranked) < count:
        raise ValueError(f"{len(ranked)} tokens at a position, but {count} were asked for")
    if not all(math.isfinite(logprob) for _, logprob, _ in ranked):
        raise ValueError("a log-probability is no number")
    return [logprob for _, logprob, _ in ranked], [token for *_, token in ranked]


def connect(teacher: checkpoint.Checkpoint, settings: Train) -> Server:
    """Return the server of `train.teacher_server`; raise BadInput if none answers."""
    return Server(settings, checkpoint.config(teacher.path)["vocab_size"])


def check(teacher: checkpoint.Checkpoint, job: Job) -> None:
    """Check that the server scores what this training will send; `compare` checks that it has this teacher.

    Raises:
        BadInput: no server answers, its texts are too short, its vocabulary is another one, or it returns too few
            tokens.
    """
    server = connect(teacher, job.settings)
    longest = job.longest()
    if longest >= server.longest:
        raise BadInput(
            f"The teacher's server at {server.address} takes {server.longest} tokens, but training sends {longest}, "
            f"and it samples one more: start it with --max-model-len {longest + 1}."
        )
    prompt_ids = prompt.render(hf.tokenizer(teacher.path), job.questions[0].question, job.template)
    try:
        # With the last token of the vocabulary, which a server with a smaller one refuses.
        server.likeliest([*prompt_ids, server.vocabulary - 1], len(prompt_ids))
    except Refused as error:
        raise BadInput(
            f"The teacher's server at {server.address} cannot score with train.distill_top_k = {server.top_k} tokens "
            f"of {server.vocabulary} ({error}): start it with {teacher.path} and --max-logprobs {server.top_k}."
        ) from None


def check_same_model(teacher: checkpoint.Checkpoint, server: Server, kl: Callable[[Tensor, Likeliest], Tensor]) -> None:
    """Check that the server has the teacher, by its logits; its weights are read into main memory once.

    Args:
        kl: from the server's likeliest tokens to logits (N, V), nats per token.

    Raises:
        BadInput: the mean over a text is above `MAX_KL`, or the server does not score it.
    """
    generator = random.Random(0)
    tokenizer_size = len(hf.tokenizer(teacher.path))
    ids = [generator.randrange(tokenizer_size) for _ in range(PROBED)]
    with torch.no_grad():
        model = pretrained.load(teacher.path, dtype=getattr(torch, teacher.dtype)).eval()
        logits = model(torch.tensor([ids])).logits[0, :-1].float()
    try:
        mean_kl = float(kl(logits, server.likeliest(ids, PROBED - 1)).mean())
    except Refused as error:
        raise BadInput(f"The teacher's server at {server.address} scores no text ({error}): {_START}.") from None
    if not mean_kl <= MAX_KL:  # NaN is no answer, either
        raise BadInput(
            f"The teacher's server at {server.address} is {mean_kl:.3g} nats per token from {teacher.path}, but "
            f"{MAX_KL} is the limit: start it with this checkpoint, unquantized."
        )
