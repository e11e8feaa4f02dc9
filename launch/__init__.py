"""Commands for the user: tt-tpu doctor and tt-tpu serve, and the demonstration."""
