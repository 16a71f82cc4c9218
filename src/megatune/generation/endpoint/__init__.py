"""OpenAI's interface over HTTP: chat completions and completions, for trying a model right after training."""
