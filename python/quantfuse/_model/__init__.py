# SPDX-License-Identifier: Apache-2.0
"""Whole models: what is quantized, what is fused, and the account of it."""
