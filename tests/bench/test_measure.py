"""The arithmetic behind the figures, on times that are known."""

from types import SimpleNamespace
from typing import Any, cast

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxpaged.bench.compiles import CompileCounter
from jaxpaged.bench.floors import Floors, _chain, split_products
from jaxpaged.bench.measure import Served, Times
from jaxpaged.bench.probe import Run, RunClock


def served(*runs: tuple[float, float], seconds: float, slept: float = 0.0) -> Served:
    return Served(seconds, slept, 0.0, [], [Run(start, end, cast(Any, None)) for start, end in runs])


def test_idle_is_the_time_without_a_run() -> None:
    one = served((1.0, 3.0), (3.5, 6.0), (6.0, 7.0), seconds=9.0)
    assert one.idle_seconds == 3.5
    assert one.idle_between_runs == 0.5


def test_idle_is_not_the_time_without_a_request() -> None:
    one = served((0.0, 3.0), (5.0, 6.0), seconds=6.0, slept=1.5)
    assert one.idle_seconds == one.idle_between_runs == 0.5


def test_times_of_a_request() -> None:
    times = Times(due=1.0, first_token=3.0, done=9.0, tokens=4)
    assert (times.to_first_token, times.per_output_token) == (2.0, 2.0)
    assert Times(due=1.0, first_token=3.0, done=3.0, tokens=1).per_output_token is None


def test_a_run_begins_when_the_one_before_it_ends() -> None:
    """Handed over early, it waits for the device."""
    busy = jax.jit(lambda x: jax.lax.fori_loop(0, 20, lambda _, y: y @ x, x))
    x = jnp.eye(400)
    jax.block_until_ready(busy(x))
    clock = RunClock(lambda: (None, SimpleNamespace(num_steps=busy(x))))
    for _ in range(3):
        clock()
    runs = clock.close()
    assert [run.start for run in runs[1:]] == [run.end for run in runs[:-1]]
    assert all(run.seconds > 0 for run in runs)


def test_compiles_are_counted_while_they_should_be() -> None:
    compiled = jax.jit(lambda x: x + 1)
    with CompileCounter() as counter:
        compiled(np.float32(1))
        compiled(np.float32(2))
        assert counter.so_far.programs == 1
        assert counter.so_far.seconds > 0
    jax.jit(lambda x: x + 2)(np.float32(1))
    assert counter.so_far.programs == 1


def params(tied: bool) -> dict[tuple[Any, ...], jax.Array]:
    hidden, kv, wide, vocab = 16, 4, 24, 40
    shapes = {"query": (hidden, hidden), "key": (hidden, kv), "value": (hidden, kv), "output": (hidden, hidden)}
    shapes |= {"gate": (hidden, wide), "up": (hidden, wide), "down": (wide, hidden)}
    found = {("layers", i, name, "kernel"): jnp.ones(shape) for i in range(2) for name, shape in shapes.items()}
    found |= {("norm", "scale"): jnp.ones(hidden), ("embedding", "table"): jnp.ones((vocab, hidden))}
    return found if tied else found | {("head", "kernel"): jnp.ones((hidden, vocab))}


@pytest.mark.parametrize("tied", [True, False])
def test_the_floor_has_every_product_and_hardly_more(tied: bool) -> None:
    """The compiler leaves none out: as many operations as the products have."""
    layers, head = split_products(params(tied), vocab_size=40)
    assert len(layers) == 14
    assert (head.inner, head.outer) == (16, 40)
    products, rows = [*layers, head], 8
    values = {width: jnp.ones((rows, width)) for width in (4, 16, 24, 40)}
    matrices, contracts = [product.weight for product in products], tuple(product.contracts for product in products)
    compiled = _chain.lower(values, matrices, contracts).compile()
    needed = 2 * rows * sum(matrix.size for matrix in matrices)
    assert needed <= compiled.cost_analysis()["flops"] <= 1.1 * needed


def test_a_parameter_of_an_unknown_form_is_refused() -> None:
    with pytest.raises(ValueError, match=r"the products of experts.kernel, \(4, 8, 8\), are not known"):
        split_products({("experts", "kernel"): jnp.ones((4, 8, 8))}, vocab_size=40)


def test_floors_between_the_rows_that_were_measured() -> None:
    floors = Floors(
        weight_bytes=100,
        bandwidth_bytes=1000,
        layers={1: 9.0, 2: 2.0, 4: 4.0},
        head={1: 1.0, 4: 4.0},
        read={"slow": 4.0, "fast": 2.0},
        read_write={"only": 5.0},
    )
    # One row takes no longer than two: it could be padded. A step without a sample has no logits.
    assert floors.step_seconds(np.array([1, 2, 3, 4]), np.array([0, 1, 2, 4])).tolist() == [2.0, 3.0, 5.0, 8.0]
    assert floors.read_bytes_per_second == 500
    assert floors.read_write_bytes_per_second == 400
    assert floors.weights_seconds == 0.2
