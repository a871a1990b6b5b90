"""Options: frozen dataclasses by section, TOML files, command-line overrides, strict keys."""

from tinyllm.config.sections import DPOConfig, GRPOConfig, SFTConfig

__all__ = ["DPOConfig", "GRPOConfig", "SFTConfig"]
