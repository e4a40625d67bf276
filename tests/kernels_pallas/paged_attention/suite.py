"""What every implementation of paged attention must do. A test class names its implementation and inherits this."""

from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from kernels_pallas.paged_attention import init_kv_pool, paged_attention, write_kv
from tests.kernels_pallas.paged_attention.cases import Case, Problem, draw_case, make_problem

LENGTHS = ("block_tables", "first_position", "num_tokens")
TOLERANCE = {"float32": 2e-5, "bfloat16": 2e-2}


def check(problem: Problem) -> None:
    got = problem.attend()
    assert got.dtype == problem.q.dtype
    tolerance = TOLERANCE[problem.case.dtype]
    np.testing.assert_allclose(np.asarray(got, np.float32), problem.want, atol=tolerance, rtol=tolerance)


class PagedAttentionSuite:
    """block_sizes, head_dims, rows: what the drawn cases are made of."""

    implementation: str
    block_sizes: tuple[int, ...] = (16, 32, 256)
    head_dims: tuple[int, ...] = (64, 96, 128, 256)
    rows: tuple[int, ...] = (1, 5, 32)
    block_size = 16
    head_dim = 64

    @given(data=st.data())
    # Each implementation's class runs this one method, which is what the check warns of.
    @settings(max_examples=40, deadline=None, suppress_health_check=[HealthCheck.differing_executors])
    def test_equals_the_dense_definition(self, data: st.DataObject) -> None:
        """With NaN in every place that no live position owns, in the scratch block and in the padding rows."""
        strategy = draw_case(block_sizes=self.block_sizes, head_dims=self.head_dims, rows=self.rows)
        check(make_problem(data.draw(strategy), self.implementation))

    @pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
    @pytest.mark.parametrize("sliding_window", [None, 700])
    def test_contexts_of_thousands(self, dtype: str, sliding_window: int | None) -> None:
        tiles = ((0, 1), (4095, 1), (0, 0), (1023, 1), (1024, 1), (2777, 1))
        check(make_problem(self.long(tiles, 1, dtype, sliding_window), self.implementation))
        tiles = ((2048 - 32, 32), (0, 32), (0, 0), (3001, 17))
        check(make_problem(self.long(tiles, 32, dtype, sliding_window), self.implementation))

    def long(self, tiles: tuple[tuple[int, int], ...], rows: int, dtype: str, sliding_window: int | None) -> Case:
        return Case(tiles, rows, 32, 2, 2, self.head_dim, dtype, sliding_window=sliding_window, has_sinks=True)

    def test_a_write_changes_its_place_alone(self) -> None:
        pool = init_kv_pool(3, self.block_size, 2, self.head_dim, "float32", self.implementation)
        ones = jnp.ones((2, 2, self.head_dim))
        before = jax.tree.map(np.asarray, pool)
        after = write_kv(pool, ones, 2 * ones, jnp.array([1, 3]), jnp.array([2, 0]))
        changed = sum(
            int((a != np.asarray(b)).sum())
            for a, b in zip(jax.tree.leaves(before), jax.tree.leaves(after), strict=True)
        )
        assert changed == 2 * 2 * 2 * self.head_dim  # K and V, rows, heads, head_dim

    def test_narrow_integers_do_not_overflow(self) -> None:
        problem = make_problem(self.long(((100, 1), (60, 1)), 1, "float32", 20), self.implementation)
        narrow = {"first_position": np.int8, "num_tokens": np.int8, "block_tables": np.int16}
        check(replace(problem, **{name: getattr(problem, name).astype(dtype) for name, dtype in narrow.items()}))

    def test_a_head_without_a_sink(self) -> None:
        """Its sink is -inf, as in a checkpoint that has them for some heads."""
        problem = make_problem(self.long(((100, 1), (0, 1), (900, 1)), 1, "float32", 20), self.implementation)
        without = replace(problem, sinks=None).attend()
        got = replace(problem, sinks=problem.sinks.at[1].set(-jnp.inf)).attend()
        assert not jnp.isnan(got).any()
        np.testing.assert_allclose(got[:, :, 1], without[:, :, 1], atol=2e-6)
        np.testing.assert_allclose(got[:, :, 0], problem.want[:, :, 0], atol=2e-5)

    def test_queries_wider_than_the_pool(self) -> None:
        """Nothing of float32 queries is rounded to the pool's bfloat16."""
        problem = make_problem(self.long(((100, 1), (60, 1)), 1, "bfloat16", None), self.implementation)
        got = replace(problem, q=problem.q.astype(jnp.float32)).attend()
        np.testing.assert_allclose(got, problem.want, atol=2e-5)

    def test_nothing_to_attend_from(self) -> None:
        problem = make_problem(self.long(((100, 1),), 1, "float32", None), self.implementation)
        none = replace(problem, **{name: getattr(problem, name)[:0] for name in ("q", *LENGTHS)})
        assert none.attend().shape == (0, *problem.q.shape[1:])

    def test_no_tile_at_all_has_a_token(self) -> None:
        check(make_problem(Case(((0, 0), (40, 0)), 1, 32, 2, 2, self.head_dim, "float32"), self.implementation))

    def test_shapes_that_disagree_are_refused(self) -> None:
        d = self.head_dim
        pool = init_kv_pool(3, self.block_size, 2, d, "float32", self.implementation)
        q, tables, one = jnp.ones((1, 1, 4, d)), jnp.zeros((1, 2), jnp.int32), jnp.ones(1, jnp.int32)
        with pytest.raises(ValueError, match="block_tables"):
            paged_attention(q, pool, jnp.zeros((2, 2), jnp.int32), one, one, scale=1.0)
        with pytest.raises(ValueError, match="2 heads"):
            paged_attention(jnp.ones((1, 1, 3, d)), pool, tables, one, one, scale=1.0)
        with pytest.raises(ValueError, match=f"2 heads of {d}"):
            paged_attention(jnp.ones((1, 1, 4, d + 1)), pool, tables, one, one, scale=1.0)
        with pytest.raises(ValueError, match="sinks"):
            paged_attention(q, pool, tables, one, one, scale=1.0, sinks=jnp.ones(3))
        for window in (0, -1, 2.5, np.nan, 2**31, True):
            with pytest.raises(ValueError, match="sliding_window"):
                paged_attention(q, pool, tables, one, one, scale=1.0, sliding_window=window)
        for cap in (0.0, -1, np.nan, np.inf):
            with pytest.raises(ValueError, match="logits_soft_cap"):
                paged_attention(q, pool, tables, one, one, scale=1.0, logits_soft_cap=cap)
        for scale in (None, np.nan, np.inf, jnp.ones(())):
            with pytest.raises(ValueError, match="scale"):
                paged_attention(q, pool, tables, one, one, scale=scale)
        for wrong in (jnp.ones((1, 1), jnp.int32), jnp.ones(2, jnp.int32), jnp.int32(1)):
            with pytest.raises(ValueError, match="first_position"):
                paged_attention(q, pool, tables, wrong, one, scale=1.0)
        for dtype in (jnp.float32, jnp.bool):
            with pytest.raises(ValueError, match="block_tables must be integers"):
                paged_attention(q, pool, tables.astype(dtype), one, one, scale=1.0)
            with pytest.raises(ValueError, match="num_tokens must be integers"):
                paged_attention(q, pool, tables, one, one.astype(dtype), scale=1.0)
        with pytest.raises(ValueError, match="no column"):
            paged_attention(q, pool, tables[:, :0], one, one, scale=1.0)
        with pytest.raises(ValueError, match="offset"):
            write_kv(pool, jnp.ones((2, 2, d)), jnp.ones((2, 2, d)), one, one)
        with pytest.raises(ValueError, match="2 heads"):
            write_kv(pool, jnp.ones((1, 3, d)), jnp.ones((1, 3, d)), one, one)
