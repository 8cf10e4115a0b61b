"""Machine code of graphs: what it returns is right however it is called."""

import subprocess
import sys

import pytest
import torch
from torch import Tensor
from torch.fx.experimental.proxy_tensor import make_fx

from fedminimax.engine import inductor as code
from fedminimax.engine.inductor import Lending, inductor


def moved(x: Tensor, before: Tensor, time: Tensor) -> list[Tensor]:
    """Returns an input in the place of another, an input as it is, views and a tensor twice."""
    new = x - 0.5**time * (x - before).square()
    return [new, x, time, x.expand(3, -1), new[:2], new]


def given() -> list[Tensor]:
    start = torch.linspace(0.0, 1.0, 5, dtype=torch.float64)
    return [start, start.flip(0), torch.tensor(2.0, dtype=torch.float64)]


def made(size: int, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(code, "SMALL", size)
    return inductor(make_fx(moved)(*given()), given())


@pytest.mark.parametrize("size", [0, 1 << 14])
def test_a_call_on_what_the_last_one_returned_gives_what_the_operations_give(size, monkeypatch):
    call = made(size, monkeypatch)
    assert isinstance(call, Lending) == (size > 0)
    expected, found = given(), given()
    for _ in range(4):
        wanted, got = moved(*expected), call(list(found))
        torch.testing.assert_close(got, wanted)
        expected, found = wanted[:3], got[:3]


def test_small_graphs_return_the_memory_of_the_last_call(monkeypatch):
    call = made(1 << 14, monkeypatch)
    first = call(given())
    kept = [v.clone() for v in first]
    call([v + 1 for v in given()])
    assert any(not torch.equal(a, b) for a, b in zip(first, kept, strict=True))


def test_pooling_is_compiled_before_anything_else_was():
    source = (
        "import torch; from fedminimax.engine.inductor import inductor, make_fx\n"
        "pool = lambda x: [torch.nn.functional.max_pool2d(x, 2)]\n"
        "x = torch.rand(1, 1, 4, 4)\n"
        "assert torch.equal(*inductor(make_fx(pool)(x), [x])([x]), *pool(x))"
    )
    subprocess.run([sys.executable, "-c", source], check=True)
