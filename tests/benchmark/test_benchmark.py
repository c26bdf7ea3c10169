"""The benchmark of the shipped model: it counts the tokens that were written, and every number has an interval."""

import json
import shutil

import numpy as np
import pytest
import scipy.stats

from qrl import benchmark, checkpoint, figures, recipe, registry, tiny
from qrl.benchmark import http, local, summary
from qrl.engine import hf
from qrl.errors import BadInput, QrlError
from qrl.recipe import Benchmark
from qrl.steps import benchmark as step
from qrl.tasks import load, prompt
from qrl.tracking import models, runs

pytestmark = pytest.mark.process

SMALL = {"batches": (1, 4), "requests": 4, "rounds": 2, "new_tokens": 5}
CELLS = [benchmark.Subject("base", "full", tiny.PATH), benchmark.Subject("grpo", "full", tiny.PATH)]


@pytest.fixture(scope="module")
def engine():
    return local.Transformers(tiny.PATH, "cpu", "auto")


@pytest.fixture(scope="module")
def prompts():
    tokens = hf.tokenizer(tiny.PATH)
    return [prompt.render(tokens, question.question, "answer-line") for question in load("arithmetic", "heldout", 6, 0)]


@pytest.fixture(scope="module")
def frame(engine, prompts):
    return benchmark.run(
        CELLS, [prompts, prompts], lambda subject: local.Transformers(subject.path, "cpu", "auto"), Benchmark(**SMALL)
    )


def test_every_model_is_measured_in_every_mode_and_round(frame):
    counts = frame.groupby(["variant", "batch", "round"]).size()
    assert len(counts) == 2 * 2 * 2 and set(counts) == {4}
    assert frame[frame["batch"] == 1]["turn"].nunique() == 4 and frame[frame["batch"] == 4]["turn"].nunique() == 1
    assert (frame["new_tokens"] == 5).all()
    assert (frame["first_token_s"] > 0).all() and (frame["first_token_s"] < frame["latency_s"]).all()
    assert (frame["latency_s"] <= frame["turn_s"]).all()
    assert frame["engine"].str.fullmatch(r"transformers \d+\.\d+\.\d+").all()


def test_models_rotate_in_who_goes_first():
    order = []

    class Silent:
        name, weights_bytes = "none 0", 0

        def __init__(self, subject):
            self.label = subject.label

        def close(self):
            pass

        def ask(self, prompts, *, new_tokens, fixed):
            order.append(self.label)
            return benchmark.BatchResult((benchmark.Request(1, 1, 0.1, 0.2),) * len(prompts), 0.2, 0)

    benchmark.run(CELLS, [[[1]], [[1]]], Silent, Benchmark(batches=(1,), requests=1, rounds=2, new_tokens=1))
    assert order[2:] == ["base · full", "grpo · full", "grpo · full", "base · full"]  # the first two warm up


def test_a_natural_answer_is_the_engines_own_and_ends_where_it_ends(engine, prompts):
    model, tokens = hf.load(tiny.PATH, "cpu", engine._model.dtype)
    expected = [answer.n_tokens for answer in hf.generate(model, tokens, prompts, max_new_tokens=60, batch_size=6)]
    answered = engine.ask(prompts, new_tokens=60, fixed=False)
    assert [request.new_tokens for request in answered.requests] == expected
    assert len(set(expected)) > 1
    shortest, longest = (answered.requests[expected.index(pick(expected))] for pick in (min, max))
    assert shortest.latency_s < longest.latency_s == answered.seconds


def test_memory_is_counted_from_shapes(engine, prompts):
    from transformers import AutoConfig

    config = AutoConfig.from_pretrained(tiny.PATH)
    answered = engine.ask(prompts[:2], new_tokens=7, fixed=True)
    cached = max(map(len, prompts[:2])) + 7 - 1  # the last token is written, never read
    width = config.hidden_size // config.num_attention_heads
    assert answered.cache_bytes == 2 * config.num_hidden_layers * 2 * cached * config.num_key_value_heads * width * 4
    assert local.token_bytes(config, "float32") * 2 * cached == answered.cache_bytes
    stored = (tiny.PATH / "model.safetensors").stat().st_size  # bf16 there, fp32 in memory
    assert engine.weights_bytes == pytest.approx(2 * stored, rel=0.01)


