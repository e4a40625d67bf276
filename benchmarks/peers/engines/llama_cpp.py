"""llama.cpp through llama-cpp-python's low-level batches, with the continuous batching of its own server: each step
decodes every sequence that runs, and prompts fill what is left of the batch.

`LLM(...)` of that package serves one request at a time, so it is not what is measured. The weights stay as the GGUF
quantizes them; DTYPE is that of the KV cache (float16 or float32).
"""

import logging
import os
from collections.abc import Sequence
from importlib.metadata import version
from pathlib import Path

from benchmarks.peers.engines.protocol import Engine, TokenIds, serve

MAX_SEQUENCES, MAX_LENGTH, BATCH = 64, 512, 2048


def load(model: Path, dtype: str) -> Engine:
    import llama_cpp as lib  # type: ignore[import-not-found]
    import numpy as np

    # Else every tensor of every graph is told.
    logging.getLogger("llama-cpp-python").setLevel(logging.ERROR)
    threads = len(os.sched_getaffinity(0))
    lib.llama_backend_init()
    loaded = lib.llama_model_load_from_file(str(model).encode(), lib.llama_model_default_params())
    params = lib.llama_context_default_params()
    params.n_ctx, params.n_seq_max = MAX_SEQUENCES * MAX_LENGTH, MAX_SEQUENCES
    params.n_batch = BATCH
    params.n_threads = params.n_threads_batch = threads
    params.type_k = params.type_v = {"float16": lib.GGML_TYPE_F16, "float32": lib.GGML_TYPE_F32}[dtype]
    # A cache for each sequence: llama.cpp's advice where prompts share no long prefix.
    params.kv_unified = False
    context = lib.llama_init_from_model(loaded, params)
    if not loaded or not context:
        raise RuntimeError(f"llama.cpp cannot load {model}")
    vocab_size = lib.llama_vocab_n_tokens(lib.llama_model_get_vocab(loaded))
    memory = lib.llama_get_memory(context)
    batch = lib.llama_batch_init(BATCH, 0, 1)

    def step(rows: list[tuple[int, int, int, bool]]) -> list[int]:
        """Compute rows (token, position, sequence, whether it samples): the most likely tokens of those that do."""
        batch.n_tokens = len(rows)
        for index, (token, position, sequence, samples) in enumerate(rows):
            batch.token[index], batch.pos[index] = token, position
            batch.n_seq_id[index], batch.seq_id[index][0] = 1, sequence
            batch.logits[index] = samples
        status = lib.llama_decode(context, batch)
        if status:
            raise RuntimeError(f"llama_decode ended with {status}")
        sampling = [index for index, row in enumerate(rows) if row[3]]
        logits = [np.ctypeslib.as_array(lib.llama_get_logits_ith(context, i), (vocab_size,)) for i in sampling]
        return [int(row.argmax()) for row in logits]

    def generate(prompts: Sequence[list[int]], lengths: Sequence[int]) -> TokenIds:
        lib.llama_memory_clear(memory, True)
        outputs: TokenIds = [[] for _ in prompts]
        computed = [0] * len(prompts)
        waiting, running, free = list(range(len(prompts))), dict[int, int](), list(range(MAX_SEQUENCES))
        while waiting or running:
            while waiting and free:
                running[waiting.pop(0)] = free.pop(0)
            rows: list[tuple[int, int, int, bool]] = []
            sampling: list[int] = []
            # Those that decode come first; the sort keeps the order of the others.
            for request in sorted(running, key=lambda request: not outputs[request]):
                known = prompts[request] + outputs[request]
                new = range(computed[request], len(known))[: BATCH - len(rows)]
                ends = new.stop == len(known) and len(new) > 0
                rows += [(known[i], i, running[request], ends and i == new[-1]) for i in new]
                computed[request] += len(new)
                sampling += [request] * ends
            for request, token in zip(sampling, step(rows), strict=True):
                outputs[request].append(token)
                if len(outputs[request]) == lengths[request]:
                    sequence = running.pop(request)
                    lib.llama_memory_seq_rm(memory, sequence, -1, -1)
                    free.append(sequence)
        return outputs

    return Engine(generate, {"version": version("llama-cpp-python"), "threads": threads})


if __name__ == "__main__":
    serve(load)
