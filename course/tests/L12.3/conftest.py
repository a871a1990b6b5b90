"""The file under test: the one named by OL_FILE (a workspace or a mutant), else the reference."""

import importlib.util
import os
import sys

import pytest


@pytest.fixture(scope="session")
def grpo():
    path = os.environ.get("OL_FILE")
    if path is None:
        return importlib.import_module("tinyllm.post.grpo")
    spec = importlib.util.spec_from_file_location("grpo_under_test", path)
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module  # dataclasses look their module up by name
    spec.loader.exec_module(module)
    return module
