"""What is asked of XLA on a CPU."""

import jax
import jax.numpy as jnp
import pytest

from jaxpaged.engine import cpu
from jaxpaged.engine.cpu import compiler_options


@pytest.fixture(autouse=True)
def without_avx512(monkeypatch) -> None:
    monkeypatch.setattr(cpu, "cpu_features", lambda: frozenset({"fma", "avx2"}))


def test_few_rows_of_float32_are_multiplied_by_the_older_library() -> None:
    options = compiler_options(jnp.float32, 16)
    x = jnp.ones((8, 64))
    with_options = jax.jit(jnp.dot, compiler_options=options).lower(x, x.T).compile().as_text()
    assert "ynn" in jax.jit(jnp.dot).lower(x, x.T).compile().as_text()
    assert "dot(" in with_options and "ynn" not in with_options


@pytest.mark.parametrize(("dtype", "max_num_seqs"), [(jnp.float32, 17), (jnp.bfloat16, 1)])
def test_otherwise_nothing_is_asked(dtype: jnp.dtype, max_num_seqs: int) -> None:
    assert compiler_options(dtype, max_num_seqs) is None


def test_with_avx512_one_row_alone(monkeypatch) -> None:
    monkeypatch.setattr(cpu, "cpu_features", lambda: frozenset({"avx2", "avx512f"}))
    assert compiler_options(jnp.float32, 1)
    assert compiler_options(jnp.float32, 2) is None


def test_an_unknown_cpu_is_left_alone(monkeypatch) -> None:
    monkeypatch.setattr(cpu, "cpu_features", lambda: frozenset())
    assert compiler_options(jnp.float32, 1) is None
