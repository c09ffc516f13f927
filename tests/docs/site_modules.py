"""The modules of docs/site, which is no package: Sphinx loads its configuration by path."""

from __future__ import annotations

import importlib.util
import sys
from functools import cache
from pathlib import Path
from types import ModuleType

SITE = Path(__file__).parents[2] / "docs" / "site"


@cache
def load(name: str) -> ModuleType:
    """Return a module of docs/site."""
    spec = importlib.util.spec_from_file_location(name, SITE / f"{name}.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    spec.loader.exec_module(module)
    return module
