"""The build backend: scikit-build-core's, with an editable install that imports nothing.

scikit-build-core's own editable install puts an import hook of its own into
every start of the interpreter. Ours is a wheel that holds nothing but the
`.pth` (the folder of the sources, then the line that starts the bridge); the
plugin is built into the source tree, where a wheel would have it.
"""

import os

from scikit_build_core import build as _scikit_build_core
from scikit_build_core.build import (  # noqa: F401  (hooks of PEP 517)
    build_sdist,
    build_wheel,
    get_requires_for_build_sdist,
    get_requires_for_build_wheel,
    prepare_metadata_for_build_wheel,
)


def get_requires_for_build_editable(config_settings=None):
    """The same tools as for a wheel."""
    return _scikit_build_core.get_requires_for_build_wheel(config_settings)


def build_editable(wheel_directory, config_settings=None, metadata_directory=None):
    """A wheel that points to the sources; see pyproject.toml's override and CMakeLists.txt."""
    os.environ["TT_TPU_EDITABLE"] = "1"
    try:
        return _scikit_build_core.build_wheel(wheel_directory, config_settings, metadata_directory)
    finally:
        del os.environ["TT_TPU_EDITABLE"]