def test_lines_follow_from_the_requests(frame):
    lines = summary.lines(frame)
    assert [(line.label, line.batch) for line in lines] == [(cell.label, batch) for cell in CELLS for batch in (1, 4)]
    line = lines[3]
    rows = frame[(frame["variant"] == "grpo") & (frame["batch"] == 4)]
    speeds = [5 * 4 / rows[rows["round"] == number]["turn_s"].iloc[0] for number in (0, 1)]
    assert line.tokens_per_s.estimate == pytest.approx(scipy.stats.gmean(speeds))
    low, high = scipy.stats.t.interval(0.95, 1, np.mean(np.log(speeds)), scipy.stats.sem(np.log(speeds)))
    assert (line.tokens_per_s.low, line.tokens_per_s.high) == pytest.approx((np.exp(low), np.exp(high)))
    assert lines[0].relative is None and line.relative.n == 2


def test_a_time_is_never_below_zero_and_a_ratio_is_the_other_ways_inverse():
    wide = summary.over_rounds([0.01, 0.3])  # an interval on the plain mean would begin at -1.7 s
    assert 0 < wide.low < wide.estimate < wide.high
    ours, theirs = [1.0, 2.0, 4.0], [3.0, 1.0, 5.0]
    there, back = (
        summary.over_rounds([a / b for a, b in zip(first, second, strict=True)])
        for first, second in ((ours, theirs), (theirs, ours))
    )
    assert (there.low, there.estimate, there.high) == pytest.approx((1 / back.high, 1 / back.estimate, 1 / back.low))
    for values, words in (([1.0], "1 round supports no interval"), ([1.0, 0.0], "above 0")):
        with pytest.raises(ValueError, match=words):
            summary.over_rounds(values)


def test_intervals_cover_lognormal_rounds_at_their_level():
    drawn = np.random.default_rng(0).lognormal(0.0, 0.3, (2000, 5))
    coverage = np.mean([interval.low < 1.0 < interval.high for interval in map(summary.over_rounds, drawn.tolist())])
    assert abs(coverage - 0.95) < 3 * np.sqrt(0.95 * 0.05 / 2000)


def test_the_table_and_the_figure_state_intervals_and_n(frame, tmp_path):
    lines = summary.lines(frame)
    text = summary.markdown(lines, "A note.")
    assert "over 2 interleaved rounds, n = 8 requests" in text and text.count("[") == 4 * 5 - 2
    unknown = summary.lines(frame.assign(weights_bytes=None))
    assert "| not known |" in summary.markdown(unknown, "")
    assert not any(
        "weights_bytes" in name
        for by_batch in summary.metrics(unknown).values()
        for values in by_batch.values()
        for name in values
    )
    figures.speeds(lines, tmp_path / "speeds.png")
    assert (tmp_path / "speeds.png").read_bytes().startswith(b"\x89PNG")


def test_the_figures_axes_read_in_plain_numbers(frame, tmp_path, monkeypatch):
    from matplotlib.figure import Figure

    drawn = []
    saved = Figure.savefig
    monkeypatch.setattr(
        Figure, "savefig", lambda figure, *args, **options: (saved(figure, *args, **options), drawn.append(figure))
    )
    figures.speeds(summary.lines(frame), tmp_path / "speeds.png", "clients")
    above, below = drawn[0].axes
    for axes in (above, below):
        low, high = axes.get_ylim()
        shown = [
            label.get_text()
            for place, label in zip(axes.get_yticks(), axes.get_yticklabels(), strict=True)
            if low <= place <= high
        ]
        assert shown and all(float(text.replace(",", "")) > 0 for text in shown)  # no powers of ten
        assert len(set(shown)) == len(shown)
    assert below.get_xlabel() == "clients at once" and above.get_ylabel() == "tokens per second"


