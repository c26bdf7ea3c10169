"""Does a moving stage lose requests? A load through `serve --follow` during promotions, a rollback and rejected
versions.

    python tests/benchmarks/follow.py --out follow.json                  # in vLLM's environment; the built-in model
    python tests/benchmarks/follow.py --clients 16 --pause 0 --tokens 256 --benchmark 1,16 --out follow.json  # on a GPU

Clients of the `openai` package send requests for the stage's id throughout; every other one streams, none retries.
Versions differ in one weight. An answer counts if it is whole and names the version that wrote it. Three versions must
not take over. The proxy must also pass the list of models, health and metrics, and reject a wrong key. With
--benchmark, `benchmark --url` measures that server at the end, still behind its proxy. A slow test runs this and checks
the output file.
"""

import argparse
import contextlib
import dataclasses
import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections import Counter
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[2]))

from start import free_port, in_process

ROOT = Path(__file__).parents[2]
KEY, NAME, STAGE = "s3cret", "qrl-moving", "base"
QUESTION = "Tom has 3 apples and buys 12 more. How many apples does Tom have?"
TIMEOUT_S = 400


@dataclasses.dataclass
class Answer:
    """One request, as its client sees it."""

    began: float  # seconds since the load began, like `ended`
    ended: float
    streamed: bool
    model: str | None  # the version that wrote it
    error: str | None


class Load:
    """Clients that send requests until `stop`."""

    def __init__(self, url: str, clients: int, tokens: int, pause_s: float) -> None:
        self.url, self.tokens, self.pause_s, self.answers, self.on = url, tokens, pause_s, [], True
        self.zero = time.monotonic()
        self._threads = [threading.Thread(target=self._ask, args=(number % 2 == 1,)) for number in range(clients)]
        for thread in self._threads:
            thread.start()

    def stop(self) -> None:
        """Let every client finish its request."""
        self.on = False
        for thread in self._threads:
            thread.join()

    def seen(self, version: int, after: int = 0) -> bool:
        """Return whether this version wrote an answer."""
        return any(answer.model == f"{NAME}@{version}" for answer in self.answers[after:])

    def summary(self) -> str:
        """Return the numbers of requests and of failures so far."""
        return f"{len(self.answers)} requests, {sum(bool(answer.error) for answer in self.answers)} failed"

    def _ask(self, stream: bool) -> None:
        import openai

        client = openai.OpenAI(base_url=self.url, api_key=KEY, max_retries=0, timeout=120)
        while self.on:
            began, model, error = time.monotonic() - self.zero, None, None
            try:
                model = self._once(client, stream)
            except Exception as failed:
                error = f"{type(failed).__name__}: {failed}"[:300]
            self.answers.append(Answer(began, time.monotonic() - self.zero, stream, model, error))
            time.sleep(self.pause_s)

    def _once(self, client, stream: bool) -> str:
        """Return the version that wrote an answer; raise ValueError unless it is whole."""
        request = {
            "model": f"{NAME}@{STAGE}",
            "messages": [{"role": "user", "content": QUESTION}],
            "temperature": 0,
            "max_tokens": self.tokens,
            "extra_body": {"ignore_eos": True},
        }
        if not stream:
            reply = client.chat.completions.create(**request)
            tokens, end = reply.usage.completion_tokens, reply.choices[0].finish_reason
            if tokens != self.tokens or end != "length":
                raise ValueError(f"not whole: {tokens} tokens, {end}")
            return reply.model
        parts = list(client.chat.completions.create(stream=True, stream_options={"include_usage": True}, **request))
        ends = [part.choices[0].finish_reason for part in parts if part.choices and part.choices[0].finish_reason]
        if ends != ["length"] or parts[-1].usage.completion_tokens != self.tokens or len(parts) < 3:
            raise ValueError(f"not whole: {len(parts)} parts, {ends}")
        (model,) = {part.model for part in parts}
        return model


