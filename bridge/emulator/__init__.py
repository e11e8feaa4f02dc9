"""What the emulated chip computes where the inner plugin has no meaning of its own."""