def test_requests_are_a_minimum_and_the_tables_n_is_its_smallest_line(prompts):
    settings = Benchmark(**SMALL | {"batches": (4, 5), "requests": 6, "new_tokens": 2})
    frame = benchmark.run(
        CELLS[:1], [prompts], lambda subject: local.Transformers(subject.path, "cpu", "auto"), settings
    )
    lines = summary.lines(frame)
    assert [line.requests for line in lines] == [2 * 8, 2 * 10]
    assert "n = 16 requests or more a line" in summary.markdown(lines[::-1], "")


def test_a_checkpoint_under_another_schemes_name_is_rejected():
    with pytest.raises(BadInput, match="base:nf4 was given qrl-tiny, which is stored as full precision"):
        step.benchmark(recipe.load("tiny"), stages=None, models="base:nf4=qrl-tiny", url=None)


def test_an_address_without_a_server_is_rejected():
    import socket
    import threading

    with socket.create_server(("127.0.0.1", 0)) as listening:

        def other_protocol():
            with listening.accept()[0] as connection:
                connection.recv(1000)
                connection.sendall(b"SSH-2.0-none\r\n")

        threading.Thread(target=other_protocol, daemon=True).start()
        with pytest.raises(BadInput, match="lists no model"):
            step._served_model(f"http://127.0.0.1:{listening.getsockname()[1]}")


def test_a_guarded_server_gets_the_key_from_the_environment(monkeypatch):
    import threading
    from http.server import BaseHTTPRequestHandler, HTTPServer

    class Guarded(BaseHTTPRequestHandler):
        def do_GET(self):
            let_in = self.headers.get("Authorization") == "Bearer s3cret"
            self.send_response(200 if let_in else 401)
            self.end_headers()
            self.wfile.write(b'{"data": [{"id": "m@1"}]}' if let_in else b"{}")

        def log_message(self, *_words):
            pass

    with HTTPServer(("127.0.0.1", 0), Guarded) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        address = f"http://127.0.0.1:{server.server_port}"
        monkeypatch.setenv(step.API_KEY, "s3cret")
        assert step._served_model(address) == "m@1"
        monkeypatch.delenv(step.API_KEY)
        with pytest.raises(BadInput, match=r"401.*QRL_API_KEY"):
            step._served_model(address)
        server.shutdown()


def test_too_few_prompts_are_rejected(engine, prompts):
    with pytest.raises(BadInput, match=r"6 prompts, but a batch of 8"):
        benchmark.run(CELLS[:1], [prompts], lambda subject: engine, Benchmark(**SMALL | {"batches": (8,)}))


def test_the_step_logs_a_table_a_figure_and_a_run_for_each(store, capsys):
    import mlflow

    settings = recipe.load(
        "tiny",
        {
            f"benchmark.{key}": ",".join(map(str, value)) if isinstance(value, tuple) else str(value)
            for key, value in SMALL.items()
        },
    )
    step.benchmark(settings, stages=None, models="base:full=qrl-tiny,grpo:full=qrl-tiny", url=None)
    assert "| grpo · full | 4 |" in capsys.readouterr().out
    cells = mlflow.search_runs(filter_string="tags.`qrl.variant` LIKE '%'", output_format="list")
    assert {run.info.run_name for run in cells} == {cell.label for cell in CELLS}
    for run in cells:
        assert {f"serve/{name}" for name in ("tokens_per_s", "latency_p50_s", "latency_p95_s")} <= set(run.data.metrics)
        history = mlflow.MlflowClient().get_metric_history(run.info.run_id, "serve/tokens_per_s")
        assert [point.step for point in history] == [1, 4]
    parent = mlflow.get_run(cells[0].data.tags["mlflow.parentRunId"])
    assert {info.path for info in mlflow.artifacts.list_artifacts(run_id=parent.info.run_id)} >= {
        "benchmark.md",
        "benchmark.parquet",
        "figures",
    }


def test_nothing_to_measure_is_rejected(store):
    for arguments, message in (({"stages": None}, "no version at any of base, grpo, awq"), ({"stages": "awq"}, "awq")):
        with pytest.raises(BadInput, match=message):
            step.benchmark(recipe.load("tiny"), models=None, url=None, **arguments)


