"""Time vLLM's start and its speed by how much it compiles, each in a fresh process.

    python tests/benchmarks/engine_start.py MODEL --rounds 2 --out start.json    # in vLLM's environment, on a GPU

`compiled` is vLLM's default, `graphs` is what compile=false asks for: CUDA graphs without torch.compile, and `eager` is
neither. The first round of `compiled` fills vLLM's cache of compiled code. The answers' tokens are compared with those
of `compiled`.
"""

import argparse
import json
import os
import subprocess
import sys
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[2]))

KINDS = ("compiled", "graphs", "eager")


def measure(model: str, kind: str, sequences: int, tokens: int) -> dict:
    """Return seconds of import, start and two rounds of answers, and the answers of the second."""
    began = time.monotonic()
    import vllm

    from qrl.engine.vllm import graphs_alone
    from qrl.engine.vllm_support import memory_options

    imported = time.monotonic()
    options = {"compiled": {}, "graphs": graphs_alone(sequences), "eager": {"enforce_eager": True}}[kind]
    engine = vllm.LLM(
        model, dtype="bfloat16", max_model_len=512, max_num_seqs=sequences, **memory_options(0.5, 2), **options
    )
    started = time.monotonic()
    sampling = vllm.SamplingParams(temperature=0, max_tokens=tokens, min_tokens=tokens, ignore_eos=True)
    prompts = [{"prompt_token_ids": [3 + (7 * row + place) % 250 for place in range(40)]} for row in range(sequences)]
    seconds = []
    for _ in range(2):
        asked = time.monotonic()
        outputs = engine.generate(prompts, sampling, use_tqdm=False)
        seconds.append(time.monotonic() - asked)
    return {
        "kind": kind, "import_s": imported - began, "start_s": started - imported, "first_s": seconds[0],
        "tokens_per_s": sequences * tokens / seconds[1], "ids": [list(each.outputs[0].token_ids) for each in outputs],
    }  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("model")
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--kinds", default=",".join(KINDS))
    parser.add_argument("--sequences", type=int, default=256)
    parser.add_argument("--tokens", type=int, default=128)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--one", choices=KINDS, help="measure one in this process")
    given = parser.parse_args()
    if given.one:
        given.out.write_text(json.dumps(measure(given.model, given.one, given.sequences, given.tokens)))
        os._exit(0)  # the engine's own end is not what is measured
    results: list[dict] = []
    for _ in range(given.rounds):
        for kind in given.kinds.split(","):
            part = given.out.with_suffix(".one")
            words = [sys.executable, __file__, given.model, "--one", kind, "--out", str(part)]
            words += ["--sequences", str(given.sequences), "--tokens", str(given.tokens)]
            began = time.monotonic()
            with open(given.out.with_suffix(f".{len(results)}.log"), "w") as log:
                code = subprocess.run(words, stdout=log, stderr=log, check=False).returncode
            if code:
                print(f"{kind}: exit code {code}", flush=True)
                continue
            one = json.loads(part.read_text()) | {"process_s": time.monotonic() - began}
            reference = next((each["ids"] for each in results if each["kind"] == "compiled"), one["ids"])
            one["same_answers"] = sum(a == b for a, b in zip(one["ids"], reference, strict=True))
            results.append(one)
            print(
                {key: round(v, 1) if isinstance(v, float) else v for key, v in one.items() if key != "ids"}, flush=True
            )
    given.out.write_text(json.dumps([{k: v for k, v in each.items() if k != "ids"} for each in results], indent=1))


if __name__ == "__main__":
    main()
