from dataclasses import dataclass

from jaxtyping import Array, Float, Int

from kernels_pallas.paged_attention.interface import PoolSpec, Variant


@dataclass(frozen=True)
class TPU:
    interpret: bool = False

    def check(self, spec: PoolSpec) -> None:
        raise NotImplementedError

    def init_arrays(self, spec: PoolSpec) -> tuple[Array, ...]:
        raise NotImplementedError

    def write(
        self,
        spec: PoolSpec,
        arrays: tuple[Array, ...],
        k: Float[Array, "T Hkv D"],
        v: Float[Array, "T Hkv D"],
        block: Int[Array, " T"],
        offset: Int[Array, " T"],
    ) -> tuple[Array, ...]:
        raise NotImplementedError

    def attend(
        self,
        spec: PoolSpec,
        arrays: tuple[Array, ...],
        q: Float[Array, "N Q H D"],
        block_tables: Int[Array, "N M"],
        first_position: Int[Array, " N"],
        num_tokens: Int[Array, " N"],
        sinks: Float[Array, " H"] | None,
        variant: Variant,
    ) -> Float[Array, "N Q H D"]:
        raise NotImplementedError
