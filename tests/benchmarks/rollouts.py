"""Measure GRPO on one GPU: what rollouts, their weights and the update cost, and what they change.

    python tests/benchmarks/rollouts.py lift speed update --out FOLDER  # a process and a JSON line per case
    python tests/benchmarks/rollouts.py --print FOLDER                  # the tables again, from those lines

lift      the built-in model, 2,000 held-out questions: each method's gain through vLLM rollouts, paired interval
server    the same QLoRA through a rollout server on a second GPU, bf16 and FP8
step      the built-in model, transformers rollouts: our step and a bare TRL script's, in turn
speed     Qwen2.5-1.5B's shape, 64 × 8 completions of 256 tokens: TRL as shipped and ours; transformers and vLLM
update    the update alone, without any engine: step time and peak memory of full, LoRA and QLoRA, with and without
          a reference
sync      an adapter's sync and decoding, merged into the base and in a LoRA slot, in turn on one engine, by shape

Shapes have random weights: their time is the real model's, their log-probabilities are not.
"""

import argparse
import contextlib
import dataclasses
import fcntl
import itertools
import json
import math
import os
import statistics
import subprocess
import sys
import tempfile
import threading
import time
import urllib.request
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[2]))

SHAPES = {
    "1.5b": dict(model_type="qwen2", hidden_size=1536, intermediate_size=8960, num_hidden_layers=28)
    | dict(num_attention_heads=12, num_key_value_heads=2, vocab_size=151936, tie_word_embeddings=True),
    "1.7b": dict(model_type="qwen3", hidden_size=2048, intermediate_size=6144, num_hidden_layers=28, head_dim=128)
    | dict(num_attention_heads=16, num_key_value_heads=8, vocab_size=151936, tie_word_embeddings=True),
    "8b": dict(model_type="qwen3", hidden_size=4096, intermediate_size=12288, num_hidden_layers=36, head_dim=128)
    | dict(num_attention_heads=32, num_key_value_heads=8, vocab_size=151936, tie_word_embeddings=False),
    "llama8b": dict(model_type="llama", hidden_size=4096, intermediate_size=14336, num_hidden_layers=32)
    | dict(num_attention_heads=32, num_key_value_heads=8, vocab_size=128256, tie_word_embeddings=False),
    "micro": dict(model_type="qwen2", hidden_size=64, intermediate_size=128, num_hidden_layers=2)
    | dict(num_attention_heads=2, num_key_value_heads=2, vocab_size=1024, tie_word_embeddings=True),
}
BATCH = dict(prompts_per_step=64, generations=8, micro_batch=64, questions=256, max_completion_tokens=256)
BATCH |= dict(gradient_checkpointing=True, learning_rate=1e-6)
BF16, FEW = BATCH | dict(dtype="bf16"), BATCH | dict(prompts_per_step=16, dtype="bf16")
ADAPTER = BATCH | dict(learning_rate=1e-5)
SMALLER = {"1.5b": dict(prompts_per_step=16), "8b": dict(prompts_per_step=8, micro_batch=8)}
VLLM = dict(engine="vllm", gpu_memory_utilization=0.3)
DECODED = 64  # completions at once, of 128 tokens, with which `sync` times decoding
AWAKE, SMALL = VLLM | dict(sleep="off"), VLLM | dict(gpu_memory_utilization=0.1)
TINY = dict(steps=20, prompts_per_step=64, generations=8, micro_batch=512, max_completion_tokens=80, learning_rate=3e-5)
TINY_LORA = TINY | dict(learning_rate=1e-3, dtype="bf16")
TINY_QLORA = TINY_LORA | dict(method="qlora", beta=0.01)
SERVER = "http://127.0.0.1:8017"


