"""What this machine could do at most, measured in the process and minutes of the workload: a share of it is a ratio
that means something on a noisy machine, too.

- Bandwidth: bytes that a large array is read with, and that it is read and written with, a second; of several ways the
  fastest. At batch 1 a decode step can be no faster than reading the weights.
- Matrix products: the time of all products of one step with the engine's own weights, of the layers (at the step's
  rows) and of the head (at the rows that sample), and of nothing else: no norm, no attention, no scheduler. Measured at
  some numbers of rows, and linear in between.
"""

import os
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import cache, partial
from statistics import median
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int

from jaxpaged.bench.probe import weights
from jaxpaged.engine.config import EngineConfig
from jaxpaged.engine.engine import Engine

_FEWEST_CALLS, _MOST_CALLS, _POINT_SECONDS = 2, 50, 0.1
_BANDWIDTH_BYTES = 2**28  # past any cache

Counts = int | Int[np.ndarray, "..."]


@dataclass(frozen=True)
class Floors:
    """Seconds: of the layers' and the head's products by rows, and of each way to read, or to read and write,
    `bandwidth_bytes`."""

    weight_bytes: int
    bandwidth_bytes: int
    layers: dict[int, float]
    head: dict[int, float]
    read: dict[str, float]
    read_write: dict[str, float]

    @property
    def read_bytes_per_second(self) -> float:
        return self.bandwidth_bytes / min(self.read.values())

    @property
    def read_write_bytes_per_second(self) -> float:
        """Bytes read and bytes written, together."""
        return 2 * self.bandwidth_bytes / min(self.read_write.values())

    @property
    def weights_seconds(self) -> float:
        """To read what the products of a step read of the weights, once."""
        return self.weight_bytes / self.read_bytes_per_second

    def step_seconds(self, rows: Counts, sampled: Counts) -> Float[np.ndarray, "..."]:
        """The products of steps with `rows` rows, `sampled` of which have logits."""
        return _at(self.layers, rows) + np.where(np.asarray(sampled) > 0, _at(self.head, sampled), 0.0)


def _at(seconds: Mapping[int, float], rows: Counts) -> Float[np.ndarray, "..."]:
    """Where more rows take less time, as two of bfloat16 do on some CPUs, it is theirs: a step can be padded."""
    known = sorted(seconds)
    least = np.minimum.accumulate([seconds[each] for each in reversed(known)])[::-1]
    return np.interp(np.asarray(rows), known, least)


def middle_of(passes: Sequence[Floors]) -> Floors:
    """The median of each time."""

    def middle[K](each: Sequence[dict[K, float]]) -> dict[K, float]:
        return {key: median(one[key] for one in each) for key in each[0]}

    return Floors(
        passes[0].weight_bytes,
        passes[0].bandwidth_bytes,
        layers=middle([floors.layers for floors in passes]),
        head=middle([floors.head for floors in passes]),
        read=middle([floors.read for floors in passes]),
        read_write=middle([floors.read_write for floors in passes]),
    )


@dataclass(frozen=True)
class Product:
    """x @ weight, or x @ weight.T where the weight's second axis is the one that is summed over."""

    weight: Float[Array, "m n"]
    contracts: int

    @property
    def inner(self) -> int:
        return self.weight.shape[self.contracts]

    @property
    def outer(self) -> int:
        return self.weight.shape[1 - self.contracts]


