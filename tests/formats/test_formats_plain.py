"""The plain copy for a CPU without 4-bit kernels holds the exact values of the codes, as an ordinary checkpoint."""

import pytest
import torch

from qrl import checkpoint, quantize
from qrl.formats import plain, stored


@pytest.mark.process
def test_a_plain_copy_computes_what_evaluation_computes(tiny_checkpoint, tmp_path):
    from qrl.engine import hf

    texts = ["Tom has 3 apples and buys 4 more."] * 8
    quantized = quantize.run("gptq", tiny_checkpoint, tmp_path / "gptq", calibration=texts).path
    copied = plain.write(quantized, tmp_path / "plain")
    checked = checkpoint.check(copied)
    assert (checked.quantization, checked.dtype) == (None, "float32")
    tensors = dict(checkpoint.tensors(copied))
    names = stored.names(quantized)
    matrices = stored.matrices(quantized, names)
    assert names and all(torch.equal(tensors[name], matrix.values) for name, matrix in matrices)
    ids = torch.arange(3, 40)[None]
    with torch.inference_mode():
        ours, theirs = (hf.load(path, "cpu", torch.float32)[0](ids).logits for path in (copied, quantized))
    assert torch.allclose(ours, theirs, atol=1e-3)
    assert not plain.needed(copied) and not plain.needed(tiny_checkpoint)
