"""The real SmolLM2 through `LLM`: the trace's worked example to the character, streams, and chats."""

import numpy as np
import pytest

import checkpoints
from jaxpaged.llm import LLM
from jaxpaged.sampling_params import SamplingParams
from jaxpaged.trace import Event, check_events, format_events

PROMPT_LENS = (17, 40, 9, 25, 3, 33, 12, 6)
GREEDY = SamplingParams(temperature=0, max_tokens=64, ignore_eos=True)


@pytest.fixture(scope="module")
def heard() -> list[Event]:
    return []


@pytest.fixture(scope="module")
def llm(heard) -> LLM:
    """A small number of shapes to compile. Its first eight requests are those of the worked example."""
    llm = LLM(
        checkpoints.SMOLLM2,
        block_size=256,
        max_num_seqs=8,
        max_num_batched_tokens=128,
        max_model_len=512,
        trace=heard.append,
    )
    rng = np.random.default_rng(0)
    llm.generate([rng.integers(3, 49152, length) for length in PROMPT_LENS], GREEDY, use_tqdm=False)
    return llm


@pytest.fixture(scope="module")
def lines(llm, heard) -> list[str]:
    return list(format_events(heard))


def test_decode_59_is_the_line_of_the_worked_example(lines) -> None:
    of_seq_7 = [line for line in lines if line.startswith("seq[  7]")]
    assert of_seq_7[59] == (
        "seq[  7] prompt_len=    6 total_len=   65 blocks=  1 cached=   64 scheduled=   1 blocks=[7]"
    )
    assert len(of_seq_7) == 64


def test_every_line_of_the_worked_example(lines) -> None:
    """145 prompt tokens and a budget of 128: the prompts are consumed in two steps, then 63 decodes for the last."""
    of_seq_7 = [line for line in lines if line.startswith("seq[  7]")]
    assert of_seq_7[0] == (
        "seq[  7] prompt_len=    6 total_len=    6 blocks=  1 cached=    0 scheduled=   6 blocks=[7]"
    )
    for n in range(1, 64):
        assert of_seq_7[n] == (
            f"seq[  7] prompt_len=    6 total_len={n + 6:5d} blocks=  1 cached={n + 5:5d} scheduled=   1 blocks=[7]"
        )
    assert lines[:8] == [
        f"ADDED: seq[{seq}] prompt_len={prompt_len} max_tokens=64" for seq, prompt_len in enumerate(PROMPT_LENS)
    ]
    assert lines[8] == "PRE-FILL step=0 seqs=7 tokens=128"
    assert "PRE-FILL step=1 seqs=2 tokens=17" in lines and "DECODE step=1 seqs=6 tokens=6" in lines
    assert lines[-1] == "FINISHED: seq[7] prompt=6 + generated=64 = 70 total"
    assert sum(line.startswith("FINISHED") for line in lines) == 8


def test_the_trace_is_sound(llm, heard) -> None:
    config = llm.engine.config
    limits = ("block_size", "num_blocks", "max_num_seqs", "max_num_batched_tokens", "max_model_len")
    assert check_events(heard, **{name: getattr(config, name) for name in limits}, complete=True) == []


@pytest.mark.parametrize(
    "prompt", ["Say hello in Japanese, Arabic and Hindi, with emoji.", "Write a Python function that adds two numbers."]
)
def test_a_chat_streams_the_text_that_generate_returns(llm, lines, prompt) -> None:
    params = SamplingParams(temperature=0, max_tokens=40)
    messages = [{"role": "user", "content": prompt}]
    (whole,) = llm.chat(messages, params, use_tqdm=False)
    pieces = list(llm.stream(llm.chat_prompt(messages), params))
    assert "".join(piece.text for piece in pieces) == whole.outputs[0].text != ""
    assert [token for piece in pieces for token in piece.token_ids] == whole.outputs[0].token_ids
    assert len(pieces) > 10


def test_it_answers_and_stops(llm, lines) -> None:
    """What its torch original says, too: see tests/golden/smollm2_greedy.json."""
    params = SamplingParams(temperature=0, max_tokens=40)
    (output,) = llm.chat([{"role": "user", "content": "What is the capital of France?"}], params, use_tqdm=False)
    assert output.outputs[0].text == "The capital of France is Paris."
    assert output.outputs[0].finish_reason == "stop" and output.outputs[0].token_ids[-1] == 2
