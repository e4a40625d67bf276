from kernels_pallas.paged_attention.gpu.attend import GPU as GPU
