"""A step is a few launches around the model: on an accelerator each costs some microseconds, whatever its size."""

from benchmarks.tpu_launches import markdown, measure
from tests.tpu_compiler import needs_tpu_compiler

MOST = 60  # 58 by the compiler of today; another may fuse one or two less


@needs_tpu_compiler
def test_a_step_of_the_compiled_loop_has_few_launches() -> None:
    row = measure("qwen3-0.6b", "v5e")
    assert {"make_schedule", "allocate", "sample", "commit"} <= row.launches.keys()
    assert row.total <= MOST, "\n" + markdown([row])
