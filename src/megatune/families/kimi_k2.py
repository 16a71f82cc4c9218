"""Kimi-K2: DeepSeek-V3's architecture under a name of its own, published in blocks of fp8."""

from dataclasses import replace

from megatune.families import deepseek_v3

FAMILY = replace(deepseek_v3.FAMILY, model_type="kimi_k2", mtp=None, computed_as="deepseek_v3")
