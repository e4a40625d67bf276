"""Reading a compiled program's text, on one written for it: a loop with a sort, a scan, a switch and a kernel."""

import jax
import jax.numpy as jnp

from benchmarks.hlo import Module, count_step

TEXT = """\
HloModule jit_run, is_scheduled=true

FileNames
1 "run.py"

FunctionNames
1 "run_loop"
2 "make_schedule"
3 "sample"

FileLocations
1 {file_name_id=1 function_name_id=1 line=1 end_line=1 column=1 end_column=2}
2 {file_name_id=1 function_name_id=2 line=2 end_line=2 column=1 end_column=2}
3 {file_name_id=1 function_name_id=3 line=3 end_line=3 column=1 end_column=2}

StackFrames
1 {file_location_id=1 parent_frame_id=1}
2 {file_location_id=2 parent_frame_id=2}
3 {file_location_id=3 parent_frame_id=2}


%few.1 (p: s32[8]) -> s32[8] {
  %p = s32[8]{0:T(128)} parameter(0)
  ROOT %f.1 = s32[8]{0:T(128)} fusion(%p), kind=kLoop, calls=%c
}

%many.1 (p: s32[8]) -> s32[8] {
  %p = s32[8]{0:T(128)} parameter(0)
  %f.1 = s32[8]{0:T(128)} fusion(%p), kind=kLoop, calls=%c, metadata={op_name="x" stack_frame_id=3}
  ROOT %f.2 = s32[8]{0:T(128)} fusion(%f.1), kind=kLoop, calls=%c, metadata={op_name="x" stack_frame_id=3}
}

%body.1 (arg: (s32[8], bf16[9,16,256])) -> (s32[8], bf16[9,16,256]) {
  %arg = (s32[8]{0:T(128)}, bf16[9,16,256]{2,1,0:T(8,128)(2,1)}) parameter(0)
  %x = s32[8]{0:T(128)} get-tuple-element(%arg), index=0
  %pool = bf16[9,16,256]{2,1,0:T(8,128)(2,1)} get-tuple-element(%arg), index=1
  %s = (s32[8]{0:T(128)}, s32[8]{0:T(128)}) sort(%x, %x), dimensions={0}, metadata={op_name="x" stack_frame_id=2}
  %i = s32[]{:T(128)} add(%i0, %i1), metadata={op_name="x" stack_frame_id=2}
  %t = (bf16[9,16,256]{2,1,0:T(8,128)(2,1)S(1)}, bf16[9,16,256]{2,1,0:T(8,128)(2,1)}, u32[]{:S(2)}) copy-start(%pool)
  %r = s32[8]{0:T(128)} reduce-window(%x, %z), window={size=8}
  %k = bf16[4,128]{1,0:T(4,128)(2,1)} custom-call(%x, %pool), custom_call_target="tpu_custom_call", \
operand_layout_constraints={s32[8]{0}, bf16[9,16,256]{2,1,0}}, frontend_attributes={a={}}, \
backend_config={"custom_call_config":{"cost_estimate":{"flops":"7","bytes_accessed":"4096"}},\
"used_scoped_memory_configs":[{"memory_space":"1","offset":"0","size":"3000"},\
{"memory_space":"5","offset":"0","size":"70"}]}
  %q = (s32[8]{0:T(128)}) conditional(%i, %x, %x), branch_computations={%few.1, %many.1}, \
metadata={op_name="x" stack_frame_id=3}
  ROOT %out = (s32[8]{0:T(128)}, bf16[9,16,256]{2,1,0:T(8,128)(2,1)}) tuple(%r, %pool)
}

ENTRY %main.1 (a: s32[8], b: bf16[9,16,256]) -> (s32[8], bf16[9,16,256]) {
  %a = s32[8]{0:T(128)} parameter(0)
  ROOT %w = (s32[8]{0:T(128)}, bf16[9,16,256]{2,1,0:T(8,128)(2,1)}) while(%in), condition=%few.1, body=%body.1
}
"""


def test_a_kernel_is_read() -> None:
    (kernel,) = Module.parse(TEXT).kernels
    assert kernel.vmem_bytes == 3000
    assert kernel.declared_bytes == 4096
    assert kernel.operand_bytes == [8 * 4, 9 * 16 * 256 * 2]
    assert kernel.result_bytes == 4 * 128 * 2


def test_a_copy_is_found_by_shape_and_dtype() -> None:
    module = Module.parse(TEXT)
    assert len(module.copies(jax.ShapeDtypeStruct((9, 16, 256), jnp.bfloat16))) == 1
    assert not module.copies(jax.ShapeDtypeStruct((9, 16, 256), jnp.float32))
    assert not module.copies(jax.ShapeDtypeStruct((9, 16, 25), jnp.bfloat16))


def test_frames_lead_to_functions() -> None:
    module = Module.parse(TEXT)
    (sort,) = [i for i in module.instructions if i.opcode == "sort"]
    assert module.functions(sort) == ["run_loop", "make_schedule"]


def test_a_step_is_counted_by_part() -> None:
    """Neither scalars, names, nor transfers; of the sampling switch its widest branch."""
    assert count_step(Module.parse(TEXT)) == {
        "make_schedule": {"sort": 1},
        "sample": {"conditional": 1, "fusion": 2},
        "other": {"reduce-window": 1, "custom-call": 1},
    }