class FloorBench:
    """Measures the floors of one engine."""

    def __init__(self, engine: Engine, bandwidth_bytes: int = _BANDWIDTH_BYTES) -> None:
        self._layers, self._head = split_products(weights(engine), engine.model_config.vocab_size)
        self._rows, self._sampled = row_grids(engine.config)
        self._bandwidth_bytes = bandwidth_bytes
        self._is_compiled = False

    def measure(self) -> Floors:
        shape = (self._bandwidth_bytes // 4 // 1024, 1024)
        found = Floors(
            sum(product.weight.nbytes for product in [*self._layers, self._head]),
            self._bandwidth_bytes,
            # First, since JAX lets go of what a call took only with the next call: no large array outlives a pass.
            read={name: self._time(way) for name, way in read_ways(jnp.ones(shape, jnp.float32)).items()},
            read_write={name: self._time(way) for name, way in read_write_ways(jnp.ones(shape, jnp.float32)).items()},
            layers={rows: self._time(_products(self._layers, rows)) for rows in self._rows},
            head={rows: self._time(_products([self._head], rows)) for rows in self._sampled},
        )
        self._is_compiled = True
        return found

    def _time(self, call: Callable[[], Any]) -> float:
        if not self._is_compiled:
            jax.block_until_ready(call())
        return seconds_of(call)


def split_products(params: Mapping[tuple[Any, ...], jax.Array], vocab_size: int) -> tuple[list[Product], Product]:
    """What a step multiplies with: the matrices of the layers, in order, and the head's.

    Raises ValueError for a parameter of a form whose products are not known here.
    """
    for path, leaf in params.items():
        if leaf.ndim > 2 or (leaf.ndim == 2 and path[-1] not in ("kernel", "table")):
            raise ValueError(f"floors: the products of {'.'.join(map(str, path))}, {leaf.shape}, are not known")
    kernels = [leaf for path, leaf in params.items() if path[-1] == "kernel"]
    heads = [Product(kernel, 0) for kernel in kernels if kernel.shape[1] == vocab_size]
    # Without a head of its own the embedding's table [vocab, hidden] is one.
    heads += [Product(leaf, 1) for path, leaf in params.items() if path[-1] == "table"]
    return [Product(kernel, 0) for kernel in kernels if kernel.shape[1] != vocab_size], heads[0]


def row_grids(config: EngineConfig) -> tuple[list[int], list[int]]:
    """Numbers of rows to measure at: powers of two, full decodes and full steps; and the same for rows that sample."""
    most_rows, most_sampled = config.buckets[-1].rows, min(config.max_num_seqs, config.max_num_batched_tokens)

    def grid(most: int, *others: int) -> list[int]:
        return sorted({most, *others, *(2**i for i in range(most.bit_length()))})

    return grid(most_rows, min(most_sampled, most_rows)), grid(most_sampled)


def seconds_of(call: Callable[[], Any]) -> float:
    """Of one call, when several come back to back."""
    start = time.perf_counter()
    jax.block_until_ready(call())
    once = time.perf_counter() - start
    calls = int(min(max(_FEWEST_CALLS, _POINT_SECONDS / max(once, 1e-9)), _MOST_CALLS))
    start = time.perf_counter()
    last = None
    for _ in range(calls):
        last = call()
    jax.block_until_ready(last)
    return (time.perf_counter() - start) / calls


def _products(products: Sequence[Product], rows: int) -> Callable[[], Any]:
    """All of them, one after another, for `rows` rows."""
    widths = {width for product in products for width in (product.inner, product.outer)}
    values = {width: jnp.ones((rows, width), products[0].weight.dtype) for width in widths}
    matrices, contracts = [product.weight for product in products], tuple(product.contracts for product in products)
    return partial(_chain, values, matrices, contracts)


@partial(jax.jit, static_argnums=2)
def _chain(
    values: Mapping[int, Float[Array, "rows width"]], weights: Sequence[Float[Array, "m n"]], contracts: tuple[int, ...]
) -> dict[int, Float[Array, "rows width"]]:
    """Each product takes the last result of its width, so that none can be left out or begin early.

    A result that none took is added to the next one of its width, which costs next to nothing.
    """
    last, is_new = dict(values), dict.fromkeys(values, False)
    for product in map(Product, weights, contracts):
        x = last[product.inner].astype(product.weight.dtype)
        precision = jax.lax.Precision.HIGHEST if x.dtype == jnp.float32 else jax.lax.Precision.DEFAULT
        dimensions = (((1,), (product.contracts,)), ((), ()))
        y = jax.lax.dot_general(
            x, product.weight, dimensions, precision=precision, preferred_element_type=jnp.float32
        ).astype(x.dtype)
        is_new[product.inner] = False
        last[product.outer] = y + last[product.outer] if is_new[product.outer] else y
        is_new[product.outer] = True
    return last


@jax.jit
def _max(data: Float[Array, "m n"]) -> Array:
    return jnp.max(data)


@jax.jit
def _row_sums(data: Float[Array, "m n"]) -> Array:
    return jnp.sum(data, axis=1)


@jax.jit
def _vector_product(data: Float[Array, "m n"]) -> Array:
    matrix = data.reshape(512, -1)
    return jnp.ones((1, 512), data.dtype) @ matrix


def read_ways(data: Float[Array, "m n"]) -> dict[str, Callable[[], Any]]:
    """Calls that read all of it and write next to nothing."""
    ways: dict[str, Callable[[], Any]] = {
        "max": partial(_max, data),
        "row sums": partial(_row_sums, data),
        "vector product": partial(_vector_product, data),
    }
    if jax.default_backend() == "cpu":
        # A compiler's reductions can be slower than memory; numpy's, in a thread for each core, were the fastest here.
        parts = np.array_split(np.asarray(data).reshape(-1), os.cpu_count() or 1)
        ways["numpy max"] = lambda: list(_threads().map(np.max, parts))
    return ways


@cache
def _threads() -> ThreadPoolExecutor:
    return ThreadPoolExecutor(os.cpu_count())


_add_one = jax.jit(lambda data: data + 1, donate_argnums=0)


def read_write_ways(data: Float[Array, "m n"]) -> dict[str, Callable[[], Any]]:
    """Calls that write as much as they read: in place, since fresh memory would measure the operating system's."""
    return {"add 1": _Repeated(_add_one, data)}


class _Repeated:
    """Each call works on the result of the one before."""

    def __init__(self, change: Callable[[Array], Array], data: Array) -> None:
        self._change, self._data = change, data

    def __call__(self) -> Array:
        self._data = self._change(self._data)
        return self._data
