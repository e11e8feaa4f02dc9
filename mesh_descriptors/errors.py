"""What goes wrong with meshes: a descriptor that cannot be read, and a number of chips that no board set has."""


class MeshError(ValueError):
    """A mesh cannot be described: names what was asked for, and what fits."""
