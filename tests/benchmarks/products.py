"""Time the matrix products of Qwen3-8B's linears on a GPU, in bf16 and FP8, by batch size and kernel.

    python tests/benchmarks/products.py

Prints the milliseconds of all 144 products of a decoding step: the least of three runs of a CUDA graph, over the
weights of many layers in turn, so that no cache helps. `cutlass` is vLLM's kernel for FP8; `torch_*` are cuBLAS's,
through torch._scaled_mm, with one scale per tensor or per row. Quantizing the activations is not counted.
"""

import functools
import json

import torch
from vllm import _custom_ops as ops

SHAPES = {"qkv": (4096, 6144), "o": (4096, 4096), "gate_up": (4096, 24576), "down": (12288, 4096)}  # in, out
LAYERS, CALLS = 36, 30
FOOTPRINT = 1.2e9  # weights of a shape that are gone through in turn


def milliseconds(product, weights: list) -> float:
    """Return the milliseconds of one call, with the weights in turn."""
    turn = 0

    def call():
        nonlocal turn
        turn = (turn + 1) % len(weights)
        product(weights[turn])

    for _ in range(5):
        call()
    graph, best = torch.cuda.CUDAGraph(), float("inf")
    with torch.cuda.graph(graph):
        for _ in range(CALLS):
            call()
    torch.cuda.synchronize()
    for _ in range(3):
        began, ended = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        began.record()
        graph.replay()
        ended.record()
        torch.cuda.synchronize()
        best = min(best, began.elapsed_time(ended) / CALLS)
    return best


def layer(batch: int) -> dict[str, float]:
    """Return the milliseconds of all layers' products, by kernel."""
    found: dict[str, float] = {}
    one = torch.ones(1, device="cuda")
    for inner, outer in SHAPES.values():
        x = torch.randn(batch, inner, device="cuda", dtype=torch.bfloat16)
        weights = [
            torch.randn(outer, inner, device="cuda", dtype=torch.bfloat16) * 0.02
            for _ in range(max(2, int(FOOTPRINT // (inner * outer))))
        ]
        took = {"bf16": milliseconds(lambda weight, x=x: torch.nn.functional.linear(x, weight), weights)}
        weights = [weight.to(torch.float8_e4m3fn).t() for weight in weights]
        rounded, scales = ops.scaled_fp8_quant(x, None, use_per_token_if_dynamic=True)
        rows = torch.ones(1, outer, device="cuda")
        cutlass = functools.partial(
            ops.cutlass_scaled_mm, rounded, out_dtype=torch.bfloat16, scale_a=scales, scale_b=one
        )
        cublas = functools.partial(torch._scaled_mm, rounded, out_dtype=torch.bfloat16, use_fast_accum=True)
        ways = {
            "cutlass": cutlass,
            "torch_tensor": functools.partial(cublas, scale_a=one, scale_b=one),
            "torch_row": functools.partial(cublas, scale_a=scales, scale_b=rows),
        }
        took |= {way: milliseconds(product, weights) for way, product in ways.items()}
        found = {way: found.get(way, 0.0) + LAYERS * ms for way, ms in took.items()}
    return found


if __name__ == "__main__":
    for batch in (8, 16, 24, 32, 40, 48, 56, 64, 96, 128, 192, 256, 512):
        print(json.dumps({"batch": batch} | {way: round(ms, 3) for way, ms in layer(batch).items()}), flush=True)
