"""Loaded by every Python that starts below `lowtide run`: applies the budget, then loads the shadowed sitecustomize."""

import sys
from importlib.machinery import PathFinder
from importlib.util import module_from_spec
from pathlib import Path


def _begin() -> None:
    try:
        from lowtide.launch import startup
    except ImportError as error:
        _refuse_torch(f"{sys.executable} has no Lowtide ({error})")
    else:
        startup.prepare()


def _refuse_torch(reason: str) -> None:
    """End this process when it imports torch: it would train outside the budget."""

    class Refusal:
        def find_spec(self, name: str, _path: object, _target: object = None) -> None:
            if name == "torch":
                sys.stderr.write(f"lowtide: {reason}, so it would train outside the budget: install lowtide there\n")
                raise SystemExit(2)

    sys.meta_path.insert(0, Refusal())


def _go_on() -> None:
    """Load the `sitecustomize` that this one stands before, if there is one."""
    here = Path(__file__).resolve().parent
    spec = PathFinder.find_spec("sitecustomize", [path for path in sys.path if Path(path).resolve() != here])
    if spec is not None and spec.loader is not None:
        module = module_from_spec(spec)
        sys.modules["sitecustomize"] = module
        spec.loader.exec_module(module)


_begin()
_go_on()
