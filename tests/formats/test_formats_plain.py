"""What is written for a CPU without 4-bit kernels is what the codes stand for, to the bit, and an ordinary checkpoint."""

import torch

from qrl import checkpoint, quantize
from qrl.formats import plain, stored


def test_a_plain_copy_computes_what_evaluation_computes(tiny_checkpoint, tmp_path):
    from qrl.engine import hf

    made = quantize.run(
        "gptq", tiny_checkpoint, tmp_path / "gptq", calibration=["Tom has 3 apples and buys 4 more."] * 8
    ).path
    copied = plain.write(made, tmp_path / "plain")
    found = checkpoint.check(copied)
    assert (found.quantization, found.dtype) == (None, "float32")
    tensors = dict(checkpoint.tensors(copied))
    names = stored.names(made)
    assert names and all(torch.equal(tensors[name], matrix.values) for name, matrix in stored.matrices(made, names))
    ids = torch.arange(3, 40)[None]
    with torch.inference_mode():
        ours, theirs = (hf.load(path, "cpu", torch.float32)[0](ids).logits for path in (copied, made))
    assert torch.allclose(ours, theirs, atol=1e-3)
    assert not plain.needed(copied) and not plain.needed(tiny_checkpoint)
