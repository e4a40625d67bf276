"""Which machines can run the TPU compiler. There it has to be installed: these tests never skip for its absence."""

import platform
import sys

import pytest

needs_tpu_compiler = pytest.mark.skipif(
    (sys.platform, platform.machine()) != ("linux", "x86_64"),
    reason=f"libtpu, the TPU compiler, exists for Linux on x86_64 only, not for {sys.platform} on {platform.machine()}",
)