def main() -> None:
    """Run everything, print a line per move, write one JSON file."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shape", choices=("tiny", "micro", "1.5b", "8b"), default="tiny")
    parser.add_argument("--clients", type=int, default=2)
    pause = "Seconds between a client's requests; on two cores, leaves time to load the next engine."
    parser.add_argument("--pause", type=float, default=0.5, help=pause)
    parser.add_argument("--tokens", type=int, default=64)
    parser.add_argument("--memory", default="0.45", help="Share of the GPU's memory for each engine.")
    parser.add_argument("--benchmark", metavar="CLIENTS,…", help="Numbers of concurrent clients, by comma.")
    parser.add_argument("--out", type=Path, required=True)
    args = parser.parse_args()
    args.out = args.out.resolve()
    with tempfile.TemporaryDirectory() as folder:
        os.environ |= {
            "MLFLOW_TRACKING_URI": f"sqlite:///{folder}/mlflow.db",
            "QRL_PLACE": "vllm_cpu",
            "QRL_API_KEY": KEY,
        }
        os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH")]))
        os.chdir(folder)
        in_process(register, args.shape)
        results = run_load(args)
    args.out.write_text(json.dumps(results, indent=1))
    print(json.dumps({key: value for key, value in results.items() if key not in ("answers", "log")}, indent=1))


def run_load(args: argparse.Namespace) -> dict:
    """Serve version 1, move the stage under load, and return the results."""
    import psutil

    port = free_port()
    words = [sys.executable, "-m", "qrl", "serve", "--stage", STAGE, "--engine", "vllm", "--follow", "1"]
    words += ["--gpu-memory-utilization", args.memory, "--port", str(port), "--registered_name", NAME]
    log = Path("log")
    with log.open("w") as out:
        server = subprocess.Popen(words, stdout=out, stderr=subprocess.STDOUT)
    load, moves = None, {}
    try:
        until(lambda: "Serving " in log.read_text(), server, log)
        load = Load(f"http://127.0.0.1:{port}/v1", args.clients, args.tokens, args.pause)
        until(lambda: load.seen(1), server, log)
        through = other_requests(port)
        for what, version in (("promote", 2), ("promote", 3), ("rollback", 2)):
            began = time.monotonic()
            registry("rollback" if what == "rollback" else "promote", version)
            before = len(load.answers)
            until(lambda version=version, before=before: load.seen(version, before), server, log)
            moves[f"{what} to {version}"] = time.monotonic() - began
            print(f"{what} to {version}: {moves[f'{what} to {version}']:.1f} s, {load.summary()}", flush=True)
        refused, undone = "does not take over", "is put back"
        moved = (("promote", 4, refused, 1), ("by hand", 5, undone, 1), ("promote", 6, refused, 2))
        for what, version, said, times in moved:
            registry(what, version)
            until(lambda said=said, times=times: log.read_text().count(said) == times, server, log)
            print(f"{what} {version}: refused, {load.summary()}", flush=True)
        kept = len(load.answers)
        time.sleep(4)  # four checks of the registry
        load.stop()
        measured = benchmark(args.benchmark, port) if args.benchmark else None
        children = psutil.Process(server.pid).children(recursive=True)
        began = time.monotonic()
        server.send_signal(signal.SIGTERM)
        code = server.wait(60)
        stopping = time.monotonic() - began
        text = log.read_text()
        left = [child for child in children if child.is_running() and child.status() != psutil.STATUS_ZOMBIE]
        return {
            "shape": args.shape,
            "clients": args.clients,
            "tokens": args.tokens,
            "requests": len(load.answers),
            "failed": [answer.error for answer in load.answers if answer.error],
            "streamed": sum(answer.streamed for answer in load.answers),
            "by_version": Counter(answer.model for answer in load.answers),
            "moves_s": moves,
            "through": through,
            "after_refusals": Counter(answer.model for answer in load.answers[kept:]),
            "refusals": [line for line in text.splitlines() if "does not take over" in line],
            "exit_code": code,
            "stop_s": stopping,
            "left": [child.pid for child in left],
            "benchmark": measured,
            "run": last_run(),
            "log": text,
            "answers": [dataclasses.asdict(answer) for answer in load.answers],
        }
    finally:
        if load:
            load.stop()
        with contextlib.suppress(ProcessLookupError):
            server.kill()
        server.wait()


def benchmark(clients: str, port: int) -> dict:
    """Run `benchmark --url` against the server; return its exit code and table."""
    words = [sys.executable, "-m", "qrl", "benchmark", "--stages", STAGE, "--url", f"http://127.0.0.1:{port}"]
    words += ["--registered_name", NAME, "--benchmark.batches", clients, "--benchmark.rounds", "3"]
    done = subprocess.run(words, capture_output=True, text=True, check=False)
    print(done.stdout, done.stderr[-3000:], flush=True)
    return {"command": words[3:], "exit_code": done.returncode, "table": done.stdout}


def until(condition, server: subprocess.Popen, log: Path) -> None:
    """Wait for a condition while the server lives."""
    deadline = time.monotonic() + TIMEOUT_S
    while not condition():
        if server.poll() is not None or time.monotonic() > deadline:
            raise SystemExit(f"The server ended with {server.poll()}, or nothing came:\n{log.read_text()[-6000:]}")
        time.sleep(0.1)


def other_requests(port: int) -> dict:
    """Return the other answers of an OpenAI server, through the proxy."""
    import urllib.error
    import urllib.request

    def get(path: str, key: str = KEY) -> tuple[int, str]:
        request = urllib.request.Request(f"http://127.0.0.1:{port}{path}", headers={"Authorization": f"Bearer {key}"})
        try:
            with urllib.request.build_opener(urllib.request.ProxyHandler({})).open(request, timeout=30) as answer:
                return answer.status, answer.read().decode()
        except urllib.error.HTTPError as error:
            return error.code, ""

    return {
        "models": [model["id"] for model in json.loads(get("/v1/models")[1])["data"]],
        "health": get("/health")[0],
        "metrics": sorted(
            {
                line.split("{")[0]
                for line in get("/metrics")[1].splitlines()
                if line.startswith("vllm:request_success_total")
            }
        ),
        "wrong_key": get("/v1/models", "guess")[0],
    }


def register(shape: str) -> None:
    """Register six versions that differ in one weight, the first at the stage.

    The fourth is damaged later, the fifth has no gate record, and no engine can load the sixth.
    """
    from qrl import checkpoint, registry, tiny
    from qrl.tracking import models, runs, store

    if shape == "tiny":
        path = tiny.PATH
    else:
        from rollouts import checkpoint_of

        path = checkpoint_of(shape)
    store.prepare()
    with runs.step("evaluate"):
        for number in range(1, 7):
            copied = Path("copy").resolve()
            shutil.copytree(path, copied, ignore=shutil.ignore_patterns("__pycache__"))
            flip(copied / checkpoint.shards(copied)[0], number)
            if number == 6:
                config = json.loads((copied / "config.json").read_text())
                (copied / "config.json").write_text(
                    json.dumps(config | {"intermediate_size": 2 * config["intermediate_size"]})
                )
            cell = {"digest": checkpoint.digest(copied), "variant": "base", "scheme": "full"}
            uri, stored = models.log_checkpoint(copied, name="base", task="arithmetic", move=True, **cell)
            registry.register(NAME, uri, accuracy=0.6, stderr=0.01, n=2000, **cell)
            shutil.rmtree(copied)
            if number == 4:
                damaged = stored / checkpoint.shards(stored)[0]
    registry.promote(NAME, STAGE, 1, record={"reasons": ["a benchmark of moving, not of answers"]})
    flip(damaged, 6)


def flip(file: Path, to: int) -> None:
    """Overwrite the last but one byte, the low half of one bf16 weight."""
    with file.open("r+b") as opened:
        opened.seek(-2, os.SEEK_END)
        opened.write(bytes([to]))


def registry(what: str, version: int) -> None:
    """Move the stage, from a process of its own, as `promote` does."""
    in_process(move, what, version)


def move(what: str, version: int) -> None:
    from qrl import registry
    from qrl.tracking import store

    store.prepare()
    if what == "rollback":
        registry.rollback(NAME, STAGE)
    elif what == "by hand":
        import mlflow

        mlflow.MlflowClient().set_registered_model_alias(NAME, STAGE, str(version))
    else:
        registry.promote(NAME, STAGE, version, record={"reasons": ["a benchmark of moving, not of answers"]})


def last_run() -> dict:
    """Return status, tags and metrics of the server's run."""
    import mlflow

    (run,) = mlflow.search_runs(output_format="list", filter_string="tags.`qrl.step` = 'serve'")
    return {
        "status": run.info.status,
        "tags": {key: value for key, value in run.data.tags.items() if key.startswith("qrl.")},
        "metrics": run.data.metrics,
    }


if __name__ == "__main__":
    main()
