"""Whether an answer of vLLM's deterministic mode depends on what is asked beside it, and whether the 8-bit product is why.

    python tests/benchmarks/invariance.py answers MODEL --sequences 64 --out FILE.json    # add --eager: nothing compiled
    python tests/benchmarks/invariance.py rows                                           # on a GPU

answers: the built-in model's held-out questions, greedy, of one engine: whole, again, in reverse, in parts of 32 and 200, some
alone; how many differ from the first time. MODEL is a checkpoint folder that `quantize` stored. rows: vLLM's `scaled_int8_quant`
and `cutlass_scaled_mm`, a row among few others against the same row among all, over shapes with and without bias: how many values
differ. Both in vLLM's environment.
"""

import argparse
import json
import sys
from functools import partial
from pathlib import Path

ROOT = Path(__file__).parents[2]
sys.path.insert(0, str(ROOT))

# Inputs and outputs of the linears of qrl-tiny, then of Qwen2.5-1.5B.
SHAPES = ((256, 256), (256, 512), (256, 1024), (512, 256), (1536, 2048), (1536, 8960), (8960, 1536))
ROWS = (
    1,
    2,
    4,
    8,
    15,
    16,
    17,
    24,
    31,
    32,
    33,
    48,
    63,
    64,
    65,
    96,
    127,
    128,
    129,
    160,
    192,
    255,
    256,
    257,
    384,
    512,
    1000,
    2048,
    4097,
    8192,
    9000,
)
ALONE = 100  # questions


def answers(args: argparse.Namespace) -> None:
    import vllm

    from qrl import recipe, tasks
    from qrl.engine.vllm import Vllm
    from qrl.tasks import prompt

    if args.eager:
        vllm.LLM = partial(vllm.LLM, enforce_eager=True)
    settings = recipe.load("tiny")
    questions = tasks.load("arithmetic", "heldout", args.questions, 0)
    with Vllm(
        args.model,
        args.device,
        "auto",
        max_tokens=256,
        sequences=args.sequences,
        deterministic=True,
        seed=0,
        memory=0.1,
        cache_bytes=1 << 30,
    ) as engine:
        prompts = [prompt.render(engine.tokens, each.question, settings.prompt) for each in questions]

        def ask(given: list) -> list[str]:
            return [each.raw for each in engine.generate(given, max_new_tokens=settings.evaluate.max_new_tokens)]

        def in_parts(size: int) -> list[str]:
            return [text for start in range(0, len(prompts), size) for text in ask(prompts[start : start + size])]

        found = {
            "first": ask(prompts),
            "again": ask(prompts),
            "in reverse": ask(prompts[::-1])[::-1],
            "in parts of 32": in_parts(32),
            "in parts of 200": in_parts(200),
        }
        found["alone"] = [text for each in prompts[:ALONE] for text in ask([each])]
    for how, texts in found.items():
        print(
            f"{how}: {sum(a != b for a, b in zip(texts, found['first'], strict=False))} of {len(texts)} differ",
            flush=True,
        )
    if args.out:
        args.out.write_text(json.dumps(found, indent=1))


def rows(_args: argparse.Namespace) -> None:
    import torch
    from vllm import _custom_ops as ops

    if not torch.cuda.is_available():
        sys.exit("rows asks vLLM's CUDA kernels: run it where there is a GPU.")
    torch.manual_seed(0)
    for dtype in (torch.bfloat16, torch.float16):
        for width, out in SHAPES:
            inputs, weights = (
                torch.randn(max(ROWS), width, device="cuda", dtype=dtype),
                torch.randn(out, width, device="cuda"),
            )
            scales = weights.abs().amax(1, keepdim=True) / 127
            codes = (weights / scales).round().clamp(-128, 127).to(torch.int8)
            whole = ops.scaled_int8_quant(inputs)[:2]
            for bias in (None, torch.randn(out, device="cuda", dtype=dtype)):
                product = partial(_product, ops, codes, scales, bias, dtype)
                among_all, differ = product(*whole), 0
                for n in ROWS:
                    part = ops.scaled_int8_quant(inputs[:n].contiguous())[:2]
                    pairs = ((part[0], whole[0][:n]), (part[1], whole[1][:n]), (product(*part), among_all[:n]))
                    differ += sum(int((one != other).sum()) for one, other in pairs)
                print(
                    f"{dtype}, {width} to {out}, {'with' if bias is not None else 'without'} bias: {differ} values differ over {len(ROWS)} counts of rows",
                    flush=True,
                )


def _product(ops, codes, scales, bias, dtype, inputs, input_scales):
    return ops.cutlass_scaled_mm(inputs, codes.t(), input_scales, scales, dtype, bias)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    cases = parser.add_subparsers(required=True)
    asked = cases.add_parser("answers")
    asked.add_argument("model", type=Path)
    asked.add_argument("--sequences", type=int, default=256)
    asked.add_argument("--questions", type=int, default=1000)
    asked.add_argument("--device", default="cuda", choices=("cuda", "cpu"))
    asked.add_argument("--eager", action="store_true")
    asked.add_argument("--out", type=Path)
    asked.set_defaults(run=answers)
    cases.add_parser("rows").set_defaults(run=rows)
    args = parser.parse_args()
    args.run(args)


if __name__ == "__main__":
    main()
