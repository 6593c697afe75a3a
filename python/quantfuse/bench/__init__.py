# SPDX-License-Identifier: Apache-2.0
"""Benchmarks that are run as modules: ``python -m quantfuse.bench.model``."""