def update_case(shape: str, method: str, beta: float = 0.0, bare: bool = False) -> tuple[str, dict]:
    """Return the name and the settings of a case that measures the update alone."""
    batch = (BATCH if method == "full" else ADAPTER) | SMALLER[shape]
    train = batch | dict(steps=3, method=method, beta=beta, dtype="bf16")
    name = f"{shape} {method}{' with a reference' if beta else ''}{', TRL' if bare else ''}"
    return name, dict(shape=shape, bare=bare, canned=True, train=train, rollout={})


CASES = {
    "lift": {
        "full": dict(train=TINY, rollout=SMALL),
        "lora": dict(train=TINY_LORA | dict(method="lora"), rollout=SMALL),
        "qlora": dict(train=TINY_QLORA, rollout=SMALL),
        "qlora fp8": dict(train=TINY_QLORA, rollout=SMALL | dict(quantization="fp8", sleep="on")),
        "qlora fp8, keys and values too": dict(
            train=TINY_QLORA, rollout=SMALL | dict(quantization="fp8", kv_cache="fp8")
        ),
    },
    "speed": {
        "TRL transformers": dict(shape="1.5b", bare=True, train=BF16 | dict(steps=2), rollout={}),
        "ours transformers": dict(shape="1.5b", train=BF16 | dict(steps=2), rollout={}),
        "TRL vllm": dict(shape="1.5b", bare=True, train=BF16 | dict(steps=4), rollout=AWAKE),
        "ours vllm": dict(shape="1.5b", train=BF16 | dict(steps=4), rollout=AWAKE, parts=True),
        "ours vllm, awake then sleeping": dict(
            shape="1.5b", train=BF16 | dict(steps=6), rollout=VLLM | dict(sleep="on"), awake=3
        ),
        "ours vllm, qlora": dict(shape="1.5b", train=ADAPTER | dict(steps=4, method="qlora"), rollout=AWAKE),
    },
    "sync": {
        shape: dict(
            ways=7,
            shape=shape,
            train=ADAPTER | dict(method="lora", dtype="bf16"),
            rollout=dict(engine="vllm", sleep="off", adapter="slot", compile=False)
            | dict(kv_cache_gib=4, max_model_tokens=1024),
        )
        for shape in ("8b", "1.5b", "micro")
    },
    "server": {
        name: dict(
            serves=name, train=TINY_QLORA, rollout=dict(engine="vllm", mode="server", server=SERVER, quantization=name)
        )
        for name in ("none", "fp8")
    },
    "step": {
        "ours against TRL": dict(alternate=3, train=TINY | dict(steps=5), rollout={}),
        "ours against TRL, 1.5b": dict(
            alternate=8, shape="1.5b", train=FEW | dict(steps=3, max_completion_tokens=32), rollout={}
        ),
        "ours against TRL, 1.5b, completions given": dict(
            alternate=8, shape="1.5b", canned=True, train=FEW | dict(steps=3), rollout={}
        ),
        "ours against TRL, 1.5b, few": dict(
            alternate=6,
            shape="1.5b",
            train=BATCH | dict(steps=2, prompts_per_step=1, micro_batch=8, max_completion_tokens=16),
            rollout={},
        ),
    },
    "update": dict(
        [
            update_case("1.5b", "full", bare=True),
            *(update_case("1.5b", method, beta) for method in ("full", "lora", "qlora") for beta in (0.0, 0.01)),
            *(update_case("8b", method, beta) for method in ("lora", "qlora") for beta in (0.0, 0.01)),
            update_case("8b", "full"),
            update_case("8b", "full", bare=True),
        ]
    ),
}


def checkpoint_of(shape: str) -> Path:
    """Return a folder with random bf16 weights of a shape and the built-in model's tokenizer; made once per machine."""
    folder = Path(tempfile.gettempdir()) / f"qrl-shape-{shape}"
    with open(folder.with_suffix(".lock"), "w") as lock:  # cases may start together
        fcntl.flock(lock, fcntl.LOCK_EX)
        return folder if (folder / "config.json").is_file() else _make(folder, shape)


