"""Replacements for Pallas kernels, as `tt.*` calls; nothing here is imported before it is needed."""
