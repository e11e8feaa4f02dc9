"""Presents Tenstorrent chips, or emulated ones, as TPUs to torch_tpu, JAX and SGLang."""

__version__ = "0.1.0"