def _make(folder: Path, shape: str) -> Path:
    """Make the folder, on a GPU if there is one, with a seed per tensor."""
    import shutil
    import zlib

    import torch
    from safetensors.torch import save_file
    from transformers import AutoConfig, AutoModelForCausalLM

    from qrl import checkpoint, tiny

    own = json.loads((tiny.PATH / "config.json").read_text())
    tokens = {name: own[name] for name in ("eos_token_id", "pad_token_id")}
    config = AutoConfig.for_model(max_position_embeddings=40960, dtype="bfloat16", **tokens, **SHAPES[shape])
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)

    def filled(name: str, like) -> torch.Tensor:
        if like.dim() < 2:
            return torch.full(like.shape, float(name.endswith("norm.weight")), dtype=torch.bfloat16)
        seed = torch.Generator(device()).manual_seed(zlib.crc32(name.encode()))
        weight = torch.empty(like.shape, dtype=torch.bfloat16, device=device())
        return weight.normal_(std=config.initializer_range, generator=seed).cpu()

    tensors = {name: filled(name, like) for name, like in model.named_parameters()}
    partial = folder.with_suffix(".partial")
    shutil.rmtree(partial, ignore_errors=True)  # of a case that was killed
    partial.mkdir()
    model.config.architectures = [type(model).__name__]
    model.config.save_pretrained(partial)
    save_file(tensors, partial / "model.safetensors", {"format": "pt"})
    for name in (*checkpoint.TOKENIZER_FILES, "generation_config.json"):
        if (tiny.PATH / name).is_file():
            shutil.copy(tiny.PATH / name, partial / name)
    partial.rename(folder)
    return folder


def trainer_of(case: dict, work: Path):
    """Return the trainer of a case and its settings: ours through `grpo`, or TRL's own with the same numbers."""
    from qrl import tasks, tiny
    from qrl.recipe import Rollout, Train
    from qrl.tasks import prompt
    from qrl.train import Job, arguments, grpo, policy, reward

    base = checkpoint_of(case["shape"]) if "shape" in case else tiny.PATH
    train, rollout = Train(**case["train"]), Rollout(**case["rollout"])
    questions = tasks.load("arithmetic", "train", train.questions, 0)
    data = {"base": base, "questions": questions, "task": "arithmetic", "template": "plain", "seed": 0}
    job = Job(settings=train, device=device(), work=work, out=work / "model", **data)
    if not case.get("bare"):
        return grpo.make_trainer(dataclasses.replace(job, rollout=rollout)), train
    from trl import GRPOTrainer

    from qrl.engine import hf

    engine = {}
    if rollout.engine == "vllm":
        share = rollout.gpu_memory_utilization
        engine = {"use_vllm": True, "vllm_mode": "colocate", "vllm_gpu_memory_utilization": share}
    rows = [
        {"prompt": prompt.messages(question.question, "plain"), "answer": question.answer} for question in questions
    ]
    trainer = GRPOTrainer(
        model=policy.load(base, train, device()),
        reward_funcs=reward.functions("arithmetic", train.rewards),
        args=arguments.grpo_config(job, **engine),
        train_dataset=arguments.dataset(rows),
        processing_class=hf.tokenizer(base),
        peft_config=policy.adapter(train),
    )
    return trainer, train


def device() -> str:
    import torch

    return "cuda" if torch.cuda.is_available() else "cpu"


def finished() -> float:
    """Return the time once the GPU has finished."""
    import torch

    if torch.cuda.is_available():
        torch.cuda.synchronize()
    return time.perf_counter()


