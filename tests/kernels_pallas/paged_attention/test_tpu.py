"""The TPU kernel without a TPU: interpreted, and in the interpreter that models its memories, copies and semaphores."""

from collections.abc import Iterator
from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax._src.pallas.mosaic.interpret import interpret_pallas_call as interpreter
from jax.experimental.pallas import tpu as pltpu

from kernels_pallas.paged_attention import init_kv_pool
from tests.kernels_pallas.paged_attention.cases import Case, make_problem
from tests.kernels_pallas.paged_attention.suite import PagedAttentionSuite, check

# Tiles without tokens first, between and last; one token; block edges; several turns of two buffers; a shared table.
RAGGED = ((5, 0), (15, 1), (0, 1), (16, 1), (40, 0), (300, 1), (1023, 1), (640, 1), (0, 0))
CASES = {
    "decode": Case(RAGGED, 1, 16, 2, 3, 128, "float32"),
    "decode, bf16, head_dim 64": Case(RAGGED, 1, 16, 3, 4, 64, "bfloat16", has_sinks=True),
    "decode, window": Case(RAGGED, 1, 16, 1, 2, 64, "float32", sliding_window=50, logits_soft_cap=30.0),
    "prefill, head_dim 96": Case(((0, 8), (8, 3), (500, 8), (0, 0), (250, 5)), 8, 32, 2, 2, 96, "float32"),
    "prefill, window, shared": Case(((200, 8), (208, 8), (216, 2)), 8, 16, 1, 4, 256, "bfloat16", 33, shared=True),
}


class TestTPU(PagedAttentionSuite):
    implementation = "tpu_interpret"


@pytest.fixture
def turns_of_128_positions(monkeypatch: pytest.MonkeyPatch) -> None:
    """So that contexts of a thousand positions take many turns."""
    monkeypatch.setattr("kernels_pallas.paged_attention.tpu.plan._LATENCY_SECONDS", 1e-9)


@pytest.fixture
def copied_blocks(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[int]]:
    """The pool's blocks in the order in which the kernel starts their copies."""
    blocks: list[int] = []
    start = interpreter.dma_start

    def record(*args, **kwargs):
        source = args[5]
        blocks.append(int(jax.tree.leaves(source)[0]))
        return start(*args, **kwargs)

    monkeypatch.setattr(interpreter, "dma_start", record)
    yield blocks


@pytest.mark.usefixtures("turns_of_128_positions")
@pytest.mark.parametrize("cores", [1, 2])
@pytest.mark.parametrize("name", CASES)
def test_no_race_no_stray_read_and_each_block_once(
    name: str, cores: int, copied_blocks: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Blocks that a tile does not see have a number past the pool, at which the interpreter raises."""
    problem = make_problem(CASES[name], "tpu_interpret", unread_block=10**6)
    problem = problem.with_implementation("tpu")
    monkeypatch.setattr("kernels_pallas.paged_attention.tpu.attend.num_cores", lambda: cores)
    params = pltpu.InterpretParams(detect_races=True, num_cores_or_threads=cores, random_seed=0)
    with pltpu.force_tpu_interpret_mode(params):
        check(problem)
    assert not interpreter.races.races_found
    assert sorted(copied_blocks) == sorted(problem.block_tables[problem.block_tables < 10**6].tolist())


def test_it_does_not_run_without_a_tpu() -> None:
    problem = make_problem(CASES["decode"], "tpu_interpret").with_implementation("tpu")
    with pytest.raises(ValueError, match="interpret mode"):
        problem.attend()


@pytest.mark.parametrize(
    ("block_size", "num_kv_heads", "head_dim", "dtype", "message"),
    [
        (16, 2, 80, "float32", "head_dim 80 .*64, 96, 128, 256"),
        (12, 2, 64, "float32", "block_size 12 .*multiples of 8"),
        (24, 2, 64, "bfloat16", "block_size 24 .*multiples of 16"),
        (16, 3, 96, "float32", "3 KV heads of 96 .*multiples of 2"),
        (256, 32, 128, "float32", "block_size 256 of 32 KV heads of 128, 8 MiB a block .*up to 4"),
        (16, 2, 64, "int8", "dtype int8 .*bfloat16, float32"),
        (16, 2, 64, "float16", "dtype float16 .*bfloat16, float32"),
    ],
)
def test_shapes_that_it_does_not_take(
    block_size: int, num_kv_heads: int, head_dim: int, dtype: str, message: str
) -> None:
    with pytest.raises(NotImplementedError, match=message):
        init_kv_pool(4, block_size, num_kv_heads, head_dim, np.dtype(jnp.dtype(dtype)), "tpu")


def test_tiles_that_do_not_fit_its_memory() -> None:
    problem = make_problem(Case(((0, 1),), 129, 16, 8, 4, 128, "bfloat16"), "tpu_interpret")
    with pytest.raises(NotImplementedError, match="up to 128 tokens of 32 heads of 128, not 129"):
        problem.attend()


def test_queries_that_it_does_not_take() -> None:
    problem = make_problem(CASES["decode"], "tpu_interpret")
    with pytest.raises(NotImplementedError, match=r"queries of float16 .*bfloat16, float32"):
        replace(problem, q=problem.q.astype(jnp.float16)).attend()
