from kernels_pallas.paged_attention.tpu.attend import TPU as TPU