def train(case: dict) -> dict:
    """Train a case; return medians over all steps but the first, with the seconds of sampling (sync included) apart."""
    if case.get("alternate"):
        return alternate(case)
    if case.get("ways"):
        return ways(case)
    import torch
    from transformers import TrainerCallback

    from qrl.train import loop
    from qrl.train.rollout import engine_gap

    drawing, steps = [], []

    class Clock(TrainerCallback):
        def on_step_begin(self, *_, **__):
            self.began = finished()

        def on_step_end(self, *_, **__):
            steps.append(finished() - self.began)

    with tempfile.TemporaryDirectory() as work:
        made, settings = trainer_of(case, Path(work))
        card = Card()
        made.args.save_strategy = "no"
        made.add_callback(Clock())
        draw = made_up(settings) if case.get("canned") else made._generate_single_turn

        def timed(prompt_ids, *rest, **named):
            began, asleep = finished(), " asleep" if len(drawing) >= case.get("awake", math.inf) else ""
            card.now = f"drawing{asleep}"
            if "awake" in case:
                lull(made.vllm_generation, awake=not asleep)
            answer = draw(prompt_ids, *rest, **named)
            drawing.append((finished() - began, len(prompt_ids), sum(map(len, answer[0]))))
            card.now = f"updating{asleep}"
            return answer

        made._generate_single_turn = timed
        frozen = loop.frozen_digest(made.model) if settings.adapter and not case.get("canned") else None
        if torch.cuda.is_available():
            torch.cuda.reset_peak_memory_stats()
        with card:
            made.train()
        history = made.state.log_history
        found = {
            "step_s": statistics.median(steps[1:]),
            "steps_s": steps,
            "draw_s": statistics.median(seconds for seconds, _, _ in drawing[1:]),
            "draws_s": [seconds for seconds, _, _ in drawing],
            "completions": drawing[-1][1],
            "tokens": drawing[-1][2],
            "peak_gib": torch.cuda.max_memory_allocated() / 2**30 if torch.cuda.is_available() else math.nan,
            "card_gib": card.most,
            "steps": len(steps),
        }
        for name in ("sync_s", "generate_s", *(each.name for each in dataclasses.fields(engine_gap.Gap))):
            values = [row[f"rollout/{name}"] for row in history if f"rollout/{name}" in row]
            if values:
                found[name] = statistics.median(values[1:])
                found[f"{name}_worst"] = min(values) if name.endswith("ess") else max(values)
        if frozen:
            found["base_unmoved"] = loop.frozen_digest(made.model) == frozen
        if case.get("parts"):
            found |= parts(made)
        if "shape" not in case:
            found |= lift(made, settings)
        return found


def made_up(settings):
    """Return a function that samples random tokens of the largest length, without any model."""
    import torch

    return lambda prompt_ids, *_, **__: (
        torch.randint(3, 384, (len(prompt_ids), settings.max_completion_tokens)).tolist(),
        None,
    )


class Card:
    """The peak memory of the whole card in each phase of training, sampled 50 times a second."""

    def __init__(self):
        self.now, self.most, self.ended = "preparing", {}, threading.Event()

    def look(self):
        import torch

        from qrl import process

        while torch.cuda.is_available() and not self.ended.wait(0.02):
            free, total = torch.cuda.mem_get_info(process.local_rank())
            self.most[self.now] = max(self.most.get(self.now, 0), (total - free) / 2**30)

    def __enter__(self):
        self.thread = threading.Thread(target=self.look, daemon=True)
        self.thread.start()
        return self

    def __exit__(self, *_):
        self.ended.set()
        self.thread.join()


def lull(link, *, awake: bool) -> None:
    """Let an engine that can sleep stay awake from now on, or sleep between rollouts."""
    from qrl.train.rollout import vllm_engine

    if awake and link.enable_sleep_mode:
        link.enable_sleep_mode = link._llm_weights_sleeping = False
        vllm_engine.wake(link.llm, "weights")
        vllm_engine.wake(link.llm, "kv_cache")
    elif not awake and not link.enable_sleep_mode:
        link.enable_sleep_mode = link._llm_weights_sleeping = True
        vllm_engine.sleep(link.llm)