@pytest.mark.slow
def test_without_names_the_four_default_cells_are_measured_if_they_exist(store, tmp_path):
    def logged(variant: str, scheme: str, parent: str = "") -> tuple[str, str]:
        folder = shutil.copytree(tiny.PATH, tmp_path / f"{variant}-{scheme}")
        (folder / "config.json").write_text((folder / "config.json").read_text() + " " * len(list(tmp_path.iterdir())))
        digest = checkpoint.digest(folder)
        with runs.step("quantize"):
            uri, _ = models.log_checkpoint(
                folder,
                name=f"{variant}-{scheme}",
                digest=digest,
                variant=variant,
                scheme=scheme,
                task="arithmetic",
                move=False,
                metadata={"parent": parent},
            )
        return uri, digest

    def promoted(stage: str, variant: str, scheme: str, uri: str, digest: str) -> None:
        version = registry.register(
            "qrl-tiny", uri, digest=digest, variant=variant, scheme=scheme, accuracy=0.6, stderr=0.01, n=100
        )
        registry.promote("qrl-tiny", stage, version.version, record={"reasons": ["it was better"]})

    base = logged("base", "full")
    promoted("base", "base", "full", *base)
    settings = recipe.load("tiny")
    assert [cell.label for cell in step.check_subjects(settings, None, None)] == ["base · full"]
    promoted("grpo", "grpo", "full", *logged("grpo", "full"))
    promoted("awq", "grpo", "awq", *logged("grpo", "awq"))
    logged("base", "awq", parent="of another base")
    assert [cell.label for cell in step.check_subjects(settings, None, None)] == [
        "base · full",
        "grpo · full",
        "grpo · awq",
    ]
    shutil.rmtree(tmp_path / "base-awq")
    uri, _ = logged("base", "awq", parent=base[1])
    subjects = step.check_subjects(settings, None, None)
    assert [cell.label for cell in subjects] == ["base · full", "grpo · full", "grpo · awq", "base · awq"]
    assert all((cell.path / "model.safetensors").is_file() for cell in subjects) and uri.removeprefix(
        "models:/"
    ) in str(subjects[-1].path)


def test_a_server_needs_vllm_and_is_measured_by_its_own_benchmark(tmp_path):
    with pytest.raises(BadInput, match="vllm bench serve"):
        http.Client("http://127.0.0.1:1", "m@1", ["a"], tiny.PATH, Benchmark())
    words = http.options(
        "http://h:1",
        "m@1",
        tmp_path / "p",
        tiny.PATH,
        {"clients": 16},
        Benchmark(new_tokens=9, requests=4),
        tmp_path / "0-16.json",
    )
    options = dict(zip(words[:-3:2], words[1:-2:2], strict=True))
    assert (options["--max-concurrency"], options["--num-prompts"], options["--custom-output-len"]) == ("16", "16", "9")
    assert words[-1] == "--ignore-eos" and json.dumps(words)


def measured(**changes) -> list[dict]:
    """Return the output of `vllm bench serve` for three rounds with one and four clients."""
    row = {"completed": 4, "failed": 0, "num_prompts": 4, "p95_e2el_ms": 90.0, "p50_ttft_ms": 20.0}
    return [
        row
        | {
            "round": number,
            "clients": clients,
            "output_throughput": 100.0 * clients + number,
            "p50_e2el_ms": 80.0 + number,
        }
        | changes
        for number in range(3)
        for clients in (4, 1)
    ]


def test_a_servers_rounds_become_lines_with_intervals_and_its_failures_raise():
    one, four = http.lines(measured(), CELLS[0], "vllm 9.9")
    assert (one.batch, four.batch, four.requests, four.weights_bytes) == (1, 4, 12, None)
    assert four.tokens_per_s.estimate == pytest.approx(scipy.stats.gmean([400, 401, 402])) and four.tokens_per_s.n == 3
    assert one.latency_p50_s.low < 0.081 < one.latency_p50_s.high and one.first_token_s.estimate == pytest.approx(0.02)
    text = summary.markdown([one, four], "Over HTTP.", "clients")
    assert "| model | clients |" in text and "vllm 9.9; brackets" in text and text.count("not known") == 4
    for broken in ({"failed": 1}, {"completed": 0}):
        with pytest.raises(QrlError, match="so its speed does not count"):
            http.lines(measured(**broken), CELLS[0], "vllm 9.9")
