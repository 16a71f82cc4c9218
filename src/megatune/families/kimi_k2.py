"""Kimi-K2: DeepSeek-V3's architecture with its own model_type, published in fp8 blocks."""

from dataclasses import replace

from megatune.families import deepseek_v3

FAMILY = replace(deepseek_v3.FAMILY, model_type="kimi_k2", mtp=None, computed_as="deepseek_v3")