@contextlib.contextmanager
def ended(serving: subprocess.Popen, address: str, seconds: float):
    """Wait until a server answers, for so many seconds at most, and end it with the block."""
    try:
        deadline = time.monotonic() + seconds
        while time.monotonic() < deadline and serving.poll() is None:
            with contextlib.suppress(OSError):
                urllib.request.urlopen(f"{address}/health", timeout=2)
                break
            time.sleep(1)
        yield
    finally:
        serving.terminate()
        serving.wait(30)


@contextlib.contextmanager
def server(case: dict):
    """Run a rollout server on the second GPU, with the command in qrl/train/rollout/README.md."""
    from qrl import tiny

    if not case.get("serves"):
        yield
        return
    words = [
        sys.executable,
        "-m",
        "vllm.entrypoints.openai.api_server",
        "--model",
        str(tiny.PATH),
        "--dtype",
        "bfloat16",
    ]
    words += [
        "--port",
        SERVER.rpartition(":")[2],
        "--gpu-memory-utilization",
        "0.2",
        "--logprobs-mode",
        "processed_logprobs",
    ]
    words += ["--weight-transfer-config", '{"backend": "nccl"}']
    words += ["--quantization", "fp8_per_tensor"] if case["serves"] == "fp8" else []
    serving = subprocess.Popen(words, env=os.environ | {"CUDA_VISIBLE_DEVICES": "1", "VLLM_SERVER_DEV_MODE": "1"})
    with ended(serving, SERVER, 150):
        yield


def alternate(case: dict) -> dict:
    """Measure our step and a bare TRL script's in turn, in one process: medians of all steps but each round's first."""
    import turns
    from transformers import TrainerCallback

    class Clock(TrainerCallback):
        def __init__(self):
            self.steps = []

        def on_step_begin(self, *_, **__):
            self.began = finished()

        def on_step_end(self, *_, **__):
            self.steps.append(finished() - self.began)

    with tempfile.TemporaryDirectory() as work:
        made, clocks = {}, {}
        for name in ("ours", "TRL"):
            made[name], settings = trainer_of(case | {"bare": name == "TRL"}, Path(work, name))
            if case.get("canned"):
                made[name]._generate_single_turn = made_up(settings)
            clocks[name] = Clock()
            made[name].args.save_strategy = "no"
            made[name].add_callback(clocks[name])
        kept = {name: [] for name in made}
        for _ in range(case["alternate"]):
            for name, trainer in made.items():
                clocks[name].steps.clear()
                trainer.train()
                kept[name].append(clocks[name].steps[1:])
                print(name, clocks[name].steps, flush=True)  # a killed case leaves these
    return (
        {f"{name}_step_s": statistics.median(itertools.chain(*rounds)) for name, rounds in kept.items()}
        | turns.ratio(kept["ours"], kept["TRL"])
        | {"steps": kept}
    )


def ways(case: dict) -> dict:
    """Time both ways of sending an adapter, and decoding with it, in turn on one engine that keeps a slot.

    Each way's first is left out. Prompts are random tokens, and completions have the largest length. The merged weights
    are decoded by an engine that keeps its slot, too, but without an adapter.
    """
    import torch

    from qrl.train.rollout import slot, sync, vllm_engine

    with tempfile.TemporaryDirectory() as work:
        link = trainer_of(case, Path(work))[0].vllm_generation
        began = finished()
        link.sync_weights()
        found = {"first_s": finished() - began}  # the first sends the base too
        taken: dict[str, list[float]] = {"merged": [], "slot": []}
        decoded: dict[str, list[float]] = {"merged": [], "slot": []}
        prompts = torch.randint(3, 60, (DECODED, 64), generator=torch.Generator().manual_seed(0)).tolist()

        def decode(way: str, adapter=None) -> None:
            began, most = finished(), {"ignore_eos": True}
            vllm_engine.generate(link.llm, prompts, temperature=1.0, max_tokens=128, more=most, adapter=adapter)
            decoded[way].append(finished() - began)

        for _ in range(case["ways"]):
            began = finished()
            vllm_engine.load(link.llm, sync.named_weights(link._model(), torch.bfloat16), reloads=False)
            taken["merged"].append(finished() - began)
            decode("merged")
            began = finished()
            slot.load(link.llm, sync.named_adapter(link._model()))
            taken["slot"].append(finished() - began)
            decode("slot", slot.request())
    found |= {f"{way}_s": statistics.median(seconds[1:]) for way, seconds in taken.items()}
    found |= {f"decode_{way}_s": statistics.median(seconds[1:]) for way, seconds in decoded.items()}
    found |= {"merged_over_slot": found["merged_s"] / found["slot_s"], "syncs_s": taken, "decodes_s": decoded}
    print(json.dumps(found), flush=True)
    return found


