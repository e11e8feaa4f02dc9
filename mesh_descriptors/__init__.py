"""Descriptions of board sets (one mesh graph descriptor of tt-metal's a file) and the function that picks one."""

from mesh_descriptors.catalogue import Mesh, describe, load, select
from mesh_descriptors.errors import MeshError

__all__ = ["Mesh", "MeshError", "describe", "load", "select"]
