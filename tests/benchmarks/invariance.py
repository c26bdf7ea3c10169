"""Whether answers in vLLM's deterministic mode depend on the batch, and whether the 8-bit product is the reason.

    python tests/benchmarks/invariance.py answers MODEL --sequences 64 --out FILE.json    # --eager: without compilation
    python tests/benchmarks/invariance.py rows                                           # on a GPU

answers: one engine answers the built-in model's held-out questions greedily: all at once, again, in reverse, in parts
of 32 and 200, some alone. It prints how many answers differ from the first time. MODEL is a folder from `quantize`.

rows: vLLM's `scaled_int8_quant` and `cutlass_scaled_mm` compute a row among few rows and among all, over shapes with
and without bias. It prints how many values differ. Both cases need vLLM's environment.
"""

import argparse
import json
import sys
from functools import partial
from pathlib import Path

ROOT = Path(__file__).parents[2]
sys.path.insert(0, str(ROOT))

# Inputs and outputs of linears: qrl-tiny, then Qwen2.5-1.5B.
SHAPES = ((256, 256), (256, 512), (256, 1024), (512, 256), (1536, 2048), (1536, 8960), (8960, 1536))
ROWS = (
    1, 2, 4, 8, 15, 16, 17, 24, 31, 32, 33, 48, 63, 64, 65, 96, 127, 128, 129, 160, 192, 255, 256, 257, 384, 512, 1000,
    2048, 4097, 8192, 9000,
)  # fmt: skip
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
    share = {"memory": 0.1, "cache_gib": 1}
    sizes = {"max_tokens": 256, "sequences": args.sequences, **share}
    with Vllm(args.model, args.device, "auto", deterministic=True, seed=0, **sizes) as engine:
        prompts = [prompt.render(engine.tokens, question.question, settings.prompt) for question in questions]

        def ask(batch: list) -> list[str]:
            completions = engine.generate(batch, max_new_tokens=settings.evaluate.max_new_tokens)
            return [completion.raw for completion in completions]

        def in_parts(size: int) -> list[str]:
            return [text for start in range(0, len(prompts), size) for text in ask(prompts[start : start + size])]

        texts = {
            "first": ask(prompts),
            "again": ask(prompts),
            "in reverse": ask(prompts[::-1])[::-1],
            "in parts of 32": in_parts(32),
            "in parts of 200": in_parts(200),
        }
        texts["alone"] = [text for ids in prompts[:ALONE] for text in ask([ids])]
    for how, answered in texts.items():
        differ = sum(a != b for a, b in zip(answered, texts["first"], strict=False))
        print(f"{how}: {differ} of {len(answered)} differ", flush=True)
    if args.out:
        args.out.write_text(json.dumps(texts, indent=1))


def rows(_args: argparse.Namespace) -> None:
    import torch
    from vllm import _custom_ops as ops

    if not torch.cuda.is_available():
        sys.exit("rows needs vLLM's CUDA kernels: run it on a machine with a GPU.")
    torch.manual_seed(0)
    for dtype in (torch.bfloat16, torch.float16):
        for width, out in SHAPES:
            inputs = torch.randn(max(ROWS), width, device="cuda", dtype=dtype)
            weights = torch.randn(out, width, device="cuda")
            scales = weights.abs().amax(1, keepdim=True) / 127
            codes = (weights / scales).round().clamp(-128, 127).to(torch.int8)
            whole = ops.scaled_int8_quant(inputs)[:2]
            for bias in (None, torch.randn(out, device="cuda", dtype=dtype)):
                product = partial(_product, ops, codes, scales, bias, dtype)
                among_all, differ = product(*whole), 0
                for n in ROWS:
                    part = ops.scaled_int8_quant(inputs[:n].contiguous())[:2]
                    pairs = ((part[0], whole[0][:n]), (part[1], whole[1][:n]), (product(*part), among_all[:n]))
                    differ += sum(int((few != among).sum()) for few, among in pairs)
                with_bias = "with" if bias is not None else "without"
                case = f"{dtype}, {width} to {out}, {with_bias} bias"
                print(f"{case}: {differ} values differ over {len(ROWS)} counts of rows", flush=True)


def _product(ops, codes, scales, bias, dtype, inputs, input_scales):
    return ops.cutlass_scaled_mm(inputs, codes.t(), input_scales, scales, dtype, bias)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    cases = parser.add_subparsers(required=True)
    options = cases.add_parser("answers")
    options.add_argument("model", type=Path)
    options.add_argument("--sequences", type=int, default=256)
    options.add_argument("--questions", type=int, default=1000)
    options.add_argument("--device", default="cuda", choices=("cuda", "cpu"))
    options.add_argument("--eager", action="store_true")
    options.add_argument("--out", type=Path)
    options.set_defaults(run=answers)
    cases.add_parser("rows").set_defaults(run=rows)
    args = parser.parse_args()
    args.run(args)


if __name__ == "__main__":
    main()