def parts(made) -> dict:
    """Time log-probabilities, their form, and the ways of sending weights on one warm engine: TRL's ways and ours."""
    from trl.generation.vllm_generation import extract_logprobs
    from vllm import SamplingParams

    from qrl.train.rollout import vllm_engine

    engine, own = made.vllm_generation.llm, made.vllm_generation
    ids = made.processing_class("Tom has 3 apples and buys 12 more. " * 3)["input_ids"]
    asked = [{"prompt_token_ids": ids} for _ in range(512)]
    plain = dict(temperature=1.0, max_tokens=256, ignore_eos=True)
    ways = {
        "engine_alone_s": plain | dict(detokenize=False),
        "with_flat_logprobs_s": plain | dict(detokenize=False, logprobs=0, flat_logprobs=True),
        "with_logprob_objects_s": plain | dict(detokenize=False, logprobs=0),
        "as_TRL_asks_s": plain | dict(logprobs=0),
    }
    found = {}
    for name, options in ways.items():
        began = finished()
        answers = engine.generate(asked, sampling_params=SamplingParams(**options), use_tqdm=False)
        if name == "as_TRL_asks_s":
            extract_logprobs(answers)
        elif "flat_logprobs" in options:
            [vllm_engine._sampled(answer.outputs[0]) for answer in answers]
        elif "logprobs" in options:
            for answer in answers:
                pairs = zip(answer.outputs[0].token_ids, answer.outputs[0].logprobs, strict=True)
                [position[token].logprob for token, position in pairs]
        found[name] = finished() - began
    model = engine.llm_engine.model_executor.driver_worker.model_runner.model
    began = finished()
    for name, weight in own._iter_named_params():
        model.load_weights([(name, weight)])
    found["sync_one_by_one_s"] = finished() - began
    began = finished()
    own.sync_weights()
    found["sync_in_one_s"] = finished() - began
    return found


def lift(made, settings) -> dict:
    """Return held-out accuracy before and after on the same 2,000 questions: the trained model, adapter on, in bf16."""
    import torch
    from transformers import GenerationConfig

    from qrl import stats, tasks, tiny
    from qrl.engine import hf
    from qrl.tasks.prompt import render

    questions = tasks.load("arithmetic", "heldout", 2000, 0)
    tokens = hf.tokenizer(tiny.PATH)
    prompts = [render(tokens, q.question, "plain") for q in questions]
    own = made.accelerator.unwrap_model(made.model)
    before, _ = hf.load(tiny.PATH, device(), torch.float32)
    own.generation_config = GenerationConfig(
        eos_token_id=before.generation_config.eos_token_id, pad_token_id=before.generation_config.pad_token_id
    )
    own.config.use_cache = True
    right = []
    for model in (before, own.eval()):
        answers = hf.generate(model, tokens, prompts, max_new_tokens=96, batch_size=500)
        verdicts = tasks.grade_many("arithmetic", [answer.text for answer in answers], [q.answer for q in questions])
        right.append([int(verdict.strict) for verdict in verdicts])
    gain = stats.contrast(right, (-1, 1))
    return {
        "n": len(questions),
        "accuracy_base": sum(right[0]) / len(questions),
        "accuracy": sum(right[1]) / len(questions),
        "gain": gain.estimate,
        "gain_low": gain.low,
        "gain_high": gain.high,
    }


