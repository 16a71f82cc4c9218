"""Hugging Face safetensors to and from the engine's tensors, streamed: no conversion step, no whole model in memory."""
