"""Fine-tune large language models with Megatron-Core, from Hugging Face to Hugging Face."""

__version__ = "0.1.0"