def versions() -> dict:
    from importlib.metadata import PackageNotFoundError, version

    import torch

    found = {"gpu": torch.cuda.get_device_name() if torch.cuda.is_available() else "none"}
    for name in ("torch", "transformers", "trl", "peft", "bitsandbytes", "vllm"):
        try:
            found[name] = version(name)
        except PackageNotFoundError:
            found[name] = "none"
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("groups", nargs="*", help=f"of {', '.join(CASES)}; GROUP/CASE for one")
    parser.add_argument("--out", type=Path, default=Path("."), help="folder for results.jsonl and a log per case")
    parser.add_argument("--print", dest="show", type=Path, help="folder of results.jsonl to print")
    parser.add_argument("--together", action="store_true", help="run cases without an engine in one process")
    parser.add_argument("--one", nargs=2, metavar=("GROUP", "CASE"), help=argparse.SUPPRESS)
    parser.add_argument("--timeout", type=int, default=280, help="seconds a case may take")
    given = parser.parse_args()
    if given.show:
        show(given.show)
    elif given.one:
        one(*given.one, given.out)
    elif given.together:
        given.out.mkdir(parents=True, exist_ok=True)
        for asked in given.groups:
            group, _, only = asked.partition("/")
            for name in [only] if only else CASES[group]:
                one(group, name, given.out)
        show(given.out)
    else:
        given.out.mkdir(parents=True, exist_ok=True)
        for asked in given.groups:
            group, _, only = asked.partition("/")
            for name in [only] if only else CASES[group]:
                run_apart(group, name, given)
        show(given.out)


def one(group: str, name: str, out: Path) -> None:
    """Run a case in this process, and write a line of results."""
    import gc

    import torch

    from qrl import process

    began = time.perf_counter()
    if group == "server":
        os.environ["CUDA_VISIBLE_DEVICES"] = "0"  # the trainer's; before torch looks
    with server(CASES[group][name]):
        found = train(CASES[group][name])
    row = {
        "group": group,
        "case": name,
        **found,
        "seconds": time.perf_counter() - began,
        "settings": CASES[group][name],
        **versions(),
    }
    with open(out / "results.jsonl" if process.rank() == 0 else os.devnull, "a") as file:  # the first of several
        file.write(json.dumps(row) + "\n")
    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()


def run_apart(group: str, name: str, given) -> None:
    """Run a case in its own process: an engine frees its memory only when its process ends."""
    words = [sys.executable, __file__, "--one", group, name, "--out", str(given.out)]
    began = time.perf_counter()
    with open(given.out / f"{group}-{name.replace(' ', '_').replace(',', '')}.log", "w") as log:
        try:
            code = subprocess.run(
                words,
                check=False,
                stdout=log,
                stderr=subprocess.STDOUT,
                timeout=given.timeout,
                env=os.environ | {"TQDM_DISABLE": "1"},
            ).returncode
        except subprocess.TimeoutExpired:
            code = "timed out"
    print(f"{group}/{name}: {code} in {time.perf_counter() - began:.0f} s", flush=True)


def show(folder: Path) -> None:
    """Print a line per case, in the order measured."""
    for line in (folder / "results.jsonl").read_text().splitlines() if (folder / "results.jsonl").is_file() else []:
        row = json.loads(line)
        skipped = {"group", "case", "settings", *versions()}
        values = {
            key: f"{value:.4g}" if isinstance(value, float) else value
            for key, value in row.items()
            if key not in skipped
        }
        print(f"{row['group']}/{row['case']} ({row['gpu']}, vllm {row['vllm']}): {values}")


if __name__ == "__main__":
    main()
