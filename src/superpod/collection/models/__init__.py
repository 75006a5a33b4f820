"""A file per model family: its functions, decorated with `registry.model`, are the models."""

ORDER = (
    "llama",
    "llama_nemotron",
    "nemotron",
    "qwen",
    "mistral",
    "deepseek",
    "gemma",
    "gpt",
    "others",
    "ssm",
    "encoders",
    "tiny",
)
"""The families that `recipes list` shows first, in this order; any other file of this folder follows by name."""
