"""Start-up probe: does arithmetic on this machine have the properties on which bitwise equality rests?

The properties belong to the processor, the libraries and the number of threads, not to tinyllm. Where one fails,
training stays correct (old log-probabilities are the trainer's own, and the gap is reported), but a completion's last
bits may depend on what else is in the batch.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
import torch.nn.functional as F

from tinyllm.engine.sampling import normalize

_ROWS = (4, 8, 12, 20, 36, 64, 100, 132, 260, 516)
_REMEDY = "nothing to do for correct training; for equal bits use another CPU or library build"


def probe(dtype: torch.dtype = torch.float32, device: str = "cpu") -> dict[str, tuple[bool, str, str]]:
    """name -> (whether the property holds, what was tried, remedy where it does not)."""
    generator = torch.Generator().manual_seed(0)

    def random(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=generator).to(device, dtype)

    weight, rows = random(384, 192), random(max(_ROWS), 192)
    left, right = random(12, 96, 64).float(), random(12, 192, 64).float()
    logits = random(64, 49152).float()
    results = {
        "linear_rows": (_rows(lambda n: F.linear(rows[:n], weight), _ROWS), f"linear, {len(_ROWS)} row counts"),
        "attention_rows": (_rows(lambda n: _attend(left[:, :n], right), (4, 8, 16, 32, 96), 1), "scores and values"),
        "attention_batch": (_rows(lambda n: _attend(left[:n], right[:n]), (1, 3, 6, 12)), "scores and values"),
        "trailing_zeros": (_trailing(left, right), "masked keys behind the last visible one"),
        "softmax_rows": (_rows(lambda n: normalize(logits[:n])[0], (1, 2, 4, 8, 60, 64)), "log-sum-exp of logits"),
        "activation_rows": (_rows(lambda n: F.silu(rows[:n]), _ROWS), "SiLU"),
    }
    if device == "cpu":
        results["threads"] = (_threads(lambda: F.linear(rows, weight)), "one thread and two")
    return {name: (holds, detail, "" if holds else _REMEDY) for name, (holds, detail) in results.items()}


def _attend(q: torch.Tensor, k: torch.Tensor) -> torch.Tensor:
    return torch.bmm(torch.bmm(q, k.transpose(1, 2)).exp()[..., :64], k[:, :64])


def _rows(compute: Callable[[int], torch.Tensor], counts: Sequence[int], dim: int = 0) -> bool:
    """Whether the first rows come out the same, however many rows are computed together."""
    whole = compute(max(counts))
    return all(torch.equal(compute(n), whole.narrow(dim, 0, n)) for n in counts)


def _trailing(q: torch.Tensor, k: torch.Tensor) -> bool:
    """Whether keys of weight 0 change nothing, whatever stands there."""
    p = torch.bmm(q, k[:, :64].transpose(1, 2)).exp()
    p[..., 40:] = 0
    other = k.clone()
    other[:, 40:64] = 7.0
    return torch.equal(torch.bmm(p, k[:, :64]), torch.bmm(p, other[:, :64]))


def _threads(compute: Callable[[], torch.Tensor]) -> bool:
    """Whether one thread and two give the same bits."""
    before = torch.get_num_threads()
    try:
        results = []
        for threads in (1, 2):
            torch.set_num_threads(threads)
            results.append(compute())
        return torch.equal(*results)
    finally:
        torch.set_num_threads(before)
