from tests.kernels_pallas.paged_attention.suite import PagedAttentionSuite


class TestTPU(PagedAttentionSuite):
    implementation = "tpu_interpret"
