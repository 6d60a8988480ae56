"""The vLLM plugin: the only package that knows vLLM. One small module for each hook."""
