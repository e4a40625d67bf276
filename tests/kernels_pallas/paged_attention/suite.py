"""What every implementation of paged attention must do. A test class names its implementation and inherits this."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kernels_pallas.paged_attention import init_kv_pool, paged_attention, write_kv
from tests.kernels_pallas.paged_attention.dense import dense_attention

TOLERANCE = {"float32": 2e-5, "bfloat16": 2e-2}


@st.composite
def cases(draw: st.DrawFn) -> dict:
    block_size = draw(st.sampled_from([1, 4, 16, 256]))
    edges = [block_size - 1, block_size, block_size + 1, 2 * block_size]
    tiles = draw(
        st.lists(
            st.tuples(
                st.one_of(st.sampled_from(edges), st.integers(0, 40)),  # first position
                st.integers(0, 5),  # tokens
            ),
            min_size=1,
            max_size=4,
        )
    )
    return {
        "block_size": block_size,
        "tiles": tiles,
        "rows": draw(st.sampled_from([1, 5, 8])),
        "num_kv_heads": draw(st.sampled_from([1, 2, 3])),
        "group": draw(st.sampled_from([1, 3, 4])),
        "head_dim": draw(st.sampled_from([8, 64])),
        "dtype": draw(st.sampled_from(["float32", "bfloat16"])),
        "spare_columns": draw(st.integers(0, 3)),
        "shared": draw(st.booleans()),
        "seed": draw(st.integers(0, 2**16)),
    }


class PagedAttentionSuite:
    implementation: str

    @given(case=cases())
    @settings(max_examples=30, deadline=None)
    def test_equals_the_dense_definition(self, case: dict) -> None:
        """With NaN in every place that no live position owns, in the scratch block and in the padding rows."""
        rng = np.random.default_rng(case["seed"])
        block_size, num_kv_heads, head_dim = case["block_size"], case["num_kv_heads"], case["head_dim"]
        first = [position for position, _ in case["tiles"]]
        count = [min(tokens, case["rows"]) for _, tokens in case["tiles"]]
        lengths = [f + c if c else 0 for f, c in zip(first, count, strict=True)]
        if case["shared"]:  # all tiles read one sequence's blocks
            lengths = [max(lengths)] * len(lengths)
        dtype = jnp.dtype(case["dtype"])
        needed = [-(-length // block_size) for length in lengths]
        num_blocks = sum(needed) + 2
        free = list(rng.permutation(num_blocks))
        tables = np.full((len(first), max(1, *needed) + case["spare_columns"]), num_blocks, np.int32)
        pool = init_kv_pool(num_blocks, block_size, num_kv_heads, head_dim, dtype, self.implementation)
        pool = jax.tree.map(lambda x: jnp.full_like(x, jnp.nan), pool)
        keys, values = [], []
        for n, length in enumerate(lengths):
            if case["shared"] and n:
                tables[n], k, v = tables[0], keys[0], values[0]
            else:
                tables[n, : needed[n]] = [free.pop() for _ in range(needed[n])]
                k, v = (
                    np.asarray(
                        jnp.asarray(rng.standard_normal((length, num_kv_heads, head_dim)), dtype).astype(jnp.float32)
                    )
                    for _ in range(2)
                )
                position = np.arange(length)
                pool = write_kv(
                    pool,
                    jnp.asarray(k, dtype),
                    jnp.asarray(v, dtype),
                    tables[n][position // block_size],
                    position % block_size,
                )
            keys.append(k)
            values.append(v)
        num_heads = num_kv_heads * case["group"]
        q = np.array(
            jnp.asarray(rng.standard_normal((len(first), case["rows"], num_heads, head_dim)), dtype).astype(jnp.float32)
        )
        for n, tokens in enumerate(count):
            q[n, tokens:] = np.nan
        scale = head_dim**-0.5
        got = paged_attention(
            jnp.asarray(q, dtype), pool, jnp.asarray(tables), jnp.asarray(first), jnp.asarray(count), scale=scale
        )
        assert got.dtype == dtype
        want = dense_attention(q, keys, values, first, count, scale)
        np.testing.assert_allclose(
            np.asarray(got, np.float32), want, atol=TOLERANCE[case["dtype"]], rtol=TOLERANCE[case["dtype"]]
        )

    def test_a_write_changes_its_place_alone(self) -> None:
        pool = init_kv_pool(3, 4, 2, 8, jnp.dtype("float32"), self.implementation)
        ones = jnp.ones((2, 2, 8))
        before = jax.tree.map(np.asarray, pool)
        after = write_kv(pool, ones, 2 * ones, jnp.array([1, 3]), jnp.array([2, 0]))
        changed = sum(
            int((a != np.asarray(b)).sum())
            for a, b in zip(jax.tree.leaves(before), jax.tree.leaves(after), strict=True)
        )
        assert changed == 2 * 2 * 2 * 8  # K and V, rows, heads, head_dim

    def test_shapes_that_disagree_are_refused(self) -> None:
        pool = init_kv_pool(3, 4, 2, 8, jnp.dtype("float32"), self.implementation)
        q, tables, one = jnp.ones((1, 1, 4, 8)), jnp.zeros((1, 2), jnp.int32), jnp.ones(1, jnp.int32)
        with pytest.raises(ValueError, match="block_tables"):
            paged_attention(q, pool, jnp.zeros((2, 2), jnp.int32), one, one, scale=1.0)
        with pytest.raises(ValueError, match="heads"):
            paged_attention(jnp.ones((1, 1, 3, 8)), pool, tables, one, one, scale=1.0)
        with pytest.raises(ValueError, match="offset"):
            write_kv(pool, jnp.ones((2, 2, 8)), jnp.ones((2, 2, 8)), one, one)
