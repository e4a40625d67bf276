"""The GPU kernels' own lines, interpreted on a CPU."""

from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kernels_pallas.paged_attention import KVPool, init_kv_pool, paged_attention, write_kv
from kernels_pallas.paged_attention.gpu.plan import MOST_PARTS, TileSizes, num_parts, part_bounds
from tests.kernels_pallas.paged_attention.cases import Case, draw_case, make_problem
from tests.kernels_pallas.paged_attention.suite import PagedAttentionSuite, check


class TestGPU(PagedAttentionSuite):
    implementation = "gpu_interpret"
    block_sizes = (16, 32, 48, 256)

    @given(data=st.data())
    @settings(max_examples=8, deadline=None)
    def test_contexts_in_several_parts(self, data: st.DataObject) -> None:
        """Contexts, 0 and 1 among them, of up to nine parts of 128 positions, of which the last ones may be empty."""
        case = data.draw(
            draw_case(block_sizes=(16, 64, 256), head_dims=(64, 96), rows=(1, 5), most_positions=1100).filter(
                lambda case: max(first for first, _ in case.tiles) > 128
            )
        )
        check(make_problem(case, self.implementation))

    @pytest.mark.parametrize("rows", [1, 32])
    @pytest.mark.parametrize("sliding_window", [None, 100])
    def test_blocks_that_no_token_sees_are_not_read(self, rows: int, sliding_window: int | None) -> None:
        """NaN stands in the block that the tables name there, and the kernel masks values by the context's end alone,
        so one that it read before the window would show."""
        tiles = ((1000, rows), (127, rows), (0, 0), (0, 1), (128, 1), (511, 1))
        case = Case(tiles, rows, 16, 2, 3, 64, "float32", sliding_window=sliding_window)
        scratch = make_problem(case, self.implementation).pool.spec.num_blocks
        check(make_problem(case, self.implementation, unread_block=scratch))

    def test_nan_in_the_block_that_stands_in_for_none(self) -> None:
        """Past the context the kernel takes block 0 for an address, and must not take what is in it."""
        cases = [Case(((4, 1), (20, 1), (0, 1)), 1, 16, 2, 4, 64, "float32", seed=seed) for seed in range(9)]
        problems = [make_problem(case, self.implementation) for case in cases]
        check(next(problem for problem in problems if 0 not in problem.block_tables))

    def test_every_part_but_the_first_is_empty(self) -> None:
        case = Case(((100, 1), (3, 1)), 1, 16, 2, 4, 64, "float32", has_sinks=True, spare_columns=60)
        check(make_problem(case, self.implementation))

    @pytest.mark.parametrize("first", [60, 1000])
    def test_a_sink_counts_once(self, first: int) -> None:
        """Of a sink as high as the keys' logits together, half the output is left, in one part or in eight."""
        pool = init_kv_pool(64, 16, 1, 64, "float32", self.implementation)
        position = jnp.arange(first + 1)
        k, v = jnp.zeros((first + 1, 1, 64)), jnp.ones((first + 1, 1, 64))
        pool = write_kv(pool, k, v, position // 16, position % 16)
        out = paged_attention(
            jnp.ones((1, 1, 2, 64)),
            pool,
            jnp.arange(64)[None],
            jnp.array([first]),
            jnp.array([1]),
            scale=1.0,
            sinks=jnp.full(2, np.log(first + 1), jnp.float32),
        )
        np.testing.assert_allclose(out, 0.5, rtol=1e-5)

    @pytest.mark.parametrize(("q_dtype", "pool_dtype"), [("float32", "bfloat16"), ("bfloat16", "float32")])
    def test_queries_and_pool_of_different_dtypes(self, q_dtype: str, pool_dtype: str) -> None:
        """The products are in float32 then: the tolerance is float32's, but for the rounding of the result."""
        problem = make_problem(Case(((70, 5), (0, 3)), 5, 16, 2, 2, 64, "bfloat16"), self.implementation)
        arrays = tuple(array.astype(pool_dtype) for array in problem.pool.arrays)
        pool = KVPool(arrays, replace(problem.pool.spec, dtype=jnp.dtype(pool_dtype)), self.implementation)
        got = replace(problem, q=problem.q.astype(q_dtype), pool=pool).attend()
        assert got.dtype == q_dtype
        tolerance = 2e-5 if q_dtype == "float32" else 4e-3
        np.testing.assert_allclose(np.asarray(got, np.float32), problem.want, atol=tolerance, rtol=tolerance)

    @pytest.mark.parametrize(
        ("block_size", "head_dim", "dtype", "named"),
        [
            (16, 80, "bfloat16", "head_dim 80"),
            (12, 64, "bfloat16", "block_size 12"),
            (8, 64, "bfloat16", "block_size 8"),
            (16, 64, "float16", "float16"),
            (16, 64, "int8", "int8"),
        ],
    )
    def test_pools_it_does_not_take(self, block_size: int, head_dim: int, dtype: str, named: str) -> None:
        with pytest.raises(NotImplementedError, match=f"64, 96, 128, 256.*multiple of 16.*bfloat16.*not.*{named}"):
            init_kv_pool(4, block_size, 2, head_dim, dtype, self.implementation)


def test_without_a_gpu_the_kernel_refuses() -> None:
    """It is not replaced by another in silence."""
    with pytest.raises(ValueError, match="CPU"):
        make_problem(Case(((5, 1),), 1, 16, 1, 1, 64, "float32"), "gpu").attend()


@pytest.mark.parametrize("implementation", ["gpu", "gpu_interpret"])
def test_a_donated_pool_is_written_in_place(implementation: str) -> None:
    pool = init_kv_pool(100, 16, 2, 64, "bfloat16", implementation)
    rows, index = jnp.ones((3, 2, 64)), jnp.arange(3)
    memory = jax.jit(write_kv, donate_argnums=0).lower(pool, rows, rows, index, index).compile().memory_analysis()
    size = sum(array.nbytes for array in pool.arrays)
    assert memory.alias_size_in_bytes == size
    assert memory.temp_size_in_bytes < size / 20


@given(
    begin=st.integers(0, 5000),
    length=st.integers(0, 5000),
    parts=st.integers(1, 64),
    sizes=st.builds(TileSizes, st.sampled_from([16, 64]), st.sampled_from([16, 64, 128]), st.just(4), st.just(3)),
)
def test_parts_are_the_context(begin: int, length: int, parts: int, sizes: TileSizes) -> None:
    """One after another without a gap, empty ones last; equal, whole turns and not too small, but for the last one."""
    end = begin + length
    bounds = [part_bounds(jnp.int32(begin), jnp.int32(end), jnp.int32(i), parts, sizes) for i in range(parts)]
    used = [(int(b), int(e)) for b, e in bounds if e > b]
    assert all(e > b for b, e in bounds[: len(used)])
    assert np.concatenate([np.arange(b, e) for b, e in used] or [[]]).tolist() == list(range(begin, end))
    lengths = [e - b for b, e in used][:-1]
    assert all(n == lengths[0] and n % sizes.positions == 0 and n >= sizes.smallest_part for n in lengths)


def test_parts_fill_the_chip_and_no_more() -> None:
    """Programs are sequences x KV heads. One sequence of 32k positions fills 132 multiprocessors; a full batch needs no
    parts; none is too small."""
    sizes = TileSizes(rows=16, positions=64, num_warps=4, num_stages=3)
    assert num_parts(8, 32768, sizes) == MOST_PARTS
    assert num_parts(64 * 8, 4096, sizes) == 2
    assert num_parts(256 * 8, 32768, sizes) == 1
    assert num_parts(1, 512, sizes) == 4
    assert num_parts(1, 1, sizes) == 1
