"""Runs pytest on the folders that BUILD.bazel names, with the packages and the plugin that Bazel built."""

import sys

import pytest

sys.exit(pytest.main(sys.argv[1:]))
