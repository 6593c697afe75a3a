# SPDX-License-Identifier: Apache-2.0
import numpy as np
import pytest
from hypothesis import settings

settings.register_profile("quantfuse", deadline=None, max_examples=40, derandomize=True)
settings.load_profile("quantfuse")


@pytest.fixture
def rng() -> np.random.Generator:
    return np.random.default_rng(20240607)
